"""Traces from one ordinary backward pass on a mixed batch: ``B^T z_j A``, r x r numbers per layer.

The recursion is linear, so it runs on projections: ``B^T z_j A <- shrink * B^T z_j A + rate * (dY B)^T (X A)``.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import cast, final, get_args

import torch
from torch import Tensor
from typing_extensions import override

from mixwell import distributed
from mixwell.hypergradient.capture.accumulators import ProjectedAccumulator
from mixwell.hypergradient.capture.hooks import CaptureContext, HookFindings, LayerHooks, Unsupported
from mixwell.hypergradient.capture.projections import Projection, Projections
from mixwell.hypergradient.capture.row_groups import RowGroups
from mixwell.hypergradient.parameters import Parameters
from mixwell.hypergradient.traces.base import TRACES, Combined, StepModel, Traces, TracesConfig
from mixwell.hypergradient.traces.clipping import clipping_coefficients
from mixwell.hypergradient.traces.selection import Only, Selection
from mixwell.typing import Gradients, Json, Vector
from mixwell.utils.sections import Whole

# A round with this many steps or fewer cannot do without its first one.
SHORT_ROUND = 10


@final
class ProjectedTraces(Traces):
    """The trace of every domain, projected to ``r x r`` numbers per layer.

    The projections are those of :mod:`mixwell.hypergradient.capture.projections`.

    From one mixed batch whose rows carry a domain label: the weighted loss runs one ordinary backward pass, and
    hooks on the layers add ``(dY B)^T (X A)`` over each domain's rows. Its cost does not depend on the number
    of domains, and no gradient of a domain is ever formed. Biases and norms are exact. Given one batch per
    domain, the gradients themselves are projected.

    ``z_j <- (1 - eta lambda - eta gamma) z_j + eta g_j`` runs on the projections. The optimizer's preconditioner
    is applied at the end of the round, to the validation gradient (``<v, P z> = <P^T v, z>``): it changes slowly,
    and a projected gradient cannot be preconditioned. Random matrices are drawn anew for every round, so that
    their errors do not add up over rounds, around the leading directions of the last validation gradient, which
    are exact. In the first round they are those of the first step's gradient, whose own trace is given up for it
    where the round has more than ten traced steps.

    Linear layers (also the ``Conv1D`` of transformers), embeddings, convolutions, LayerNorm and RMSNorm have
    rules; a layer of another type without submodules is run again for the rows of each domain. A parameter that is
    used outside of layers, such as a table of positions, is followed to where it meets rows. What hooks do not see
    (an operation in place, reentrant activation checkpointing) is named in a warning and treated as
    ``unsupported`` says. In the first step of every round the sum over the domains is compared with the gradient
    itself, so that none is missed.

    Args:
        rank: r. More is more exact and slower.
        only: the parameters that have traces, by names or shell patterns (``"head.*"``) or a function of the name;
            the others count as if they did not depend on the weights.
        unsupported: ``"ignore"`` parameters that hooks do not support, as if they did not depend on the weights,
            or handle them ``"per_domain"`` by one more backward pass for each domain.
        check: differentiate the first batch twice, and later ones that run other layers, to verify that the rows
            are independent in all layers. With sharded parameters (``fully_shard``) this is not verified: run the
            first batch in one process before.
        seed: of the random matrices.
    """

    supports_mixed_batches = True
    clips_on_device = True
    supports_skipping = True

    def __init__(
        self,
        rank: int = 32,
        *,
        only: Only | None = None,
        unsupported: Unsupported = "ignore",
        check: bool = True,
        seed: int = 0,
    ) -> None:
        if rank < 1:
            raise ValueError(f"the rank of a projection must be at least 1, got {rank}")
        if unsupported not in get_args(Unsupported):
            raise ValueError(f"unsupported must be 'ignore' or 'per_domain', got {unsupported!r}")
        self.rank = int(rank)
        self._unsupported: Unsupported = unsupported
        self.check = check
        self.seed = int(seed)
        self._selection = Selection(only)

    def __repr__(self) -> str:
        only = f", {self._selection}" if str(self._selection) else ""
        return f"ProjectedTraces({self.rank}{only}, unsupported={self._unsupported!r}, seed={self.seed})"

    @override
    def allocate(self, parameters: Parameters, domains: int, step: StepModel) -> None:
        self._parameters = parameters = self._selection.bind(parameters)
        self._step = self._selection.step(step)
        self._projections = Projections(parameters, self.rank, self.seed)
        self._stored = self._projections.empty_rows(domains)
        self._gathered = self._projections.empty_rows(domains)
        self._row_weights: Vector | None = None
        self._hooks: LayerHooks | None = None
        self._findings = HookFindings()
        self._compared: tuple[Tensor, Tensor] | None = None
        self._accumulator: ProjectedAccumulator | None = None
        self.reset(0)
        self._factors(1.0)  # refuses an optimizer that these traces cannot follow

    @override
    def reset(self, round_index: int, validation: Gradients | None = None) -> None:
        """Set all traces to zero and draw new projections around the leading directions of a gradient."""
        self._round = round_index
        self._stored.zero_()
        self._empty = True
        directions = None if validation is None else self._selection.gradients(validation)
        self._projections.align([None] * len(self._parameters) if directions is None else directions)
        self._projections.resample(round_index)

    @override
    def begin_step(self, step: StepModel) -> None:
        """Drop the gradients of an abandoned step."""
        self._step = self._selection.step(step)
        self._row_weights = None
        self._gathered.zero_()

    @override
    def skip(self, step: StepModel, count: int) -> None:
        self._step = self._selection.step(step)
        shrinks = [shrink**count for shrink in self._factors(step.clip)[0]]
        for columns, shrink, _ in self._runs(shrinks, [0.0] * len(shrinks)):
            self._stored[:, columns].mul_(shrink)

    @override
    def add(self, domain: int, gradients: Gradients, scale: float) -> None:
        gradients = self._selection.gradients(gradients)
        self._gathered[domain].add_(self._projections.project(gradients), alpha=scale)

    @override
    @contextmanager
    def capture(self, row_groups: RowGroups, weights: Vector) -> Generator[CaptureContext]:
        if self._hooks is None:
            self._hooks = LayerHooks(
                self._parameters, unsupported=self._unsupported, check=self.check, known=self._findings
            )
        if self._accumulator is None:  # kept, with its views of the sums
            self._accumulator = ProjectedAccumulator(self._projections, row_groups, rows=self._gathered)
        self._accumulator.row_groups = row_groups
        self._row_weights = weights
        with self._hooks.capture(self._accumulator) as context:
            yield context

    @override
    def gradient_sum(self) -> Tensor:
        return self._gathered.sum()

    @override
    def non_finite(self) -> list[int]:
        return [j for j, row in enumerate(self._gathered) if not bool(row.isfinite().all())]

    @override
    def end_step(self, combined: Combined) -> None:
        """``z_j <- shrink * z_j + rate * g_j``, now that the clipping of this step is known."""
        gradients = self._selection.gradients(combined.gradients)
        if self._row_weights is not None:
            if self._empty:
                self._find_unsupported(self._selection.gradients(combined.of_domains()), combined)
            # The backward pass was that of the weighted losses; a trace is of the domain's own gradient.
            self._gathered.mul_(torch.from_numpy(1 / self._row_weights).to(self._gathered).unsqueeze(1))
        self._differentiate_clipping(combined, gradients)
        shrinks, rates = self._factors(combined.clip)
        if combined.clip_on_device is not None:
            self._gathered.mul_(combined.clip_on_device)
            shrinks, _ = self._factors(
                self._step.clip
            )  # a small number times the factor, as it was last read
        for index, gradient in enumerate(gradients):
            if gradient is None:  # the optimizer does not change it
                shrinks[index], rates[index] = 1.0, 0.0
        dispensable = not any(rates) or self._step.remaining > SHORT_ROUND * self._step.interval
        if self._round == 0 and self._projections.unaligned and dispensable:
            # The first gradient shows which directions matter, and the projections of this step's terms are not
            # those of the next. Adam's first step leaves no trace anyway.
            self._projections.align(gradients)
            self._projections.resample(self._round)
            return
        for columns, shrink, rate in self._runs(shrinks, rates):
            self._stored[:, columns].mul_(shrink).add_(self._gathered[:, columns], alpha=rate)
        self._empty = False

    def _differentiate_clipping(self, combined: Combined, gradients: Gradients) -> None:
        """``g_j <- g_j - a_j G`` where the step is clipped; inner products are those of the projections."""
        if combined.clip_on_device is not None and combined.norm_on_device is not None:
            row = self._combined_row(gradients)
            clip, norm = combined.clip_on_device, combined.norm_on_device
            along = (self._gathered @ row) / (row @ row) * (norm / (norm + 1e-6))
            self._gathered.addr_(torch.where(clip < 1, along, 0.0), row, alpha=-1)
            return
        if not combined.clipped:
            return
        row = self._combined_row(gradients)
        products = (self._gathered @ row).double().cpu().numpy()
        along = clipping_coefficients(combined, products, float(row @ row))
        if along is not None:
            self._gathered.addr_(self._gathered.new_tensor(along), row, alpha=-1)

    def _combined_row(self, gradients: Gradients) -> Tensor:
        """Return the projection of the combined gradient, without what the traces leave out."""
        if self._row_weights is not None and self._parameters.sharded:
            # The sum over the domains, instead of gathering every gradient.
            weights = torch.from_numpy(self._row_weights).to(self._gathered)
            return distributed.all_reduce_mean(weights @ self._gathered)
        row = self._projections.project(gradients)
        left_out = self.unsupported if self._row_weights is not None else {}
        for name, columns in zip(self._parameters.names, self._projections.slices, strict=True):
            if name in left_out and self._unsupported == "ignore":
                row[columns] = 0.0
        return row

    @override
    def dot(self, vector: Gradients) -> Vector:
        """``<B^T (P^T vector) A, z_j>``, the mean over the processes."""
        self._read_comparison()
        # One parameter at a time, so that only one preconditioned gradient is held in full.
        preconditioned = (
            None if gradient is None else self._step.precondition_adjoint(index, gradient)
            for index, gradient in enumerate(self._selection.gradients(vector))
        )
        row = self._projections.project(preconditioned)
        local = (self._stored @ row).double().cpu().numpy()
        return distributed.all_reduce_sum(local, self._parameters.device) / distributed.world_size()

    @property
    def unsupported(self) -> dict[str, str]:
        """The parameters whose gradients hooks cannot separate, and why; known after the first mixed batch."""
        return dict((self._findings if self._hooks is None else self._hooks.findings).unsupported)

    @property
    @override
    def nbytes(self) -> int:
        return self._stored.nbytes + self._gathered.nbytes + self._projections.nbytes

    @override
    def state(self) -> tuple[Json, dict[str, Tensor]]:
        """Return the traces and the exact directions; the random columns follow from the seed and the round."""
        self._read_comparison()
        # A resumed run looks for unsupported parameters only in the first step of the next round.
        found = self._findings if self._hooks is None else self._hooks.findings
        values: Json = {"round": self._round, "empty": self._empty, "hooks": found.to_json()}
        bases = {f"{name}.{side}": basis for name, one in self._named() for side, basis in one.bases.items()}
        return values, {"stored": self._stored, **bases}

    @override
    def load_state(self, values: Json, tensors: Mapping[str, Tensor]) -> None:
        self.reset(int(cast("int", values["round"])))
        for name, one in self._named():
            one.bases = {side: tensors[f"{name}.{side}"] for side in one.bases}
        self._projections.resample(self._round)
        self._empty = bool(values["empty"])
        self._hooks, self._findings = None, HookFindings.from_json(values["hooks"])
        self._stored.copy_(tensors["stored"])

    def _named(self) -> Iterator[tuple[str, Projection]]:
        return zip(self._parameters.names, self._projections.each, strict=True)

    def _factors(self, clip: float) -> tuple[list[float], list[float]]:
        """Return the decay and the rate of every parameter in this step."""
        step, indices = replace(self._step, clip=clip), range(len(self._parameters))
        shrinks = step.scalar_shrinks(indices)
        if shrinks is None:
            raise ValueError(
                "projected traces need one decay per parameter: use AdamW instead of Adam with weight decay; or "
                "use DenseTraces"
            )
        return shrinks, [step.rate(index) for index in indices]

    def _runs(self, shrinks: list[float], rates: list[float]) -> list[tuple[slice, float, float]]:
        """Return the columns of neighboring parameters with the same factors as one: fewer, larger operations."""
        runs: list[tuple[slice, float, float]] = []
        for columns, shrink, rate in zip(self._projections.slices, shrinks, rates, strict=True):
            if runs and runs[-1][1:] == (shrink, rate):
                runs[-1] = (slice(runs[-1][0].start, columns.stop), shrink, rate)
            else:
                runs.append((columns, shrink, rate))
        return runs

    def _find_unsupported(self, gradients: Gradients, combined: Combined) -> None:
        """Compare the sum of the weighted gradients that were gathered with the gradient itself.

        On an accelerator the two are kept for the first validation gradient of the round, to be read then.
        """
        clip = combined.clip if combined.clip_on_device is None else combined.clip_on_device
        seen = distributed.all_reduce_mean(self._gathered * clip)
        self._compared = seen, self._projections.project(gradients)
        if seen.device.type == "cpu":
            self._read_comparison()

    def _read_comparison(self) -> None:
        if self._compared is None:
            return
        assert self._hooks is not None
        (seen, whole), self._compared = self._compared, None
        for index in self._hooks.compare(seen, whole, self._projections):
            for rows in (self._gathered, self._stored):
                rows[:, self._projections.slices[index]] = 0.0
        self._hooks.unsupported.warn()


@final
@TRACES.register("projected")
class ProjectedTracesConfig(TracesConfig):
    """Projections from one mixed batch."""

    takes_mixed_batches = True

    projection_rank: Whole = 32
    """Rank of projected traces: a higher one is more exact and slower."""

    @override
    def build(self) -> Traces:
        return ProjectedTraces(self.projection_rank)

    @override
    def projected_size(self, parameters: Parameters) -> int:
        return Projections(parameters, self.projection_rank, 0).size
