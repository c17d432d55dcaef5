"""The weights of the domains: updates, constraints, horizons and rounds, with their formulas. NumPy only."""
