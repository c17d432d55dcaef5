"""The cost of a computation relative to others."""

FORWARD = 1 / 3
"""Cost of a forward pass, in gradients of the same rows: a backward pass takes about twice as long."""
