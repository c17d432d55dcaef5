"""The weights of the domains: updates, constraints, horizons and rounds. NumPy only."""
