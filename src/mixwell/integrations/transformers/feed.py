"""The batches of a trainer: rows drawn by the mixer's weights, cut into micro-batches and among processes."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from mixwell.data import readers
from mixwell.data.readers import Place, Reader
from mixwell.data.sampler import Sampler
from mixwell.integrations.transformers.domains import total_rows
from mixwell.mixer.mixer import Mixer
from mixwell.simplex.repetition import EpochCap
from mixwell.training import randomness

LABELS = "mixwell_domain"
"""The key under which a batch tells the number of each row's domain."""


@final
@dataclass(frozen=True)
class Cut:
    """How a training step is cut.

    Args:
        rows: of a micro-batch.
        batches: micro-batches of a step in each process.
        process: which process this is.
    """

    rows: int
    batches: int
    process: Place

    @property
    def step_rows(self) -> int:
        """Rows of a step in all processes."""
        return self.rows * self.batches * self.process[1]


@final
@dataclass(frozen=True)
class Keys:
    """The rows of a micro-batch: the domain and the number of each, and a seed for what is random in them."""

    rows: list[tuple[str, int]]
    seed: int


@final
@dataclass(frozen=True)
class Drawn:
    """A step that was drawn: how many rows of each domain it has, and where the sampler was after it."""

    counts: dict[str, float]
    state: dict[str, Any]


@final
class Feed(IterableDataset[Any]):
    """Micro-batches without end, which follow a mixer.

    Where all datasets are map-style, every process draws the same rows of a step and takes its own part of them.
    As soon as one is a stream, all are split among the processes, and each draws from its own part.

    The rows of a step are drawn when its first micro-batch is asked for. With workers they are drawn ahead, but
    not beyond the round, within which the weights do not change; the state is that of the step that was asked
    for last.

    Args:
        datasets: by domain.
        cut: of a step.
        collate: makes a batch of rows.
        least: rows that each domain has in every step.
        block: rows of a stream that are shuffled together.
        seed: of the orders.
        workers: settings of PyTorch's ``DataLoader`` that say who reads. Streams are read by the process itself.
        cap: how often rows may be seen; the mixer has the same object.

    Raises:
        ValueError: a stream is to have a cap.
    """

    def __init__(
        self,
        datasets: Mapping[str, Any],
        cut: Cut,
        collate: Callable[[list[Any]], Mapping[str, Any]],
        *,
        least: int | None,
        block: int,
        seed: int,
        workers: Mapping[str, Any],
        cap: EpochCap | None = None,
    ) -> None:
        self._datasets, self._cut, self._seed = dict(datasets), cut, seed
        self._names = tuple(datasets)
        self.rows = total_rows(datasets)
        """Rows of all domains, where that is known."""
        self.shared = self.rows is not None
        """Whether all processes draw the same rows of a step, of which each takes its own."""
        sizes = {name: len(one) if self.shared else None for name, one in datasets.items()}
        total = cut.step_rows if self.shared else cut.rows * cut.batches
        if cap is not None and not self.shared:
            raise ValueError("EpochCap needs to know how many rows there are, which a stream does not tell")
        self._sampler = Sampler(sizes, total, least=least, cap=cap, seed=seed)
        self._readers: dict[str, Reader] = {}
        if not self.shared:
            self._readers = {
                name: readers.reader(one, name, key=f"seed {seed}", block=block, process=cut.process)
                for name, one in datasets.items()
            }
        self._fetch = _Fetch(self._datasets, self._names, collate)
        self._workers: dict[str, Any] = dict(workers) if self.shared else {"num_workers": 0}
        self._loader: DataLoader[Any] | None = None
        self._ahead: deque[Drawn] = deque()
        self._mixer: Mixer | None = None
        self._steps = 0
        self._passed_over = 0
        self.now = Drawn({}, self._state())
        """What is known of the step that is trained on."""

    def __len__(self) -> int:
        if self.rows is None:
            raise TypeError("streams have no length")
        return max(self.rows // self._cut.step_rows, 1) * self._cut.batches

    def follow(self, mixer: Mixer) -> None:
        """Draw by the weights of a mixer from now on.

        Args:
            mixer: of the run.
        """
        self._mixer = mixer

    @property
    def taken(self) -> dict[str, int]:
        """Rows of all processes that were trained on, by domain."""
        taken: dict[str, int] = self.now.state["sampler"]["taken"]
        return taken if self.shared else {name: n * self._cut.process[1] for name, n in taken.items()}

    def state(self) -> dict[str, Any]:
        """Everything that a resumed run needs, as plain values, after the step that was asked for last."""
        return {
            "step_rows": self._cut.step_rows,
            **self.now.state,
            "readers": {name: one.state() for name, one in self._readers.items()},
        }

    def load_state(self, state: Mapping[str, Any], *, passed_over: int) -> None:
        """Continue where another one stopped.

        Args:
            state: what :meth:`state` gave.
            passed_over: batches that the trainer will ask for and throw away, before it goes on; they are empty.

        Raises:
            ValueError: the data or the size of a step are others.
        """
        if state["step_rows"] != self._cut.step_rows:
            raise ValueError(
                f"a step had {state['step_rows']} rows when the run was saved, and has {self._cut.step_rows}; "
                "keep batch size x accumulation x processes as it was"
            )
        self._take_up(state)
        for name, one in self._readers.items():
            one.load_state(state["readers"][name])
        self._passed_over = passed_over
        self.now = Drawn({}, self._state())

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self._passed_over):
            yield {}
        self._passed_over = 0
        if self._ahead:  # a trainer begins anew with every epoch; what workers had read ahead comes again
            self._ahead.clear()
            self._take_up(self.now.state)
        if not self._workers["num_workers"]:
            while True:
                for number, keys in enumerate(self._draw()):
                    if not number:
                        self.now = self._ahead.popleft()
                    yield self._read(keys)
        if self._loader is None:
            sampler = _Round(self)
            self._loader = DataLoader(
                self._fetch, batch_size=None, sampler=sampler, persistent_workers=True, **self._workers
            )
        while True:
            for number, batch in enumerate(self._loader):
                if number % self._cut.batches == 0:
                    self.now = self._ahead.popleft()
                yield batch

    def round(self) -> Iterator[Keys]:
        """The micro-batches until the weights may change, for workers that read ahead.

        Yields:
            Their rows.
        """
        assert self._mixer is not None
        for _ in range(self._mixer.round_left):
            yield from self._draw()

    def _draw(self) -> list[Keys]:
        """The micro-batches of the next step in this process."""
        if self._mixer is None:
            raise ValueError("there are no batches before training has begun: their domains follow the mixer")
        weights = self._mixer.weights.values
        drawn = self._sampler.draw(weights)
        often = self._sampler.inclusion(weights)
        rank, processes = self._cut.process if self.shared else (0, 1)
        rows = [(name, index) for name, indices in drawn.items() for index in indices.tolist()]
        parts = self._cut.batches * processes
        counts = {name: len(own) * often.get(name, 1.0) / processes for name, own in drawn.items()}
        self._steps += 1
        self._ahead.append(Drawn(counts, self._state()))
        seeds = np.random.SeedSequence([self._seed, self._steps, self._cut.process[0]])
        return [
            Keys(rows[number * processes + rank :: parts], int(seed))
            for number, seed in enumerate(seeds.generate_state(self._cut.batches))
        ]

    def _read(self, keys: Keys) -> Any:
        taken = {
            name: iter(self._readers[name].take(count))
            for name, count in Counter(name for name, _ in keys.rows).items()
            if self._readers
        }
        return self._fetch.batch(keys, taken)

    def _take_up(self, state: Mapping[str, Any]) -> None:
        self._sampler.load_state(state["sampler"])
        self._steps = int(state["steps"])

    def _state(self) -> dict[str, Any]:
        return {"sampler": self._sampler.state(), "steps": self._steps}


