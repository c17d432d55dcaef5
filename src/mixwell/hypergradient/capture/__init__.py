"""Per-domain gradients from one backward pass of a mixed batch.

Layer hooks, a rule per layer type, row groups, accumulators and projections.
"""
