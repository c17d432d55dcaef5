"""The rows of the validation gradients of a ``MixerTrainer``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast, final

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset

from mixwell import distributed
from mixwell.data import readers
from mixwell.mixer.mixer import Mixer
from mixwell.utils.seeding import seeded

Part = tuple[Mapping[str, Any], Tensor]
"""A collated batch, and whether each of its rows counts, shape ``(rows,)``."""
MOST_DRAWS = 100
"""The number of validation batches without a label after which training ends with an error."""


def as_one_dataset(dataset: Any) -> Any:
    """Return a validation set as one dataset: of a mapping of datasets all rows, of which each counts the same.

    Raises:
        ValueError: a part is empty, or a stream, which has no length to be read by.
    """
    if not isinstance(dataset, Mapping):
        return dataset
    parts = dict(cast("Mapping[str, Any]", dataset))
    if not parts:
        return []
    for name, part in parts.items():
        if readers.is_stream(part):
            raise ValueError(
                f"validation_dataset[{name!r}] is a stream, and streams are not joined, since how much each "
                "should count is not known; give one stream, as of datasets.interleave_datasets"
            )
        if not len(part):
            raise ValueError(f"validation_dataset[{name!r}] is empty; leave it out or give it rows")
    return ConcatDataset(list(parts.values()))


@final
class ValidationRows:
    """Reads a validation set again and again, in a new order each time; ranks share the rows of a gradient.

    Args:
        dataset: map-style, or a stream, of which each rank reads its own part.
        rows: rows of each validation gradient, all ranks together; ``None`` to follow the mixer.
        step_rows: the rows of a training step.
        process: the rank, and the number of ranks.
    """

    def __init__(
        self, dataset: Any, rows: int | None, *, step_rows: int, seed: int, process: readers.Place
    ) -> None:
        self._dataset, self._rows, self._step_rows, self._process = dataset, rows, step_rows, process
        self.streamed = readers.is_stream(dataset)
        # All ranks draw the same row numbers, and each fetches its own of them.
        source, place = (dataset, process) if self.streamed else (range(len(dataset)), (0, 1))
        self.reader = readers.reader(source, "the validation set", key=f"seed {seed}", process=place)

    def next(
        self,
        mixer: Mixer,
        collate: Callable[[list[Any]], Mapping[str, Any]],
        counted_rows: Callable[[Any], Tensor | None],
        *,
        max_rows: int,
        device: torch.device,
    ) -> tuple[list[Part], float]:
        """Return this rank's batches of the next validation gradient, and their rank scale.

        Args:
            counted_rows: from a batch whether each of its rows has a label; ``None`` if all count.
            max_rows: the greatest number of rows of a batch.
            device: on which ranks exchange their counts.
        """
        for _ in range(MOST_DRAWS):
            rows = self._next_rows(mixer)
            parts: list[Part] = []
            for first in range(0, len(rows), max_rows):
                some = rows[first : first + max_rows]
                with seeded(mixer.steps_done + first):
                    inputs = collate(some)
                mask = counted_rows(inputs)
                parts.append(
                    (inputs, torch.ones(len(some), dtype=torch.bool) if mask is None else mask.cpu())
                )
            own = sum(int(mask.sum()) for _, mask in parts)
            total = float(distributed.all_reduce_sum(np.array([own], dtype=np.float32), device)[0])
            if total:
                return parts, self._process[1] * own / total
        raise ValueError(
            f"no row of {MOST_DRAWS} validation batches has a label that counts: all are -100; give "
            "validation_dataset rows with labels"
        )

    def _next_rows(self, mixer: Mixer) -> list[Any]:
        rank, count = self._process
        wanted = mixer.validation_rows(self._step_rows) if self._rows is None else self._rows
        if self.streamed:
            return self.reader.take(-(-wanted // count))
        wanted = min(wanted, len(self._dataset))
        # As many rows in all as one process takes, unless all must run the model equally often.
        equal = mixer.requires_equal_forward_passes
        wanted = -(-wanted // count) * count if equal else max(wanted, count)
        return readers.fetch(self._dataset, self.reader.take(wanted)[rank::count])
