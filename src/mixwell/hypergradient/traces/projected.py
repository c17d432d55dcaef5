"""Traces from one ordinary backward pass on a mixed batch."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import cast, final, get_args

import torch
from torch import Tensor

from mixwell import distributed
from mixwell.hypergradient.capture.accumulators import ProjectedAccumulator
from mixwell.hypergradient.capture.hooks import CaptureContext, LayerHooks, Rest
from mixwell.hypergradient.capture.projections import Projection, Projections
from mixwell.hypergradient.capture.row_groups import RowGroups
from mixwell.hypergradient.parameters import Parameters
from mixwell.hypergradient.traces.base import Combined, StepModel, Traces
from mixwell.typing import Gradients, Json, Vector

# Of so few steps none is given up.
SHORT_ROUND = 10


@final
class ProjectedTraces(Traces):
    """The trace of every domain, projected to ``r x r`` numbers per layer.

    The projections are those of :mod:`mixwell.hypergradient.capture.projections`.

    From one mixed batch whose rows carry a domain label: the weighted loss runs one ordinary backward pass, and
    hooks on the layers add ``(dY B)^T (X A)`` over each domain's rows. Its cost does not depend on the number
    of domains, and no gradient of a domain is ever formed. Biases and norms are exact. Given one batch per
    domain, the gradients themselves are projected.

    ``z_j <- (1 - eta lambda - eta gamma) z_j + eta g_j`` runs on the projections, the preconditioner of Adam
    being applied at the end of the round, to the validation gradient: it changes slowly, and a projected
    gradient cannot be scaled element by element. Random matrices are drawn anew for every round, so that
    their errors do not add up over rounds, around the leading directions of the last validation gradient, which
    are exact. In the first round they are those of the first step's gradient, whose own trace is given up for it
    where the round has more than ten steps.

    Linear layers (also the ``Conv1D`` of transformers), embeddings, convolutions, LayerNorm and RMSNorm are
    known; a layer of another kind that has no parts is run again for the rows of each domain. A parameter that is
    used otherwise (a positional table that the model adds by itself, multi-head attention of PyTorch) is named
    and treated as ``rest`` says. In the first step of every round the sum over the domains is compared with the
    gradient itself, so that none is missed.

    Args:
        rank: r. More is more exact and slower.
        rest: ``"leave-out"`` parameters that hooks do not cover, as if they did not depend on the weights, or take
            them ``"per-domain"`` by one more backward pass for each domain.
        check: look at the first batch twice, to see that the rows stay apart in all layers.
        seed: of the random matrices.

    Raises:
        ValueError: the rank is below 1 or ``rest`` is unknown.
    """

    supports_mixed_batches = True

    def __init__(
        self,
        rank: int = 32,
        *,
        rest: Rest = "leave-out",
        check: bool = True,
        seed: int = 0,
    ) -> None:
        if rank < 1:
            raise ValueError(f"the rank of a projection must be at least 1, got {rank}")
        if rest not in get_args(Rest):
            raise ValueError(f"rest must be 'leave-out' or 'per-domain', got {rest!r}")
        self.rank = int(rank)
        self.rest: Rest = rest
        self.check = check
        self.seed = int(seed)

    def __repr__(self) -> str:
        return f"ProjectedTraces({self.rank}, rest={self.rest!r}, seed={self.seed})"

    def allocate(self, parameters: Parameters, domains: int, step: StepModel) -> None:
        """Take ``2 m`` rows of projected gradients, and the random matrices.

        Args:
            parameters: what is trained.
            domains: the number m.
            step: what a step does.
        """
        self._parameters = parameters
        self._step = step
        self._projections = Projections(parameters, self.rank, self.seed)
        self._stored = self._projections.empty_rows(domains)
        self._gathered = self._projections.empty_rows(domains)
        self._rows_weights: Vector | None = None
        self._watcher: LayerHooks | None = None
        self._sums: ProjectedAccumulator | None = None
        self.reset(0)
        self._factors(1.0)

    def reset(self, round_index: int, validation: Gradients | None = None) -> None:
        """Set all traces to zero and draw new projections.

        Args:
            round_index: the number of the round that begins.
            validation: the validation gradient that ended the round before, where there was one.
        """
        self._round = round_index
        self._stored.zero_()
        self._empty = True
        missing: Gradients = [None] * len(self._parameters)
        self._projections.align(missing if validation is None else validation)
        self._projections.draw(round_index)

    def begin_step(self, step: StepModel) -> None:
        """Forget what an abandoned step gathered.

        Args:
            step: what the step does.
        """
        self._step = step
        self._rows_weights = None
        self._gathered.zero_()

    def add(self, domain: int, gradients: Gradients, scale: float) -> None:
        """Project a gradient of one domain.

        Args:
            domain: which.
            gradients: its gradient.
            scale: its factor.
        """
        self._gathered[domain].add_(self._projections.project(gradients), alpha=scale)

    @contextmanager
    def rows(self, segments: RowGroups, weights: Vector) -> Generator[CaptureContext]:
        """Gather the gradients of a mixed batch.

        Args:
            segments: which rows belong to which domain.
            weights: by which the losses of the rows are weighted, positive, shape ``(m,)``.

        Yields:
            What is to be told the weighted losses.
        """
        if self._watcher is None:
            self._watcher = LayerHooks(self._parameters, rest=self.rest, check=self.check)
        if self._sums is None:
            self._sums = ProjectedAccumulator(self._projections, segments, rows=self._gathered)
        self._sums.segments = segments
        self._rows_weights = weights
        with self._watcher.watch(self._sums) as watch:
            yield watch

    def non_finite(self) -> list[int]:
        """The domains whose gathered gradient is not finite."""
        if math.isfinite(float(self._gathered.sum())):
            return []
        return [j for j, row in enumerate(self._gathered) if not bool(row.isfinite().all())]

    def end_step(self, combined: Combined) -> None:
        """``z_j <- shrink * z_j + rate * g_j``, now that the clipping of this step is known.

        Args:
            combined: what the optimizer is about to be given.
        """
        if self._rows_weights is not None:
            if self._empty:
                self._find_uncovered(combined)
            self._gathered.mul_(torch.from_numpy(1 / self._rows_weights).to(self._gathered).unsqueeze(1))
        shrinks, rates = self._factors(combined.clip)
        for index, gradient in enumerate(combined.gradients):
            if gradient is None:  # the optimizer leaves it alone
                shrinks[index], rates[index] = 1.0, 0.0
        alone = not any(rates) or self._step.remaining > SHORT_ROUND
        if self._round == 0 and self._projections.unaligned and alone:
            # The first gradient says which directions matter. Adam's leaves no trace anyway.
            self._projections.align(combined.gradients)
            self._projections.draw(self._round)
            return
        for part, shrink, rate in self._runs(shrinks, rates):
            self._stored[:, part].mul_(shrink).add_(self._gathered[:, part], alpha=rate)
        self._empty = False

    def dot(self, vector: Gradients) -> Vector:
        """``<B^T (P vector) A, z_j>``, the mean of what the processes have.

        Args:
            vector: one tensor per parameter.

        Returns:
            Shape ``(m,)``.
        """
        row = self._projections.project(self._preconditioned(vector))
        own = (self._stored @ row).double().cpu().numpy()
        return distributed.all_reduce_sum(own, self._parameters.device) / distributed.world_size()

    @property
    def unsupported(self) -> dict[str, str]:
        """The parameters whose gradients hooks cannot tell apart, and why; known after the first mixed batch."""
        found = {} if self._watcher is None else self._watcher.unsupported
        return {self._parameters.names[index]: reason for index, reason in found.items()}

    @property
    def nbytes(self) -> int:
        """The memory of traces and random matrices."""
        return self._stored.nbytes + self._gathered.nbytes + self._projections.nbytes

    def state(self) -> tuple[Json, dict[str, Tensor]]:
        """The traces, and the directions that are exact; the random columns follow from the seed and the round."""
        values: Json = {"round": self._round, "empty": self._empty}
        bases = {f"{name}.{side}": basis for name, one in self._named() for side, basis in one.bases.items()}
        return values, {"stored": self._stored, **bases}

    def load_state(self, values: Json, tensors: Mapping[str, Tensor]) -> None:
        """Take up traces and draw their projections again.

        Args:
            values: the number of the round.
            tensors: the traces.
        """
        self.reset(int(cast("int", values["round"])))
        for name, one in self._named():
            one.bases = {side: tensors[f"{name}.{side}"] for side in one.bases}
        self._projections.draw(self._round)
        self._empty = bool(values["empty"])
        self._stored.copy_(tensors["stored"])

    def _named(self) -> Iterator[tuple[str, Projection]]:
        return zip(self._parameters.names, self._projections.each, strict=True)

    def _preconditioned(self, vector: Gradients) -> Iterator[Tensor | None]:
        # P v, one parameter at a time.
        for index, gradient in enumerate(vector):
            scale = None if gradient is None else self._step.preconditioner(index)
            yield gradient if gradient is None or scale is None else distributed.full_tensor(gradient * scale)

    def _factors(self, clip: float) -> tuple[list[float], list[float]]:
        """The decay and the rate of every parameter in this step."""
        refused = (
            "projected traces need one decay per parameter: use IsotropicCurvature or PerTensorCurvature, and "
            "AdamW instead of Adam with weight decay; or use DenseTraces"
        )
        step = replace(self._step, clip=clip)
        if step.optimizer.preconditions and any(response.coupled for response in step.responses):
            raise ValueError(refused)
        shrinks = [step.shrink(index) for index in range(len(self._parameters))]
        numbers = [float(shrink) for shrink in shrinks if not isinstance(shrink, Tensor)]
        if len(numbers) < len(shrinks):
            raise ValueError(refused)
        return numbers, [step.rate(index) for index in range(len(self._parameters))]

    def _runs(self, shrinks: list[float], rates: list[float]) -> list[tuple[slice, float, float]]:
        """Neighboring parameters with the same factors as one."""
        runs: list[tuple[slice, float, float]] = []
        for place, shrink, rate in zip(self._projections.places, shrinks, rates, strict=True):
            if runs and runs[-1][1:] == (shrink, rate):
                runs[-1] = (slice(runs[-1][0].start, place.stop), shrink, rate)
            else:
                runs.append((place, shrink, rate))
        return runs

    def _find_uncovered(self, combined: Combined) -> None:
        """Compare the sum of the weighted gradients that were gathered with the gradient itself."""
        assert self._watcher is not None
        seen = distributed.all_reduce_mean(self._gathered * combined.clip)
        whole = self._projections.project(combined.gradients)
        for index in self._watcher.compare(seen, whole, self._projections):
            self._gathered[:, self._projections.places[index]] = 0.0
        self._watcher.tell()
