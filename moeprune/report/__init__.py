"""Reports and figures of runs and grids, from the files they left."""
