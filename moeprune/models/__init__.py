"""What differs between model families, and how a model is found, opened and pruned in memory."""
