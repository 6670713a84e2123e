"""Which experts to keep, from routing statistics alone: criteria, budgets, solvers."""
