"""A network learns from the validation set which rows help."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import final

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.optim import Optimizer

from mixwell.hypergradient.capture.row_groups import Labels, RowGroups
from mixwell.hypergradient.parameters import Parameters
from mixwell.signals.directional import Derivatives
from mixwell.signals.probes import Probes
from mixwell.signals.row_curriculum import RowCurriculum
from mixwell.signals.row_networks import RowNetwork
from mixwell.signals.row_weighting import Level, expect_probes
from mixwell.typing import Gradients, Json, Vector

EMBEDDING = 2
"""Numbers that are learned of a domain (the paper's embedding of a label)."""
TIMES = 5
"""Numbers that tell how far the run is (the paper's embedding of the epoch)."""


@final
class LearnedRowCurriculum(RowCurriculum):
    """MentorNet with a data-driven curriculum, learned while the model trains (after Jiang et al. 2018).

    ``v_i = sigmoid(net(l_i, l_i - lambda, domain, time))``. When a round ends, the network takes some steps of
    Adam on fresh rows of all domains (the probes'), towards the rows that help the validation set:

        ``cross-entropy of v_i and 1[<grad L_V(theta), grad l_i(theta)> > 0]``, row i by ``mu_i = p_d / n_d``

    The inner products of all rows are one pass in forward mode (:class:`mixwell.signals.directional.Derivatives`).

    Args:
        level: ``"rows"``: weigh every row; ``"domains"``: give each domain the sum over its rows as its weight
            (:class:`mixwell.signals.row_weighting.RowWeighting` says how).
        steps: that the run's rounds have together.
        percentile: of a batch's losses, from 0 to 1.
        decay: of the moving average of the percentile, ``lambda`` (:class:`RowCurriculum`).
        burn_in: the share of the steps in which all rows have weight one; the network learns in it already.
        normalize: divide the weights of a batch by their mean, so that a step is as long as without them.
        hidden: width of the hidden layer.
        learning_rate: of Adam.
        network_steps: that Adam takes when a round ends; next to training they cost nothing.
        seed: of the network's first weights.

    Raises:
        ValueError: there is no such level, or a number is out of range.

    References:
        Jiang, Zhou, Leung, Li, Fei-Fei, "MentorNet: Learning Data-Driven Curriculum for Very Deep Neural Networks
        on Corrupted Labels" (2018).
    """

    def __init__(
        self,
        level: Level = "rows",
        *,
        steps: int,
        percentile: float = 0.7,
        decay: float = 0.9,
        burn_in: float = 0.2,
        normalize: bool = False,
        hidden: int = 20,
        learning_rate: float = 1e-3,
        network_steps: int = 50,
        seed: int = 0,
    ) -> None:
        super().__init__(
            level, steps=steps, percentile=percentile, decay=decay, burn_in=burn_in, normalize=normalize
        )
        if hidden < 1 or network_steps < 1 or not learning_rate > 0:
            raise ValueError(
                "the network needs at least 1 hidden unit, 1 step and a positive learning rate; got "
                f"{hidden}, {network_steps} and {learning_rate}"
            )
        self.network_steps = int(network_steps)
        self.hidden, self.learning_rate, self.seed = int(hidden), float(learning_rate), int(seed)

    def __repr__(self) -> str:
        return (
            f"LearnedRowCurriculum({self.settings}, hidden={self.hidden}, "
            f"learning_rate={self.learning_rate!r}, network_steps={self.network_steps}, seed={self.seed})"
        )

    def attach(
        self,
        optimizer: Optimizer,
        parameters: Parameters,
        domains: Sequence[str],
        probes: Probes | None = None,
    ) -> None:
        """Make the network.

        Args:
            optimizer: not used.
            parameters: what is trained.
            domains: their names.
            probes: with the losses of rows.

        Raises:
            ValueError: probes are missing, or it is in use by another mixer.
        """
        self._probes = expect_probes(self, probes, validation=False)
        self._probes.expect(domains, self)
        self._derivatives = Derivatives(self._probes, parameters)
        super().attach(optimizer, parameters, domains, probes)
        first = parameters.tensors[0]
        self._network = RowNetwork(
            2 + EMBEDDING + TIMES,
            self.hidden,
            seed=self.seed,
            device=first.device,
            dtype=torch.promote_types(first.dtype, torch.float32),
            saturating=True,
            learning_rate=self.learning_rate,
            weight_decay=0.0,
            embeddings=len(domains),
            size=EMBEDDING,
        )

    def scores(self, validation: Gradients | None) -> Vector:
        """Let the network learn, then as at every level.

        Args:
            validation: the validation gradient at the end of the round.

        Returns:
            Shape ``(m,)``.
        """
        assert validation is not None
        with self._derivatives.evaluating():
            self._learn(validation)
        return super().scores(validation)

    def _curriculum(self, losses: Tensor, pace: float, segments: RowGroups) -> Tensor:
        return self._logits(losses, pace, segments.labels, self._done()).sigmoid()

    def _learn(self, validation: Gradients) -> None:
        if not self._seen:
            return  # no step of the round could be taken, so there is no moving average yet
        found = [self._derivatives.along(self._probes.batch(name), validation) for name in self._domains]
        losses, products = (torch.cat(parts) for parts in zip(*found, strict=True))
        counts = [len(own) for own, _ in found]
        measure = torch.from_numpy(np.repeat(self._base() / np.array(counts), counts))
        if not bool(products.isfinite().all()):
            raise FloatingPointError(
                "the derivatives of rows along the validation gradient are not finite: look at the losses of the "
                "domains, or lower the learning rate"
            )
        labels = np.repeat(np.arange(len(counts)), counts)
        pace, ended = self._pace(self._average, self._seen), self._before + self._length
        for _ in range(self.network_steps):
            with torch.enable_grad():
                logits = self._logits(losses, pace, labels, min(ended / self.steps, 1.0))
                wanted = (products > 0).to(logits)
                each = functional.binary_cross_entropy_with_logits(logits, wanted, reduction="none")
                self._network.descend((each * measure.to(each)).sum())

    def _logits(self, losses: Tensor, pace: float, labels: Labels, done: float) -> Tensor:
        own = self._network.tensors["embeddings"]
        losses = losses.to(own)
        # Smooth in time, so that what was learned of one moment holds for the next.
        times = own.new_tensor([math.cos(math.pi * k * done) for k in range(1, TIMES + 1)])
        parts = [
            torch.stack([losses, losses - pace], dim=1),
            own[torch.from_numpy(labels).to(own.device)],
            times.expand(len(losses), -1),
        ]
        return self._network.logits(torch.cat(parts, dim=1))

    @property
    def nbytes(self) -> int:
        """The memory of the network."""
        return self._network.nbytes

    def state(self) -> tuple[Json, dict[str, Tensor]]:
        """What was added up, and the network."""
        values, tensors = super().state()
        return values, tensors | {f"network.{name}": t for name, t in self._network.state().items()}

    def load_state(self, values: Json, tensors: Mapping[str, Tensor]) -> None:
        """Take up what :meth:`state` gave.

        Args:
            values: its plain values.
            tensors: its tensors.
        """
        super().load_state(values, tensors)
        self._network.load_state({name.removeprefix("network."): t for name, t in tensors.items()})
