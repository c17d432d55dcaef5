"""The rows of the validation gradients of a ``MixerTrainer``."""

from __future__ import annotations

from typing import Any, final

from mixwell.data import readers
from mixwell.mixer.mixer import Mixer


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

    def next(self, mixer: Mixer) -> tuple[list[Any], float]:
        """Return this rank's rows of the next validation gradient, and their rank scale."""
        rank, count = self._process
        wanted = mixer.validation_rows(self._step_rows) if self._rows is None else self._rows
        if self.streamed:
            return self.reader.take(-(-wanted // count)), 1.0
        wanted = min(wanted, len(self._dataset))
        # As many rows in all as one process takes, unless all must run the model equally often.
        equal = mixer.requires_equal_forward_passes
        wanted = -(-wanted // count) * count if equal else max(wanted, count)
        own = self.reader.take(wanted)[rank::count]
        return readers.fetch(self._dataset, own), count * len(own) / wanted
