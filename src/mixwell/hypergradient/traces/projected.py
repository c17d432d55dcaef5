"""Traces from one ordinary backward pass on a mixed batch: ``B^T z_j A``, r x r numbers per layer.

The recursion is linear, so it runs on projections: ``B^T z_j A <- shrink * B^T z_j A + rate * (dY B)^T (X A)``.
An optimizer that preconditions gradients gives B and A the factors of a P of rank one.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import cast, final, get_args

import torch
from torch import Tensor
from typing_extensions import override

from mixwell import distributed
from mixwell.hypergradient.capture.accumulators import ProjectedAccumulator
from mixwell.hypergradient.capture.hooks import CaptureContext, HookFindings, LayerHooks, Unsupported
from mixwell.hypergradient.capture.projection import unscaled
from mixwell.hypergradient.capture.projections import Projections
from mixwell.hypergradient.capture.row_groups import RowGroups
from mixwell.hypergradient.parameters import Parameters
from mixwell.hypergradient.traces.base import TRACES, Combined, StepModel, Traces, TracesConfig
from mixwell.hypergradient.traces.clipping import (
    clipping_coefficients,
    coefficients_on_device,
    products_by_parameter,
)
from mixwell.hypergradient.traces.scale_schedule import ScaleSchedule
from mixwell.hypergradient.traces.selection import Only, Selection
from mixwell.typing import Gradients, Json, Vector
from mixwell.utils.sections import Whole

# A round with this many steps or fewer cannot do without its first one.
SHORT_ROUND = 10


@final
class ProjectedTraces(Traces):
    """The trace of every domain, projected to ``r x r`` numbers per layer.

    The projections are those of :mod:`mixwell.hypergradient.capture.projection`.

    From one mixed batch whose rows carry a domain label: the weighted loss runs one ordinary backward pass, and
    hooks on the layers add ``(dY B)^T (X A)`` over each domain's rows. Its cost does not depend on the number
    of domains, and no gradient of a domain is ever formed. Biases and norms are exact. Given one batch per
    domain, the gradients themselves are projected.

    ``z_j <- (1 - eta lambda - eta gamma) z_j + eta r c^T * g_j`` runs on the projections, with ``P ~ r c^T`` of
    the optimizer's preconditioner P at that step; a gradient that is not projected, such as that of a bias, is
    multiplied by P itself. The rest of P is applied at the end of the round, to the validation gradient
    (``<v, P z> = <P^T v / (r c^T), r c^T * z>``): it changes slowly. r and c are read anew when the optimizer has
    taken 10% more steps, or 50.

    Random matrices are drawn anew for every round, so that their errors do not add up over rounds, around the
    leading directions of the last round's mean validation gradient, which are exact. In the first round they are
    those of a parameter's first gradient that is not zero, whose own trace is given up for it where the round has
    more than ten traced steps.

    Linear layers (also the ``Conv1D`` of transformers), embeddings, convolutions, LayerNorm and RMSNorm have
    rules; a layer of another type without submodules is run again for the rows of each domain. A parameter that is
    used outside of layers, such as a table of positions, is followed to where it meets rows. What hooks do not see
    (an operation in place, reentrant activation checkpointing) is named in a warning and treated as
    ``unsupported`` says. In the first traced step of every round the sum over the domains is compared with the
    gradient itself, so that none is missed.

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
        preconditions = self._step.optimizer.preconditions
        self._projections = Projections(parameters, self.rank, self.seed, preconditioned=preconditions)
        self._scales = ScaleSchedule() if preconditions else None
        self._unscaled: list[int] = []
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
        """Set all traces to zero and draw new projections.

        Their exact directions are the leading ones of the mean of the vectors that :meth:`dot` was given.
        """
        self._round = round_index
        self._stored.zero_()
        self._empty = True
        if self._scales is not None:
            self._scales.end_round()
        self._projections.align_to_sketches()
        self._projections.resample(round_index)

    @override
    def begin_step(self, step: StepModel) -> None:
        """Drop the gradients of an abandoned step."""
        self._step = self._selection.step(step)
        if self._scales is not None and self._scales.due:
            self._scales.restart()
            self._read_scales(range(len(self._parameters)))
        elif self._unscaled:  # such as one that was frozen until now
            self._read_scales(self._unscaled)
        self._row_weights = None
        self._gathered.zero_()

    @override
    def skip(self, step: StepModel, count: int) -> None:
        self._step = self._selection.step(step)
        if self._scales is not None:
            self._scales.count(count)
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
        if self._projections.factors is not None:
            self._gathered.mul_(self._projections.factors)
        shrinks, rates = self._factors(combined.clip)
        if combined.clip_on_device is not None:
            self._gathered.mul_(combined.clip_on_device)
            # A small number times the factor, as it was last read.
            shrinks, _ = self._factors(self._step.clip)
        for index, gradient in enumerate(gradients):
            if gradient is None:  # the optimizer does not change it
                shrinks[index], rates[index] = 1.0, 0.0
        if self._round == 0:
            self._align_to_first(gradients, rates)
        for columns, shrink, rate in self._runs(shrinks, rates):
            self._stored[:, columns].mul_(shrink).add_(self._gathered[:, columns], alpha=rate)
        self._empty = False
        if self._scales is not None:
            self._scales.count(1)

    def _align_to_first(self, gradients: Gradients, rates: list[float]) -> None:
        """Keep the leading directions of the first gradients of parameters, before there is a validation gradient.

        The projections of this step's terms are not those of the next ones, so they are dropped. The first steps
        of Adam leave no trace anyway.
        """
        short = self._step.remaining <= SHORT_ROUND * self._step.interval
        aligned: list[int] = []
        for index, (gradient, one) in enumerate(zip(gradients, self._projections.each, strict=True)):
            if gradient is None or one.aligned or not one.alignable:
                continue
            if short and rates[index] and not one.mutes:
                continue
            one.align(distributed.full_tensor(gradient))
            if one.aligned:
                aligned.append(index)
                self._gathered[:, self._projections.slices[index]] = 0.0
        self._projections.resample(self._round, aligned)

    def _read_scales(self, indices: Iterable[int]) -> None:
        """Read r and c of parameters, and note which of them the optimizer has not stepped yet."""
        unscaled: list[int] = []
        for index in indices:
            scales = self._current_scales(index)
            if scales:
                self._projections.precondition(index, scales)
            else:
                unscaled.append(index)
        self._unscaled = unscaled

    def _current_scales(self, index: int) -> tuple[Tensor, ...]:
        """Return r and c of the optimizer's current P, P itself where a gradient is not projected, or nothing."""
        if self._scales is None:
            return ()
        if not self._projections.each[index].exact:
            return self._step.separable_scales(index) or ()
        diagonal = self._step.diagonal(index)
        return () if diagonal is None else (distributed.full_tensor(diagonal).flatten(),)

    def _residuals(self, vector: Gradients) -> Iterator[Tensor | None]:
        """Yield ``P^T v / (r c^T)`` of every parameter, one at a time, since they are large.

        r and c are those of the same time as P, and the traces have those of each step.
        """
        for index, gradient in enumerate(self._selection.gradients(vector)):
            if gradient is None:
                yield None
                continue
            one, scales = self._projections.each[index], self._current_scales(index)
            if one.exact and scales:
                yield one.as_matrix(distributed.full_tensor(gradient))
                continue
            found = distributed.full_tensor(self._step.precondition_adjoint(index, gradient))
            yield unscaled(one.as_matrix(found), scales)

    def _differentiate_clipping(self, combined: Combined, gradients: Gradients) -> None:
        """``g_j <- g_j - a_j G`` where the step is clipped; inner products are those of the projections."""
        on_device = combined.clip_on_device is not None and combined.norm_on_device is not None
        if not (on_device or combined.clipped):
            return
        row = self._combined_row(gradients)
        if self._scales is None:
            products, square = self._gathered @ row, row @ row
        else:
            norms = self._norms(gradients, row)
            products, square = products_by_parameter(self._gathered, row, self._projections.owners, norms)
        if on_device:
            self._gathered.addr_(coefficients_on_device(combined, products, square), row, alpha=-1)
            return
        coefficients = clipping_coefficients(combined, products.double().cpu().numpy(), float(square))
        if coefficients is not None:
            self._gathered.addr_(self._gathered.new_tensor(coefficients), row, alpha=-1)

    def _combined_row(self, gradients: Gradients) -> Tensor:
        """Return the projection of the combined gradient, without what the traces leave out."""
        if self._row_weights is not None and self._parameters.sharded:
            # The sum over the domains, instead of gathering every gradient.
            weights = torch.from_numpy(self._row_weights).to(self._gathered)
            return distributed.all_reduce_mean(weights @ self._gathered)
        row = self._projections.project(gradients)
        for index in self._left_out():
            row[self._projections.slices[index]] = 0.0
        return row

    def _left_out(self) -> list[int]:
        """Return the parameters that hooks cannot separate, where those are ignored."""
        if self._row_weights is None or self._unsupported != "ignore":
            return []
        return [index for index, name in enumerate(self._parameters.names) if name in self.unsupported]

    def _norms(self, gradients: Gradients, row: Tensor) -> Tensor:
        """Return the norm of every parameter's gradient, 0 for those that the traces leave out."""
        left_out, zero = self._left_out(), row.new_zeros(())
        found = (
            zero
            if one is None or index in left_out
            else distributed.full_tensor(torch.linalg.vector_norm(one)).to(row)
            for index, one in enumerate(gradients)
        )
        return torch.stack(list(found))

    @override
    def dot(self, vector: Gradients) -> Vector:
        """``<B^T (P^T vector) A, z_j>``, the mean over the processes."""
        self._read_comparison()
        row = self._projections.project_vectors(self._residuals(vector))
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
        if self._scales is not None:
            values["scales"] = self._scales.state()
        return values, {"stored": self._stored, **self._projections.state(self._parameters.names)}

    @override
    def load_state(self, values: Json, tensors: Mapping[str, Tensor]) -> None:
        self.reset(int(cast("int", values["round"])))
        if self._scales is not None:
            self._scales.load_state(cast("Json", values["scales"]))
        self._projections.load_state(self._parameters.names, tensors)
        self._projections.resample(self._round)
        self._empty = bool(values["empty"])
        self._hooks, self._findings = None, HookFindings.from_json(values["hooks"])
        self._stored.copy_(tensors["stored"])

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
