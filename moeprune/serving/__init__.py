"""Proof that a checkpoint answers in a serving engine as the pruned model answers in memory."""
