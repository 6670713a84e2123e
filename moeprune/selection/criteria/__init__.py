"""What pruning a set of experts costs: one criterion a file."""
