"""Exact and closed-form references.

Exact unrolls, quadratics, the paper's bounds, and how closely an estimate agrees with the exact hypergradient.
"""
