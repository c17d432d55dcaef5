"""How rows become batches: drawn by weights, divided among ranks and micro-batches, read and collated."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from mixwell import distributed
from mixwell.data import readers
from mixwell.data.datasets import IndexedDataset, as_rows, collate_columns
from mixwell.data.mixture_dataset import MixtureDataset
from mixwell.data.rank_batches import RankBatch, shard_batch
from mixwell.data.sampler import Rule, Sampler
from mixwell.data.streams import Reader
from mixwell.mixer.batch import MixtureBatch
from mixwell.simplex.repetition import EpochCap
from mixwell.typing import Indices, Vector
from mixwell.utils.nested import identity
from mixwell.utils.seeding import seeded

if TYPE_CHECKING:
    from mixwell.mixer.mixer import Mixer

Collate = Callable[[list[Any]], Any]
_Keys = tuple[dict[str, Indices], int]
"""The rows of a micro-batch by domain, and a seed for what is random in reading them."""


@final
class MixtureLoader:
    """Makes batches of several domains; how many rows of each follows the weights.

    ::

        loader = MixtureLoader({"web": web, "code": code}, batch_size=64)
        for batch in loader.follow(mixer):
            with mixer.batch(batch) as scope:
                scope.weighted_loss(losses(model, batch.rows)).backward()
            mixer.step()

    See :class:`mixwell.data.sampler.Sampler` for how rows are chosen. With several ranks (``torch.distributed``)
    all draw the same rows of a step, and each takes its own part of them. As soon as one dataset is a stream,
    all are split among the ranks, and each rank draws from its own part.

    Args:
        domains: by name a PyTorch or Hugging Face dataset, a tensor, a tuple of tensors, a list, or an iterable
            dataset (a stream).
        batch_size: the rows of a step, all domains, ranks and micro-batches together.
        micro_batches: the number of micro-batches of a step on each rank (gradient accumulation).
        collate: makes a batch of a list of rows of all domains. By default the rows of each domain are collated
            separately, as PyTorch's ``default_collate`` does, but samples that are tuples give a tuple.
        rule: ``"weight"`` or ``"equal"``.
        least: rows that each domain has in every step; ``None`` for a quarter of an equal share.
        cap: how often rows may be seen; give the same object to the mixer's constraints.
        block: rows of a stream that are shuffled together; 1 leaves a stream in order.
        seed: chooses the orders.
        num_workers: processes that read rows ahead for :meth:`follow`, as those of PyTorch's ``DataLoader``, to
            the end of the round, within which the weights do not change. Streams are read in the process itself.
            ``prefetch_factor`` and ``multiprocessing_context`` are passed to the ``DataLoader``.
        rank: by default that of ``torch.distributed``, as is ``world_size``.

    Example:
        >>> loader = MixtureLoader({"web": torch.arange(100), "code": torch.arange(50)}, 8, least=1)
        >>> [batch] = loader.next_step(np.array([0.75, 0.25]))
        >>> batch.rows.shape, batch.labels.tolist(), batch.expected_counts
        (torch.Size([8]), [0, 0, 0, 0, 0, 0, 1, 1], {'web': 6.0, 'code': 2.0})
        >>> [(part.domain, len(part.rows)) for part in batch.by_domain()]
        [('web', 6), ('code', 2)]
    """

    def __init__(
        self,
        domains: Mapping[str, Any],
        batch_size: int,
        *,
        micro_batches: int = 1,
        collate: Collate | None = None,
        rule: Rule = "weight",
        least: int | None = None,
        cap: EpochCap | None = None,
        block: int = 1024,
        seed: int = 0,
        num_workers: int = 0,
        prefetch_factor: int | None = None,
        multiprocessing_context: Any = None,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        if num_workers < 0:
            raise ValueError(f"the number of workers must not be negative, got {num_workers}")
        if micro_batches < 1:
            raise ValueError(f"a step must have at least 1 micro-batch, got {micro_batches}")
        self._settings: dict[str, Any] = {
            "micro_batches": micro_batches,
            "collate": collate,
            "rule": rule,
            "least": least,
            "cap": cap,
            "block": block,
            "seed": seed,
            "num_workers": num_workers,
            "prefetch_factor": prefetch_factor,
            "multiprocessing_context": multiprocessing_context,
            "rank": rank,
            "world_size": world_size,
        }
        self.datasets = dict(domains)
        """The datasets by domain, as they were given."""
        self.batch_size, self.micro_batches = batch_size, micro_batches
        self.rank = distributed.rank() if rank is None else rank
        self.world_size = distributed.world_size() if world_size is None else world_size
        self._seed, self.collate, self.cap = seed, collate, cap
        self.streams = any(
            not isinstance(one, IndexedDataset) and readers.is_stream(one) for one in domains.values()
        )
        """Whether there are streams, so that each rank draws from its own part of the data."""
        if self.streams and cap is not None:
            raise ValueError("EpochCap needs the number of rows, which a stream does not have")
        if self.streams and batch_size % self.world_size:
            raise ValueError(
                f"a batch of {batch_size} rows of streams cannot be divided among {self.world_size} ranks"
            )
        self._read = _reading(domains, collate, streams=self.streams)
        sizes = {name: None if self.streams else len(one) for name, one in self._read.datasets.items()}
        own_size = batch_size // self.world_size if self.streams else batch_size
        self.sampler = Sampler(sizes, own_size, rule=rule, least=least, cap=cap, seed=seed)
        """Chooses the rows."""
        if self.streams:
            place = self.rank, self.world_size
            self._read.readers = {
                name: readers.reader(one, name, key=f"seed {seed}", block=block, process=place)
                for name, one in domains.items()
            }
        self._num_workers = 0 if self.streams else num_workers
        self._loader: DataLoader[Any] | None = None
        self._round = _Round(self._draw)
        self._steps = 0
        self._ahead: deque[tuple[RankBatch, dict[str, Any] | None]] = deque()
        # With workers the place after the step that was given last; without them the sampler has it.
        self._given = self._place() if self._num_workers else None

    @property
    def names(self) -> tuple[str, ...]:
        """The domains."""
        return self.sampler.names

    @property
    def total_rows(self) -> int | None:
        """The number of rows of all domains, ``None`` where there are streams."""
        return None if self.streams else sum(len(one) for one in self._read.datasets.values())

    def __len__(self) -> int:
        """Return the number of micro-batches of a pass over all domains; streams have none."""
        if self.total_rows is None:
            raise TypeError("streams have no length")
        return max(self.total_rows // self.batch_size, 1) * self.micro_batches

    @property
    def taken(self) -> dict[str, int]:
        """The number of rows of all ranks in the steps that were returned so far, by domain."""
        taken: dict[str, int] = (self._given or self._place())["sampler"]["taken"]
        return {name: n * self.world_size if self.streams else n for name, n in taken.items()}

    def follow(self, mixer: Mixer) -> Iterator[MixtureBatch]:
        """Yield the micro-batches of every step of a mixer, until its budget is spent.

        Their domains are in the mixer's order, so that their labels are also what ``mixer.batch(labels)`` takes.
        """
        if set(self.names) != set(mixer.weights.names):
            raise ValueError(
                f"the loader has the domains {', '.join(self.names)}, the mixer {', '.join(mixer.weights.names)}"
            )
        self._rewind()
        while mixer.budget is None or mixer.steps_done < mixer.budget:
            yield from self._batches(mixer)

    def next_step(self, weights: Vector, *, equal_forward_passes: bool = False) -> list[MixtureBatch]:
        """Return this rank's micro-batches of the next step.

        Args:
            weights: of the domains, shape ``(m,)``, in the order of :attr:`names`.
            equal_forward_passes: whether all ranks must run the model equally often (``fully_shard``).
        """
        self._rewind()
        keys = self._draw(weights, equal_forward_passes, self.names)
        own, self._given = self._ahead.popleft()
        return [
            self._batch(self._read[one], own, number, equal_forward_passes, self.names)
            for number, one in enumerate(keys)
        ]

    def with_settings(self, batch_size: int, **settings: Any) -> MixtureLoader:
        """Return a new loader of the same domains, with other settings where they are given."""
        return MixtureLoader(self.datasets, batch_size, **{**self._settings, **settings})

    def row_stream(self, weights: Mapping[str, float] | Sequence[float] | None = None) -> MixtureDataset:
        """Return the rows one by one as an iterable dataset, for PyTorch's ``DataLoader``."""
        return MixtureDataset(
            self.datasets,
            weights,
            block=self._settings["block"],
            seed=self._seed,
            rank=self.rank,
            world_size=self.world_size,
        )

    def shutdown_workers(self) -> None:
        """End the worker processes at once; :meth:`follow` starts others, and reads again what was not given."""
        self._loader = None

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs, as plain values: the place after the step that was returned last.

        Without streams it is the same on all ranks, and for any number of them.
        """
        own = {name: one.state() for name, one in self._read.readers.items()}
        return {"batch_size": self.batch_size, **(self._given or self._place()), "readers": own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where another loader of the same data stopped."""
        if state["batch_size"] != self.batch_size:
            raise ValueError(
                f"a step had {state['batch_size']} rows when the run was saved, and has {self.batch_size}; keep "
                "batch size x accumulation x processes as it was"
            )
        self._return_to(state)
        for name, one in self._read.readers.items():
            one.load_state(state["readers"][name])
        self._ahead.clear()
        self._given = self._place() if self._num_workers else None

    # ------------------------------------------------------------------------------------------- inside

    def _batches(self, mixer: Mixer) -> Iterator[MixtureBatch]:
        """Yield the batches of the next step, or with workers those until the weights may change."""
        equal, names = mixer.requires_equal_forward_passes, mixer.weights.names
        last = mixer.weights.last
        weights = np.array([last[name] for name in self.names])
        if not self._num_workers:
            read: Iterator[Any] = map(self._read.__getitem__, self._draw(weights, equal, names))
        else:
            self._round.settings, self._round.steps = (weights, equal, names), max(mixer.round_left, 1)
            read = iter(self._worker_loader())
        for number, rows in enumerate(read):
            micro_batch = number % self.micro_batches
            if not micro_batch:
                own, self._given = self._ahead.popleft()
            yield self._batch(rows, own, micro_batch, equal, names)  # pyright: ignore[reportPossiblyUnboundVariable]

    def _worker_loader(self) -> DataLoader[Any]:
        if self._loader is None:
            self._loader = DataLoader(
                self._read,
                None,
                sampler=self._round,
                persistent_workers=True,
                collate_fn=identity,
                num_workers=self._num_workers,
                prefetch_factor=self._settings["prefetch_factor"],
                multiprocessing_context=self._settings["multiprocessing_context"],
            )
        return self._loader

    def _draw(self, weights: Vector, equal: bool, names: Sequence[str]) -> list[_Keys]:
        """Draw the rows of the next step, and return those of this rank's micro-batches, in the order of names."""
        probabilities = self.sampler.inclusion(weights)
        drawn = self.sampler.draw(weights)
        own = shard_batch(
            drawn,
            rank=0 if self.streams else self.rank,
            world_size=1 if self.streams else self.world_size,
            micro_batches=self.micro_batches,
            probabilities=probabilities,
        )
        self._steps += 1
        self._ahead.append((own, self._place() if self._num_workers else None))
        seeds = np.random.SeedSequence([self._seed, self._steps, self.rank])
        # Where all ranks must run the model equally often, a rank without rows of a domain reads one for nothing.
        spare = {name: rows[:1] for name, rows in drawn.items()} if equal and self._read.apart else {}
        found = [{**spare, **one} for one in own.micro_batches]
        keys = [{name: one[name] for name in names if name in one} for one in found]
        return list(zip(keys, seeds.generate_state(self.micro_batches).tolist(), strict=True))

    def _batch(
        self, rows: Any, own: RankBatch, micro_batch: int, equal: bool, names: tuple[str, ...]
    ) -> MixtureBatch:
        counts = [len(own.micro_batches[micro_batch].get(name, ())) for name in names]
        labels = torch.from_numpy(np.repeat(np.arange(len(names), dtype=np.int64), counts))
        if not self._read.apart:
            return MixtureBatch(names, labels, own.step, rows, equal_forward_passes=equal)
        return MixtureBatch(names, labels, own.step, None, rows, equal)

    def _rewind(self) -> None:
        """Return to the step that was given last: rows that were read ahead and not given come again."""
        if self._ahead:
            self._ahead.clear()
            assert self._given is not None
            self._return_to(self._given)

    def _place(self) -> dict[str, Any]:
        return {"sampler": self.sampler.state(), "steps": self._steps}

    def _return_to(self, place: Mapping[str, Any]) -> None:
        self.sampler.load_state(place["sampler"])
        self._steps = int(place["steps"])


