"""The weights of the domains and what moves or bounds them.

Updates, constraints, horizons and rounds, with their formulas. NumPy only.
"""
