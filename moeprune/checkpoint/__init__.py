"""Checkpoints on disk: read, edited byte for byte, checked, and put in place as a whole."""