@final
class _Round:
    """Draws the steps until the weights may change, as the workers ask for them."""

    def __init__(self, draw: Callable[[Vector, bool, Sequence[str]], list[_Keys]]) -> None:
        self._draw = draw
        self.settings: tuple[Vector, bool, Sequence[str]]
        self.steps = 0

    def __iter__(self) -> Iterator[_Keys]:
        for _ in range(self.steps):
            yield from self._draw(*self.settings)


@final
class _Read(Dataset[Any]):
    """Reads the rows of a micro-batch, also in workers.

    Args:
        datasets: by domain; :class:`IndexedDataset` where the rows of each domain are collated separately.
        collate: makes a batch of rows of all domains; ``None`` to collate those of each domain separately.
    """

    def __init__(self, datasets: Mapping[str, Any], collate: Collate | None) -> None:
        self.datasets, self._collate = dict(datasets), collate
        self.apart = collate is None
        self._deterministic = collate is None and all(one.deterministic for one in self.datasets.values())
        self.readers: dict[str, Reader] = {}

    def __getitem__(self, keys: _Keys) -> Any:
        chosen, seed = keys
        # Random transforms depend on the step only, whatever process reads it and wherever a run was resumed.
        # Seeding takes 0.1 ms, which tensors and tokens need not pay.
        with nullcontext() if self._deterministic else seeded(seed):
            if self._collate is None:
                return {name: self.datasets[name].batch(indices) for name, indices in chosen.items()}
            rows = [row for name, indices in chosen.items() for row in self._rows(name, indices)]
            return self._collate(rows)

    def _rows(self, name: str, indices: Indices) -> list[Any]:
        if self.readers:
            return self.readers[name].take(len(indices))
        return readers.fetch(self.datasets[name], indices.tolist())


def _reading(domains: Mapping[str, Any], collate: Collate | None, *, streams: bool) -> _Read:
    if collate is None and not streams:
        return _Read({name: as_rows(one) for name, one in domains.items()}, None)
    columns = {name: TensorDataset(*one) if _is_columns(one) else one for name, one in domains.items()}
    for name, one in columns.items():
        if isinstance(one, IndexedDataset):
            raise ValueError(
                f"{name}: {type(one).__name__} makes batches itself, which cannot be collated with those of "
                "others; leave out collate, or give a dataset of rows"
            )
    readers.check_datasets(columns)
    return _Read(columns, collate or collate_columns)


def _is_columns(domain: Any) -> bool:
    return isinstance(domain, tuple) and bool(domain) and all(isinstance(one, Tensor) for one in domain)
