"""The paper's signal (mixwell, truncated): how the validation loss depends on the weights of a round."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Literal, cast, final

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from mixwell import distributed
from mixwell.hypergradient import curvature as curvatures
from mixwell.hypergradient.capture.hooks import CaptureContext
from mixwell.hypergradient.capture.row_groups import RowGroups
from mixwell.hypergradient.curvature import Curvature
from mixwell.hypergradient.responses import response_for
from mixwell.hypergradient.traces import (
    Combined,
    DenseTraces,
    ForwardModeTraces,
    StepModel,
    Traces,
)
from mixwell.signals.base import LinearSignal, Requirements
from mixwell.signals.probes import Probes, parameter_gradients
from mixwell.simplex import rounds
from mixwell.simplex.rounds import ObservedSteps
from mixwell.typing import Gradients, Json, Vector


@final
class Hypergradient(LinearSignal):
    """The approximate hypergradient of Eq. 26, from one trace per domain (Eq. 7 and 24).

    For plain SGD, with ``u_j`` the paper's trace and ``z_j = eta u_j``:

        ``u_j <- (I - eta H) u_j + grad l_j(theta)``,   ``h_j = -eta <grad L_V(theta_T), u_j>``

    and for any optimizer ``z_j = -d theta / d w_j`` with ``h_j = -<grad L_V, z_j>``
    (:mod:`mixwell.hypergradient.responses`).

    The paper's objective is the validation loss at the round's last iterate. One noisy iterate says little: the
    validation gradient there depends mostly on where it happens to be along directions of high curvature. So by
    default the objective is the mean of the validation loss over several iterates ``t`` in S of the later part of
    the round, ``F_k = mean_{t in S} L_V(theta_{k,t})``, and the scores are its hypergradient

        ``h_j = -mean_{t in S} <grad L_V(theta_{k,t}), z_{j,t}>``

    with the traces after step t. They take no more memory. ``points=1`` is the paper's S = {T}. With momentum or
    Adam, all traces but those in forward mode count a gradient by its effect until the end of the round, so scores
    at earlier points are too large by the part in which momentum has still to act, in nearly the same proportion
    for all domains: the direction is right, the length of the mean is not.

    A trace is a sum over the steps of a round. In a long round a random one of every s steps says about as much as
    all of them: it is traced with weight s, which leaves the expectation as it is, and the others are plain
    training (``mixer.trace_due``).

    Args:
        curvature: H; a number is the gamma of :class:`mixwell.IsotropicCurvature`, the default is the paper's
            0.01.
        traces: the storage of the traces; by default :class:`mixwell.DenseTraces`, or
            :class:`mixwell.ForwardModeTraces` where the curvature needs them.
        points: the number of iterates in S; fewer in a round that has no more steps.
        span: the part of the round, at its end, over which they are spaced evenly, in (0, 1].
        window: the number of a round's last steps that leave a trace, as if those before did not depend on the
            weights (Shaban et al. 2019); ``None`` for all.
        trace_every: s; ``"auto"`` traces all steps of short rounds and about 64 of long ones
            (:func:`mixwell.simplex.rounds.trace_interval`). Traces in forward mode follow every step.
    """

    uses_traces = True

    def __init__(
        self,
        curvature: Curvature | float | None = None,
        traces: Traces | None = None,
        *,
        points: int = rounds.POINTS,
        span: float = rounds.SPAN,
        window: int | None = None,
        trace_every: int | Literal["auto"] = "auto",
    ) -> None:
        self.curvature = curvatures.resolve(curvature)
        exact = self.curvature.exact_products
        self.traces = traces or (ForwardModeTraces() if exact else DenseTraces())
        if exact and not isinstance(self.traces, ForwardModeTraces):
            raise ValueError(f"ExactCurvature needs ForwardModeTraces, got {self.traces!r}; leave traces out")
        if window is not None and window < 1:
            raise ValueError(f"window must be at least 1 step, got {window}; leave it out for all steps")
        if points < 1 or int(points) != points:
            raise ValueError(f"points must be a whole number of at least 1, got {points}")
        if not 0 < span <= 1:
            raise ValueError(f"span must be a part of the round, in (0, 1], got {span}")
        if trace_every != "auto" and (trace_every < 1 or int(trace_every) != trace_every):
            raise ValueError(
                f"trace_every must be a whole number of at least 1, or 'auto', got {trace_every}"
            )
        if not self.traces.supports_skipping:
            if trace_every not in ("auto", 1):
                raise ValueError(
                    f"{self.traces!r} follow every step, so trace_every must be 1, got {trace_every}"
                )
            trace_every = 1
        self.points, self.span = int(points), float(span)
        self.window = window
        self.trace_every: int | Literal["auto"] = trace_every
        self.requirements = Requirements(domain_batches=not self.traces.supports_mixed_batches, graph=exact)
        self._clip, self._clip_on_device = 1.0, cast("Tensor | None", None)
        self._skipped: int | None = None  # steps since the traces last decayed; None before the first trace
        self._remaining = self._begun_with = 1  # steps until the end of the round, when they last decayed

    def __repr__(self) -> str:
        window = "" if self.window is None else f", window={self.window}"
        points = f", points={self.points}, span={self.span}" if self.points > 1 else ", points=1"
        skips = self.traces.supports_skipping and self.trace_every != "auto"
        every = f", trace_every={self.trace_every}" if skips else ""
        return f"Hypergradient({self.curvature!r}, {self.traces!r}{points}{window}{every})"

    @property
    @override
    def uses_hessian_products(self) -> bool:
        return self.curvature.exact_products

    @override
    def observed_steps(self, round_index: int, length: int) -> ObservedSteps:
        """Return a random one of every s steps of the round, or of the window."""
        return rounds.traced_steps(round_index, length, every=self.trace_every, window=self.window)

    @override
    def validation_points(self, length: int) -> tuple[int, ...]:
        """Return points spaced evenly over the last ``span`` of the round (or the window, if that is less)."""
        # Before the window the traces are zero, and so would the scores be.
        return rounds.validation_points(length, points=self.points, span=self.span, window=self.window)

    @override
    def _attach(self, optimizer: Optimizer, probes: Probes | None) -> None:
        if self.curvature.exact_products:
            # A product with the Hessian of all rows needs the trace of all rows.
            distributed.require_single_process(self.curvature)
        self._optimizer = response_for(optimizer, self._parameters)
        self.clips_on_device = self.traces.clips_on_device
        self.curvature.bind(self._parameters)
        self.traces.allocate(self._parameters, len(self._domains), self._step_model(remaining=1))

    @override
    def begin_round(self, round_index: int, weights: Vector, validation: Gradients | None) -> None:
        self._optimizer.read_counts()
        self.traces.reset(round_index, validation)
        self._skipped = None

    @override
    def begin_step(self, *, remaining: int, interval: int) -> None:
        self._decay_over_skipped_steps()
        self._begun_with = remaining
        self.traces.begin_step(self._step_model(remaining=remaining, interval=interval))

    @override
    def skip_step(self) -> None:
        self._optimizer.count_step()
        if self._skipped is not None:
            self._skipped += 1

    def _read_clip(self) -> None:
        """Read the factor of the last clipping, where that was on an accelerator; until then an earlier one."""
        if self._clip_on_device is not None:
            self._clip, self._clip_on_device = float(self._clip_on_device), None

    def _decay_over_skipped_steps(self) -> None:
        if self._skipped:
            # That of the step in the middle stands for all: momentum makes it change from step to step.
            middle = self._remaining - (self._skipped + 1) // 2
            self.traces.skip(self._step_model(remaining=max(1, middle)), self._skipped)
            self._remaining -= self._skipped
            self._skipped = 0

    @override
    def fold(
        self, domain: int, gradients: Gradients, *, scale: float, weight: float, rows: int | None = None
    ) -> None:
        """Add a domain's gradient to its trace and, for an exact curvature, its Hessian's part to all."""
        if self.curvature.exact_products:
            assert isinstance(self.traces, ForwardModeTraces)
            for other, trace in enumerate(self.traces.z):
                products = self._hessian_products(self._domains[domain], gradients, trace)
                self.traces.add_product(other, products, weight * scale)
        self.traces.add(domain, [None if g is None else g.detach() for g in gradients], scale)

    @override
    def capture(self, groups: RowGroups, weights: Vector) -> AbstractContextManager[CaptureContext]:
        return self.traces.capture(groups, weights)

    @override
    def gradient_sum(self) -> Tensor | None:
        return self.traces.gradient_sum()

    @override
    def non_finite(self) -> list[int] | None:
        return self.traces.non_finite()

    @property
    @override
    def can_drop_step(self) -> bool:
        return self.traces.can_drop_step

    @override
    def end_step(self, combined: Combined) -> None:
        self.traces.end_step(combined)
        self._optimizer.count_step()
        self._remaining = self._begun_with
        self._clip_on_device = combined.clip_on_device
        self._clip, self._skipped = combined.clip if combined.clip_on_device is None else self._clip, 0

    @override
    def scores(self, validation: Gradients | None) -> Vector:
        """Return ``h_j = -<grad L_V, z_j>`` with the current traces, shape ``(m,)``."""
        assert validation is not None
        self._read_clip()
        self._decay_over_skipped_steps()
        self._optimizer.invalidate()
        return -self.traces.dot(validation)

    @property
    @override
    def nbytes(self) -> int:
        return self.traces.nbytes

    @override
    def summary(self) -> dict[str, float]:
        """Return the curvature where it is one number."""
        gamma = self.curvature.summary()
        return {} if gamma is None else {"curvature": gamma}

    @override
    def state(self) -> tuple[Json, dict[str, Tensor]]:
        values, tensors = self.traces.state()
        # Not put in place of the earlier factor: whether a state is taken must not matter.
        unread = None if self._clip_on_device is None else float(self._clip_on_device)
        plain: Json = {"traces": values, "clip": self._clip, "unread_clip": unread}
        plain |= {"skipped": self._skipped, "remaining": self._remaining}
        return plain, {f"traces.{name}": t for name, t in tensors.items()}

    @override
    def load_state(self, values: Json, tensors: Mapping[str, Tensor]) -> None:
        traces = {name.removeprefix("traces."): tensor for name, tensor in tensors.items()}
        self.traces.load_state(cast("Json", values["traces"]), traces)
        self._optimizer.forget_counts()
        self._clip, unread = cast("float", values["clip"]), values["unread_clip"]
        self._clip_on_device = None if unread is None else torch.tensor(unread)
        self._skipped = cast("int | None", values["skipped"])
        self._remaining = cast("int", values["remaining"])

    def _step_model(self, *, remaining: int, interval: int = 1) -> StepModel:
        self._optimizer.invalidate()
        responses = [self._optimizer.response(i, remaining=remaining) for i in range(len(self._parameters))]
        coefficients = self.curvature.coefficients()
        return StepModel(self._optimizer, responses, coefficients, self._clip, remaining, interval)

    def _hessian_products(self, name: str, gradients: Gradients, vector: list[Tensor]) -> Gradients:
        """``H_i z`` of a domain's loss, by differentiating ``<g_i, z>``."""
        present = [(g, v) for g, v in zip(gradients, vector, strict=True) if g is not None]
        curved = [(g, v) for g, v in present if g.requires_grad]
        if not curved:
            raise ValueError(
                f"ExactCurvature needs the graph of the gradient of domain {name!r}: "
                "call loss.backward(create_graph=True) inside mixer.domain(...)"
            )
        return parameter_gradients(
            self._parameters,
            [g for g, _ in curved],
            grad_outputs=[v.to(g.dtype) for g, v in curved],
            retain_graph=True,
        )
