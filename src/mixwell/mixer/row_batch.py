"""One mixed batch whose rows carry a domain label."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mixwell.hypergradient.capture.hooks import CaptureContext
from mixwell.hypergradient.capture.row_groups import Labels, RowGroups
from mixwell.signals.base import Signal
from mixwell.typing import Vector


@final
class RowBatch:
    """What ``with mixer.batch(labels) as batch`` gives: the weights of the rows.

    Args:
        segments: which rows belong to which domain.
        factors: of the rows' losses, shape ``(rows,)``.
        watch: is told the weighted losses.
        signal: may weigh rows by more than their domain.
    """

    def __init__(self, segments: RowGroups, factors: Vector, watch: CaptureContext, signal: Signal) -> None:
        self.segments = segments
        """Which rows belong to which domain."""
        self._factors = torch.from_numpy(factors)
        self._watch = watch
        self._signal = signal
        self._means: list[tuple[int, int, float]] | None = None
        self.losses: Tensor | None = None
        """The loss of every row, shape ``(rows,)``, once they were weighted."""
        self.observed: tuple[Tensor, Tensor | None] | None = None
        """The losses of rows or tokens, and those of a reference model, once they were weighted."""

    def means(self) -> list[tuple[int, int, float]]:
        """Of each domain in the batch its number, its rows and their mean loss, once they were weighted."""
        if self.losses is None:
            return []
        if (
            self._means is None
        ):  # brings the losses from their device, for which all that it does must be done
            self._means = self._find_means(self.losses)
        return self._means

    def _find_means(self, losses: Tensor) -> list[tuple[int, int, float]]:
        labels, counts = self.segments.labels, self.segments.counts
        sums = np.bincount(labels, weights=losses.cpu().double().numpy(), minlength=len(counts))
        return [
            (place, end - begin, sums[place] / (end - begin)) for place, begin, end in self.segments.slices
        ]

    def weighted_loss(
        self,
        losses: Tensor,
        *,
        reference: Tensor | None = None,
        objective: Tensor | None = None,
        data: Any = None,
    ) -> Tensor:
        """The loss to call ``.backward()`` on: ``sum_i w_d(i) / n_d(i) * loss_i``, d(i) the domain of row i.

        Args:
            losses: one per row, or with more dimensions after the first (tokens), of which the mean is taken.
            reference: the losses of a reference model, of the same shape, for signals that need it.
            objective: what is to be made less in place of the losses, of the same shape.
            data: the rows themselves, for signals that weigh every row.

        Returns:
            One number.

        Raises:
            ValueError: there is not one loss per row.
            RuntimeError: it is called twice.
        """
        if self.losses is not None:
            raise RuntimeError("weigh was called twice in one block; open a block for each batch")
        if losses.dim() < 1 or losses.shape[0] != len(self.segments):
            raise ValueError(
                f"weigh takes one loss for each of the {len(self.segments)} rows (cross_entropy(..., "
                f"reduction='none')); got shape {tuple(losses.shape)}"
            )
        if reference is not None and reference.shape != losses.shape:
            raise ValueError(
                f"the losses have shape {tuple(losses.shape)}, those of the reference model "
                f"{tuple(reference.shape)}; both must be of the same rows"
            )
        self.observed = losses.detach(), None if reference is None else reference.detach()
        losses, made_less = _by_row(losses), _by_row(losses if objective is None else objective)
        self.losses = losses.detach()
        weighted = made_less * self._factors.to(losses)
        factors = self._signal.row_factors(self.losses, self.segments, data)
        if factors is not None:
            weighted = weighted * factors.to(losses)
        self._watch.weighted(weighted)
        return weighted.sum()


def _by_row(losses: Tensor) -> Tensor:
    return losses.flatten(1).mean(dim=1) if losses.dim() > 1 else losses


@dataclass
class RowStep:
    """What the mixed batches of a step have left so far.

    Args:
        given: whether there was one.
        counted: whether the user told how many rows of each domain the step has.
        lost: whether one of them was not finite, so that the step is left out.
    """

    given: bool = False
    counted: bool = False
    lost: bool = False


def places_of(labels: Tensor | NDArray[Any] | Sequence[Any], names: Sequence[str]) -> Labels:
    """The number of every row's domain.

    Args:
        labels: a name or a number for every row.
        names: of the domains.

    Returns:
        Shape ``(rows,)``.

    Raises:
        ValueError: there is no row, or a label is not that of a domain.
    """
    places = labels.detach().cpu().numpy() if isinstance(labels, Tensor) else np.asarray(labels)
    if places.dtype.kind == "U":
        index = {name: place for place, name in enumerate(names)}
        unknown = sorted(set(places.tolist()) - set(index))
        if unknown:
            raise ValueError(f"unknown domain {unknown[0]!r}; the domains are {', '.join(names)}")
        places = np.array([index[label] for label in places.tolist()])
    if places.ndim != 1 or not len(places):
        raise ValueError(
            f"labels must have one entry for every row, and there must be rows; got shape {places.shape}"
        )
    if places.dtype.kind not in "iu" or places.min() < 0 or places.max() >= len(names):
        raise ValueError(
            f"labels must be names of domains, or whole numbers from 0 to {len(names) - 1}; got {places.min()} to "
            f"{places.max()} ({places.dtype})"
        )
    return places.astype(np.int64)


def rows_expected(
    segments: RowGroups,
    names: Sequence[str],
    counts: Mapping[str, float] | None,
    inclusion: Mapping[str, float],
    portions: Mapping[str, float],
) -> Vector:
    """The number by which the sum over the rows of each domain is divided.

    Args:
        segments: which rows belong to which domain.
        names: of the domains.
        counts: as the user gave them, or ``None``.
        inclusion: how often a domain is in a step.
        portions: the rows of a domain in this process, over the mean of all.

    Returns:
        Shape ``(m,)``; NaN where nothing is known of a domain, which then must not have rows.

    Raises:
        ValueError: a count is missing or not positive, or there are rows where there should be none.
    """
    if counts is None:
        often = np.array([inclusion.get(name, 1.0) for name in names])
        here = np.array([portions.get(name, 1.0) for name in names])
        wrong = [names[place] for place, _, _ in segments.slices if not here[place]]
        if wrong:
            raise ValueError(
                f"there are rows of {wrong[0]!r}, of which mixer.portions says that there are none here"
            )
        return np.where(segments.counts > 0, segments.counts * often / np.maximum(here, 1e-300), np.nan)
    unknown = sorted(set(counts) - set(names))
    if unknown:
        raise ValueError(f"unknown domain {unknown[0]!r} in counts; the domains are {', '.join(names)}")
    expected = np.array([counts.get(name, np.nan) for name in names], dtype=np.float64)
    for place, _, _ in segments.slices:
        if not (np.isfinite(expected[place]) and expected[place] > 0):
            raise ValueError(
                f"counts must say how many rows of {names[place]!r} a step has, as it is in the batch; got "
                f"{counts.get(names[place])}"
            )
    return expected
