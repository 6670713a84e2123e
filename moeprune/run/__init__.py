"""What a run does, stage by stage, in one directory; grids of runs."""
