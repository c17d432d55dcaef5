"""The batches of a :class:`mixwell.MixtureLoader` in the form that ``Trainer`` takes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, final

from torch.utils.data import IterableDataset

from mixwell.data.loader import MixtureLoader
from mixwell.mixer.mixer import Mixer

BATCH = "mixwell_batch"
"""The key under which the inputs of a model carry their :class:`mixwell.MixtureBatch`."""


@final
class TrainerFeed(IterableDataset[Any]):
    """The inputs of the model for every micro-batch, without end.

    Args:
        loader: makes the batches.
    """

    def __init__(self, loader: MixtureLoader) -> None:
        self.loader = loader
        self.mixer: Mixer | None = None
        """The mixer to follow, once there is one."""
        self.passed_over = 0
        """The number of batches that the trainer will ask for and discard before it resumes; they are empty."""

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self.passed_over):
            yield {}
        self.passed_over = 0
        if self.mixer is None:
            raise ValueError("there are no batches before training has begun: their domains follow the mixer")
        for batch in self.loader.follow(self.mixer):
            yield {**batch.rows, BATCH: batch}
