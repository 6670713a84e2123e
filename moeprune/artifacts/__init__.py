"""What crosses rooms as files: routing statistics, prune plans, metrics. No torch, no model code."""
