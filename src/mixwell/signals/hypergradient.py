"""The paper's signal (mixwell, truncated): how the validation loss depends on the weights of a round."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import cast, final

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

    Args:
        curvature: H; a number is the gamma of :class:`mixwell.IsotropicCurvature`, the default is the paper's
            0.01.
        traces: the storage of the traces; by default :class:`mixwell.DenseTraces`, or
            :class:`mixwell.ForwardModeTraces` where the curvature needs them.
        points: the number of iterates in S; fewer in a round that has no more steps.
        span: the part of the round, at its end, over which they are spaced evenly, in (0, 1].
        window: the number of a round's last steps that leave a trace, as if those before did not depend on the
            weights (Shaban et al. 2019); ``None`` for all.
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
        self.points, self.span = int(points), float(span)
        self.window = window
        self.requirements = Requirements(domain_batches=not self.traces.supports_mixed_batches, graph=exact)
        self._clip = 1.0
        self._traced = True

    def __repr__(self) -> str:
        window = "" if self.window is None else f", window={self.window}"
        points = f", points={self.points}, span={self.span}" if self.points > 1 else ", points=1"
        return f"Hypergradient({self.curvature!r}, {self.traces!r}{points}{window})"

    @property
    @override
    def uses_hessian_products(self) -> bool:
        return self.curvature.exact_products and self._traced

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
        self.curvature.bind(self._parameters)
        self.traces.allocate(self._parameters, len(self._domains), self._step_model(remaining=1))

    @override
    def begin_round(self, round_index: int, weights: Vector, validation: Gradients | None) -> None:
        self.traces.reset(round_index, validation)

    @override
    def begin_step(self, *, remaining: int) -> None:
        self._traced = self.window is None or remaining <= self.window
        if self._traced:
            self.traces.begin_step(self._step_model(remaining=remaining))

    @override
    def fold(
        self, domain: int, gradients: Gradients, *, scale: float, weight: float, rows: int | None = None
    ) -> None:
        """Add a domain's gradient to its trace and, for an exact curvature, its Hessian's part to all."""
        if not self._traced:
            return
        if self.curvature.exact_products:
            assert isinstance(self.traces, ForwardModeTraces)
            for other, trace in enumerate(self.traces.z):
                products = self._hessian_products(self._domains[domain], gradients, trace)
                self.traces.add_product(other, products, weight * scale)
        self.traces.add(domain, [None if g is None else g.detach() for g in gradients], scale)

    @override
    def capture(self, groups: RowGroups, weights: Vector) -> AbstractContextManager[CaptureContext]:
        return self.traces.capture(groups, weights) if self._traced else nullcontext(CaptureContext())

    @override
    def non_finite(self) -> list[int] | None:
        return self.traces.non_finite() if self._traced else None

    @property
    @override
    def can_drop_step(self) -> bool:
        return not self._traced or self.traces.can_drop_step

    @override
    def end_step(self, combined: Combined) -> None:
        if self._traced:
            self.traces.end_step(combined)
        self._clip = combined.clip

    @override
    def scores(self, validation: Gradients | None) -> Vector:
        """Return ``h_j = -<grad L_V, z_j>`` with the current traces, shape ``(m,)``."""
        assert validation is not None
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
        return {"traces": values, "clip": self._clip}, {f"traces.{name}": t for name, t in tensors.items()}

    @override
    def load_state(self, values: Json, tensors: Mapping[str, Tensor]) -> None:
        traces = {name.removeprefix("traces."): tensor for name, tensor in tensors.items()}
        self.traces.load_state(cast("Json", values["traces"]), traces)
        self._clip = cast("float", values["clip"])

    def _step_model(self, *, remaining: int) -> StepModel:
        self._optimizer.invalidate()
        responses = [self._optimizer.response(i, remaining=remaining) for i in range(len(self._parameters))]
        return StepModel(self._optimizer, responses, self.curvature.coefficients(), self._clip, remaining)

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
