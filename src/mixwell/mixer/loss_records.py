"""Losses on their way from the scopes to the signal."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mixwell.mixer.batch import MixtureBatch
from mixwell.mixer.scopes import BatchScope, DomainScope
from mixwell.signals import Signal


def expect_recorded(signal: Signal, scope: DomainScope) -> None:
    """Raise a ValueError if a signal requires losses that a scope of a domain has not recorded."""
    if signal.requirements.losses and not scope.losses:
        raise ValueError(
            f"{signal!r} requires the losses: call scope.record_loss(loss) in `with "
            f"mixer.domain({scope.batch.domain!r}) as scope:`"
        )
    if signal.requirements.reference and any(other is None for _, other in scope.losses):
        raise ValueError(
            f"{signal!r} needs the losses of a reference model: scope.record_loss(losses, reference=...)"
        )


def record_rows(signal: Signal, names: Sequence[str], scope: BatchScope, batch: MixtureBatch | None) -> None:
    """Pass the losses of a mixed batch's rows to the signal, where it requires them.

    Args:
        names: the domains.
        batch: knows how often a domain is in a step; ``None`` where only labels are known.
    """
    assert scope.recorded is not None
    if signal.requirements.reference and scope.recorded[1] is None:
        raise ValueError(
            f"{signal!r} needs the losses of a reference model: batch.weighted_loss(losses, reference=...)"
        )
    if not signal.requirements.losses:
        return
    for index in np.flatnonzero(scope.rows).tolist():
        rows, often = int(scope.rows[index]), 1.0 if batch is None else batch.step.probability(names[index])
        losses, reference = scope.recorded_of(index)
        fraction = rows * often / float(scope.expected[index])
        signal.record_loss(index, losses, fraction=fraction, reference=reference)
