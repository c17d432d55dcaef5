"""Batches for a loop of one's own, which follow the mixer's weights."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from mixwell import distributed
from mixwell.data.datasets import IndexedDataset, as_rows, like_container
from mixwell.data.sampler import Rule, Sampler
from mixwell.data.sharding import Cut, cut
from mixwell.signals.probes import rows_of
from mixwell.simplex.repetition import EpochCap
from mixwell.typing import Indices, Vector

if TYPE_CHECKING:
    from mixwell.mixer.mixer import Mixer


@final
class MixtureLoader:
    """Draws rows of several domains; how many of each follows the weights.

    See :class:`mixwell.data.sampler.Sampler` for how they are chosen. In several processes
    (``torch.distributed``) all draw the same batch, and each has its own rows of it
    (:func:`mixwell.data.sharding.cut`).

    Args:
        domains: by name a PyTorch dataset, a tensor, a tuple of tensors, or rows.
        batch_size: rows of a step, all domains and all processes together.
        rule: ``"weight"``, ``"equal"``, or ``"noise"`` with what the loop writes to ``loader.sampler.noise``.
        least: rows that each domain has in every batch; ``None`` for a quarter of an equal share.
        cap: how often rows may be seen; give the same object to the mixer's constraints.
        seed: of the orders.
        workers: processes that read rows ahead for :meth:`follow` and :meth:`follow_mixed`, as those of PyTorch's
            ``DataLoader``. They read to the end of the round, within which the weights stay as they are.

    Raises:
        ValueError: a setting does not fit.

    Example:
        >>> loader = MixtureLoader({"web": torch.arange(100), "code": torch.arange(50)}, 8, least=1)
        >>> {name: len(batch) for name, batch in loader.by_domain(np.array([0.75, 0.25])).items()}
        {'web': 6, 'code': 2}
        >>> batch, labels = loader.mixed(np.array([0.75, 0.25]))
        >>> batch.shape, sorted(labels.tolist())
        (torch.Size([8]), [0, 0, 0, 0, 0, 0, 1, 1])
    """

    def __init__(
        self,
        domains: Mapping[str, Any],
        batch_size: int,
        *,
        rule: Rule = "weight",
        least: int | None = None,
        cap: EpochCap | None = None,
        seed: int = 0,
        workers: int = 0,
    ) -> None:
        if workers < 0:
            raise ValueError(f"the number of workers must not be negative, got {workers}")
        self._workers = workers
        self.rows = {name: as_rows(one) for name, one in domains.items()}
        """The rows of each domain."""
        sizes = {name: len(one) for name, one in self.rows.items()}
        self.sampler = Sampler(sizes, batch_size, rule=rule, least=least, cap=cap, seed=seed)
        """Chooses the rows."""
        self.portions: dict[str, float] = {}
        """Of the batch that was drawn last, in several processes: give it to ``mixer.portions`` where you call
        :meth:`by_domain` or :meth:`mixed` yourself."""
        self._given: dict[str, Any] | None = None

    def follow(self, mixer: Mixer) -> Iterator[dict[str, Any]]:
        """Batches by domain for every step of a mixer, until its budget is spent.

        Args:
            mixer: whose weights to follow. It is told how often each domain is there, and in several processes
                how many of its rows are here: call ``scope.scaled_loss(loss).backward()`` then.

        Yields:
            By domain what its rows give. Of a domain whose rows are all in other processes there is none, or one
            that counts nothing where all processes must run the model as often (``fully_shard``).

        Raises:
            ValueError: the mixer has other domains.
        """
        yield from self._follow(mixer, requires_equal_forward_passes=mixer.requires_equal_forward_passes)

    def follow_mixed(self, mixer: Mixer) -> Iterator[tuple[Any, Tensor]]:
        """Mixed batches for every step of a mixer, until its budget is spent.

        Args:
            mixer: whose weights to follow. It is told how often each domain is there.

        Yields:
            The rows of all domains, and for each the number of its domain, for ``mixer.batch(labels)``.
        """
        places = torch.tensor([mixer.weights.index(name) for name in self.sampler.names])
        for parts in self._follow(mixer, requires_equal_forward_passes=False):
            rows, labels = self._labeled(parts)
            yield rows, places[labels]

    def _follow(self, mixer: Mixer, *, requires_equal_forward_passes: bool) -> Iterator[dict[str, Any]]:
        names = self.sampler.names
        if set(names) != set(mixer.weights.names):
            raise ValueError(
                f"the loader has the domains {', '.join(names)}, the mixer {', '.join(mixer.weights.names)}"
            )
        if self._given is not None:  # what was read ahead and not given comes again
            self.sampler.load_state(self._given)
        places = [mixer.weights.index(name) for name in names]
        steps = _Steps(
            self,
            mixer,
            places,
            requires_equal_forward_passes=requires_equal_forward_passes,
            ahead=self._workers > 0,
        )
        read = _Read(self.rows)
        reading: DataLoader[Any] | None = None
        if self._workers:
            reading = DataLoader(
                read,
                None,
                sampler=steps,
                num_workers=self._workers,
                persistent_workers=True,
                collate_fn=_as_it_is,
            )
        while mixer.budget is None or mixer.steps_done < mixer.budget:
            for batch in map(read.__getitem__, steps) if reading is None else reading:  # to the round's end
                self._given, often, self.portions = steps.told.popleft()
                mixer.inclusion, mixer.portions = often, self.portions
                yield batch

    def draw(self, weights: Vector) -> Cut:
        """This process's rows of the next batch.

        Args:
            weights: of the domains, shape ``(m,)``.

        Returns:
            Their indices.
        """
        drawn = self.sampler.draw(weights)
        own = cut(drawn, rank=distributed.rank(), processes=distributed.world_size())
        self.portions = own.portions
        return own

    def by_domain(self, weights: Vector) -> dict[str, Any]:
        """The next batch, domain by domain.

        Args:
            weights: of the domains, shape ``(m,)``.

        Returns:
            By domain what its rows give; domains that are not in this batch are left out.
        """
        return {name: self.rows[name].batch(chosen) for name, chosen in self.draw(weights).rows.items()}

    def mixed(self, weights: Vector) -> tuple[Any, Tensor]:
        """The next batch as one, with a label for each row.

        Args:
            weights: of the domains, shape ``(m,)``.

        Returns:
            The rows of all domains one after the other, and the number of each row's domain, shape ``(rows,)``.
        """
        return self._labeled(self.by_domain(weights))

    def _labeled(self, parts: Mapping[str, Any]) -> tuple[Any, Tensor]:
        drawn = {name: self.sampler.names.index(name) for name in parts}
        labels = [np.full(rows_of(part), drawn[name]) for name, part in parts.items()]
        return joined(list(parts.values())), torch.from_numpy(np.concatenate(labels))

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed run needs, as plain values: the place after the batch that was given last.

        It is the same in all processes, and for any number of them.
        """
        return self.sampler.state() if self._given is None else self._given

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where another loader stopped.

        Args:
            state: what :meth:`state_dict` gave.
        """
        self.sampler.load_state(state)
        self._given = None


@final
class _Steps:
    """The rows of the steps until the weights may change, drawn as they are asked for."""

    def __init__(
        self,
        loader: MixtureLoader,
        mixer: Mixer,
        places: list[int],
        *,
        requires_equal_forward_passes: bool,
        ahead: bool,
    ) -> None:
        self._loader, self._mixer, self._places = loader, mixer, places
        self._lockstep, self._ahead = requires_equal_forward_passes, ahead
        self.told: deque[tuple[dict[str, Any] | None, dict[str, float], dict[str, float]]] = deque()
        """Of each step that was drawn the state after it where more is drawn ahead, how often domains are there,
        and portions."""

    def __iter__(self) -> Iterator[dict[str, Indices]]:
        weights = self._mixer.weights.values[self._places]
        for _ in range(max(self._mixer.round_left, 1)):
            often = self._loader.sampler.inclusion(weights)
            own = self._loader.draw(weights)
            self.told.append((self._loader.sampler.state() if self._ahead else None, often, own.portions))
            yield own.requires_equal_forward_passes if self._lockstep else own.rows


@final
class _Read(Dataset[Any]):
    """Makes batches of indices, also in workers."""

    def __init__(self, rows: Mapping[str, IndexedDataset]) -> None:
        self._rows = rows

    def __getitem__(self, chosen: dict[str, Indices]) -> dict[str, Any]:
        return {name: self._rows[name].batch(indices) for name, indices in chosen.items()}


def _as_it_is(batch: Any) -> Any:
    return batch


def _has_columns(batch: Any) -> bool:
    """Whether it is several columns, and not one of plain values such as strings."""
    return isinstance(batch, tuple | list) and isinstance(batch[0], Tensor | Mapping | tuple | list)


def joined(batches: list[Any]) -> Any:
    """Several batches as one.

    Args:
        batches: tensors, mappings, tuples or lists, all of the same form.

    Returns:
        Their rows one after the other, in the same form.
    """
    first = batches[0]
    if isinstance(first, Tensor):
        return torch.cat(batches)
    if isinstance(first, Mapping):
        return {key: joined([one[key] for one in batches]) for key in first}
    if _has_columns(first):
        return like_container(first, [joined([one[place] for one in batches]) for place in range(len(first))])
    return [value for one in batches for value in one]
