"""Sets of experts of least cost under a budget: one solver a file."""
