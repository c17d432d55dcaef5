"""What things cost beside a gradient of the same rows, for comparisons at equal compute."""

FORWARD = 1 / 3
"""A forward pass alone; a gradient is a forward and a backward pass, which takes about twice as long."""
VALIDATION_BATCHES = 8
"""Batches of a validation gradient at most, where settings leave it open."""
