"""Batches for a loop of one's own, which follow the mixer's weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch
from torch import Tensor

from mixwell.constraints import EpochCap
from mixwell.data.rows import as_rows, same_kind
from mixwell.data.sampler import Rule, Sampler
from mixwell.probes import rows_of
from mixwell.weights import Vector

if TYPE_CHECKING:
    from mixwell.mixer import Mixer


@final
class Loader:
    """Draws rows of several domains; how many of each follows the weights.

    See :class:`mixwell.data.sampler.Sampler` for how they are chosen.

    Args:
        domains: by name a PyTorch dataset, a tensor, a tuple of tensors, or rows.
        batch_size: rows of a step, all domains together.
        rule: ``"weight"``, ``"equal"``, or ``"noise"`` with what the loop writes to ``loader.sampler.noise``.
        least: rows that each domain has in every batch; ``None`` for a quarter of an equal share.
        cap: how often rows may be seen; give the same object to the mixer's constraints.
        seed: of the orders.

    Example:
        >>> loader = Loader({"web": torch.arange(100), "code": torch.arange(50)}, 8, least=1)
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
    ) -> None:
        self.rows = {name: as_rows(one) for name, one in domains.items()}
        """The rows of each domain."""
        sizes = {name: len(one) for name, one in self.rows.items()}
        self.sampler = Sampler(sizes, batch_size, rule=rule, least=least, cap=cap, seed=seed)
        """Chooses the rows."""

    def follow(self, mixer: Mixer) -> Iterator[dict[str, Any]]:
        """Batches by domain for every step of a mixer, until its budget is spent.

        Args:
            mixer: whose weights to follow. It is told how often each domain is there.

        Yields:
            By domain what its rows give.

        Raises:
            ValueError: the mixer has other domains.
        """
        names = self.sampler.names
        if set(names) != set(mixer.weights.names):
            raise ValueError(
                f"the loader has the domains {', '.join(names)}, the mixer {', '.join(mixer.weights.names)}"
            )
        places = [mixer.weights.index(name) for name in names]
        while mixer.budget is None or mixer.steps_done < mixer.budget:
            weights = mixer.weights.values[places]
            mixer.inclusion = self.sampler.inclusion(weights)
            yield self.by_domain(weights)

    def follow_mixed(self, mixer: Mixer) -> Iterator[tuple[Any, Tensor]]:
        """Mixed batches for every step of a mixer, until its budget is spent.

        Args:
            mixer: whose weights to follow. It is told how often each domain is there.

        Yields:
            The rows of all domains, and for each the number of its domain, for ``mixer.batch(labels)``.
        """
        places = torch.tensor([mixer.weights.index(name) for name in self.sampler.names])
        for parts in self.follow(mixer):
            rows, labels = self._labelled(parts)
            yield rows, places[labels]

    def by_domain(self, weights: Vector) -> dict[str, Any]:
        """The next batch, domain by domain.

        Args:
            weights: of the domains, shape ``(m,)``.

        Returns:
            By domain what its rows give; domains that are not in this batch are left out.
        """
        return {name: self.rows[name].batch(chosen) for name, chosen in self.sampler.draw(weights).items()}

    def mixed(self, weights: Vector) -> tuple[Any, Tensor]:
        """The next batch as one, with a label for each row.

        Args:
            weights: of the domains, shape ``(m,)``.

        Returns:
            The rows of all domains one after the other, and the number of each row's domain, shape ``(rows,)``.
        """
        return self._labelled(self.by_domain(weights))

    def _labelled(self, parts: Mapping[str, Any]) -> tuple[Any, Tensor]:
        drawn = {name: self.sampler.names.index(name) for name in parts}
        labels = [np.full(rows_of(part), drawn[name]) for name, part in parts.items()]
        return joined(list(parts.values())), torch.from_numpy(np.concatenate(labels))

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed run needs, as plain values."""
        return self.sampler.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where another loader stopped.

        Args:
            state: what :meth:`state_dict` gave.
        """
        self.sampler.load_state(state)


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
        return same_kind(first, [joined([one[place] for one in batches]) for place in range(len(first))])
    return [value for one in batches for value in one]
