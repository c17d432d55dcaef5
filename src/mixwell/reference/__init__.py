"""Exact and closed-form references.

Exact unrolls, quadratics, the paper's bounds, and the agreement of an estimate with the exact hypergradient.
"""
