"""What things cost beside a gradient of the same rows, for comparisons at equal compute."""

FORWARD = 1 / 3
"""A forward pass alone; a gradient is a forward and a backward pass, which takes about twice as long."""
VALIDATION_SHARE = 0.05
"""What the validation gradients of a round take of its training, where settings leave it open."""


def validation_rows(batch_rows: int, *, steps: int, points: int) -> int:
    """Rows of a validation gradient: at each of a round's points as many, a twentieth of its training in all.

    A round of fewer than twenty steps has one training batch in all, since a gradient of less says nothing.

    Args:
        batch_rows: of a training step.
        steps: of a round.
        points: validation gradients in a round.

    Returns:
        At least 1.

    Example:
        >>> validation_rows(32, steps=84, points=8), validation_rows(32, steps=1, points=1)
        (16, 32)
    """
    return max(1, int(batch_rows * max(VALIDATION_SHARE * steps, 1.0) / max(points, 1)))