@final
class _Round:
    """The sampler of a loader with workers: what is drawn until the round ends."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed

    def __iter__(self) -> Iterator[Keys]:
        return self._feed.round()


@final
class _Fetch(Dataset[Any]):
    """Makes batches of keys. What is random in the rows and in the collator depends on the step alone."""

    def __init__(
        self,
        datasets: Mapping[str, Any],
        names: tuple[str, ...],
        collate: Callable[[list[Any]], Mapping[str, Any]],
    ) -> None:
        self._datasets, self._collate = datasets, collate
        self._places = {name: place for place, name in enumerate(names)}

    def __getitem__(self, keys: Keys) -> Any:
        return self.batch(keys, {})

    def batch(self, keys: Keys, streamed: Mapping[str, Iterator[Any]]) -> dict[str, Any]:
        """A batch, with the number of each row's domain.

        Args:
            keys: its rows.
            streamed: by domain the next rows of streams.

        Returns:
            What the collator gives, and the labels.
        """
        with randomness.seeded(keys.seed):
            own: dict[str, list[int]] = {}
            for name, index in keys.rows:
                own.setdefault(name, []).append(index)
            fetched = {
                name: streamed[name]
                if name in streamed
                else iter(readers.fetch(self._datasets[name], indices))
                for name, indices in own.items()
            }
            batch = dict(self._collate([next(fetched[name]) for name, _ in keys.rows]))
        batch[LABELS] = torch.tensor([self._places[name] for name, _ in keys.rows])
        return batch
