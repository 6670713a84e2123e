"""What a pruned or compressed model can still do, measured beside the original."""
