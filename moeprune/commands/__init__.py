"""The commands: one file each, with its options and what it does."""
