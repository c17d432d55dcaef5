"""Batches as a mixer takes them: rows, the domain of each, and the expected number of rows of a step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from mixwell.utils import nested


@final
@dataclass(frozen=True)
class DomainBatch:
    """Rows of one domain, for ``mixer.domain(batch)``.

    With ``n`` rows of the domain in the step, all ranks together, of which this rank has ``n_r``, and the
    probability ``p`` with which the domain is in a step, the mean loss of ``c`` rows counts ``c R / (n p) =
    fraction * rank_scale / probability`` in the mean over the R ranks, so that the domain's gradient is unbiased.

    Args:
        rows: the rows, as the model takes them.
        count: the number of rows that count, if known; 0 for rows that are run only because all ranks must run the
            model equally often.
        fraction: the fraction ``c / n_r`` of the domain's rows on this rank in the step.
        probability: ``p``.
        rank_scale: ``R n_r / n``. Where it is not 1, call ``scope.scaled_loss(loss).backward()``.
        absent: domains that have no rows on this rank in the step.
    """

    domain: str
    rows: Any = None
    count: int | None = None
    fraction: float = field(default=1.0, kw_only=True)
    probability: float = field(default=1.0, kw_only=True)
    rank_scale: float = field(default=1.0, kw_only=True)
    absent: frozenset[str] = field(default=frozenset(), kw_only=True)

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise ValueError(
                f"the fraction of a batch must be in (0, 1], got {self.fraction} for {self.domain!r}"
            )
        if not 0 < self.probability <= 1:
            raise ValueError(f"the probability of {self.domain!r} must be in (0, 1], got {self.probability}")
        if not 0 <= self.rank_scale < math.inf:
            raise ValueError(
                f"the rank scale of {self.domain!r} must be finite and not negative, got {self.rank_scale}"
            )


@final
@dataclass(frozen=True)
class StepCounts:
    """The number of rows of each domain in a training step.

    Args:
        total: rows of all ranks and micro-batches, by domain, of the domains that are in the step.
        local: rows of this rank, all micro-batches together.
        probabilities: the probability with which a domain is in a step, of those that may be absent.
        world_size: the number of ranks that ``total`` is divided among.
    """

    total: Mapping[str, int]
    local: Mapping[str, int]
    probabilities: Mapping[str, float] = field(default_factory=dict[str, float])
    world_size: int = 1
    micro_batches: int = 1

    def probability(self, name: str) -> float:
        """Return the probability with which a domain is in a step."""
        return self.probabilities.get(name, 1.0)

    @property
    def expected(self) -> dict[str, float]:
        """``e_d = n_d p_d / R``: the loss of a row counts ``w_d / e_d``, and ranks are averaged."""
        return {name: n * self.probability(name) / self.world_size for name, n in self.total.items()}


@final
@dataclass(frozen=True)
class MixtureBatch:
    """One micro-batch of one rank, as a :class:`mixwell.MixtureLoader` makes it.

    Args:
        labels: the number of each row's domain in the order of ``names``, shape ``(rows,)``, increasing.
        step: the rows of the step that the micro-batch belongs to.
        collated: the rows as one batch, where they were collated together.
        parts: else the rows of each domain.
        equal_forward_passes: whether all ranks must run the model equally often, so that :meth:`by_domain` has
            rows of every domain of the step; those that this rank has none of do not count.
        counted: whether each row counts, shape ``(rows,)``; ``None`` for all. Rows without a label do not: they
            are run with the others, and have no part in losses, gradients and counts. ``step`` has the numbers of
            those that count. Only for ``mixer.batch``.
    """

    names: tuple[str, ...]
    labels: Tensor
    step: StepCounts
    collated: Any = None
    parts: Mapping[str, Any] = field(default_factory=dict[str, Any])
    equal_forward_passes: bool = False
    counted: Tensor | None = None

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def expected_counts(self) -> dict[str, float]:
        """By domain the number by which the sum over its rows is divided; see :class:`StepCounts`."""
        return self.step.expected

    @property
    def fraction(self) -> float:
        """The fraction of the step that the micro-batch is."""
        return 1 / self.step.micro_batches

    @cached_property
    def counts(self) -> dict[str, int]:
        """The number of rows of each domain in this micro-batch, of those that have any."""
        counts = torch.bincount(self.labels, minlength=len(self.names)).tolist()
        return {name: count for name, count in zip(self.names, counts, strict=True) if count}

    @cached_property
    def rows(self) -> Any:
        """The rows as one batch, in the order of the labels."""
        if self.collated is not None:
            return self.collated
        return nested.concat_batches([self.parts[name] for name in self.counts], list(self.counts.values()))

    def to(self, device: torch.device | str, **_: Any) -> MixtureBatch:
        """Return the batch with its rows on a device. Labels stay where they are."""
        place = torch.device(device)
        return replace(
            self,
            collated=nested.to_device(self.collated, place),
            parts={name: nested.to_device(part, place) for name, part in self.parts.items()},
        )

    def split(self, max_rows: int | None) -> list[MixtureBatch]:
        """Return micro-batches of at most ``max_rows`` rows, with the expected counts of the whole step.

        Every rank has the same number of them, also where one has a row less, because ranks wait for each other in
        the passes over each. None is empty: with ``max_rows=1`` some have two rows where ranks have different
        numbers of rows.

        Args:
            max_rows: ``None`` for no limit.

        Raises:
            ValueError: the rows of the step are not divided evenly among the ranks, so that the number of parts of
                the others is not known.
        """
        if max_rows is None:
            return [self]
        least, most = self._rows_per_rank()
        number = min(-(-most // max_rows), least)
        if number <= 1:
            return [self]
        count = len(self)
        if -(-count // max_rows) == number:
            bounds = [*range(0, count, max_rows), count]
        else:
            bounds = [count * part // number for part in range(number + 1)]
        step = replace(self.step, micro_batches=self.step.micro_batches * number)
        return [
            MixtureBatch(
                self.names,
                self.labels[begin:end],
                step,
                nested.slice_rows(self.rows, begin, end, count),
                counted=None if self.counted is None else self.counted[begin:end],
            )
            for begin, end in pairwise(bounds)
        ]

    def _rows_per_rank(self) -> tuple[int, int]:
        """Return the least and the greatest number of rows of a micro-batch on any rank."""
        own, total = len(self), sum(self.step.total.values())
        if self.step.world_size == 1:
            return own, own
        shards = self.step.world_size * self.step.micro_batches
        least, most = total // shards, -(-total // shards)
        if not least <= own <= most:
            raise ValueError(
                f"this rank has {own} rows of a step of {total}, which are not divided evenly among "
                f"{self.step.world_size} ranks and {self.step.micro_batches} micro-batches (MixtureLoader does "
                "that), so that ranks would be split into different numbers of parts"
            )
        return least, most

    def by_domain(self, *, max_rows: int | None = None, min_parts: int = 1) -> list[DomainBatch]:
        """Return the rows of each domain, for ``mixer.domain``.

        Args:
            max_rows: the greatest number of rows of a part; ``None`` for no limit.
            min_parts: the least number of parts of a domain that has at least that number of rows on all ranks.
        """
        if self.counted is not None:
            raise ValueError("rows that do not count can be in mixed batches only; use mixer.batch")
        present = self.step.total if self.equal_forward_passes else self.step.local
        absent = frozenset(self.names) - {name for name, count in present.items() if count}
        found: list[DomainBatch] = []
        for name, total in self.step.total.items():
            if name not in self.counts and not self.equal_forward_passes:
                continue
            most = min(max_rows or total, -(-total // min_parts))
            found += [
                DomainBatch(
                    name,
                    self._rows_of(name, begin, end),
                    end - begin,
                    fraction=fraction,
                    probability=self.step.probability(name),
                    rank_scale=rank_scale,
                    absent=absent,
                )
                for begin, end, fraction, rank_scale in row_ranges(
                    self.counts.get(name, 0),
                    total,
                    most,
                    local=self.step.local[name],
                    world_size=self.step.world_size,
                    micro_batches=self.step.micro_batches,
                    equal_forward_passes=self.equal_forward_passes,
                )
            ]
        return found

    def _rows_of(self, name: str, begin: int, end: int) -> Any:
        if self.collated is not None:
            if not end - begin:
                raise ValueError(
                    f"this rank has no rows of {name!r}, and with fully_shard all ranks must run the model "
                    "equally often; take mixed batches (mixer.batch), or a loader without collate"
                )
            offset = int((self.labels < self.names.index(name)).sum())
            return nested.slice_rows(self.collated, offset + begin, offset + end, len(self))
        part, own = self.parts[name], self.counts.get(name, 0)
        if begin == end:  # any row will do: it does not count
            begin, end = 0, 1
        rows = max(own, 1)
        return part if (begin, end) == (0, rows) else nested.slice_rows(part, begin, end, rows)


class RowRange(NamedTuple):
    """Rows that are computed at once, with their ``fraction`` and ``rank_scale`` as in :class:`DomainBatch`."""

    begin: int
    end: int
    fraction: float
    rank_scale: float


def row_ranges(
    own: int,
    total: int,
    most: int,
    *,
    world_size: int,
    local: int | None = None,
    micro_batches: int = 1,
    equal_forward_passes: bool = False,
) -> list[RowRange]:
    """Divide the rows of one domain on one rank into ranges of at most ``most`` rows.

    Args:
        own: the rows of this micro-batch on this rank.
        total: the rows of the step on all ranks.
        most: the greatest number of rows of a range.
        local: the rows of the step on this rank; by default ``own``.
        equal_forward_passes: whether all ranks must have the same number of ranges; some may then be empty.
    """
    local = own if local is None else local
    if not equal_forward_passes:
        bounds = [*range(0, own, most), own]
        scale = world_size * local / total
        return [RowRange(begin, end, (end - begin) / local, scale) for begin, end in pairwise(bounds)]
    number = math.ceil(math.ceil(total / (world_size * micro_batches)) / most)
    parts = number * micro_batches
    sizes = [len(part) for part in np.array_split(np.arange(own), number)]
    ends = [0, *np.cumsum(sizes).tolist()]
    return [
        RowRange(begin, end, 1 / parts, parts * world_size * (end - begin) / total)
        for begin, end in pairwise(ends)
    ]
