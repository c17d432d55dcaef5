"""Updates: how the scores of a round move the weights."""

from __future__ import annotations

from mixwell.simplex.updates.base import RoundContext, Update, UpdateState
from mixwell.simplex.updates.mirror_descent import MirrorDescent, mirror_step
from mixwell.simplex.updates.projected_descent import ProjectedDescent
from mixwell.simplex.updates.smoothing import UniformSmoothing
from mixwell.simplex.updates.softmax import SoftmaxWeights
from mixwell.simplex.updates.step_size import FACTOR, LEAST_GAIN, AutoStepSize, trust

__all__ = [
    "FACTOR",
    "LEAST_GAIN",
    "AutoStepSize",
    "MirrorDescent",
    "ProjectedDescent",
    "RoundContext",
    "SoftmaxWeights",
    "UniformSmoothing",
    "Update",
    "UpdateState",
    "mirror_step",
    "resolve_update",
    "trust",
]


def resolve_update(update: Update | float | None) -> Update:
    """Return the update that a setting means.

    Args:
        update: a number is the step size of :class:`MirrorDescent`, ``None`` is ``MirrorDescent("auto")``.
    """
    if isinstance(update, Update):
        return update
    return MirrorDescent("auto" if update is None else update)
