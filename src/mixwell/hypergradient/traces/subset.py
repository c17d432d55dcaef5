"""Traces of some of the parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from fnmatch import fnmatchcase
from typing import final

from torch import Tensor

from mixwell.hypergradient.capture.hooks import CaptureContext
from mixwell.hypergradient.capture.row_groups import RowGroups
from mixwell.hypergradient.parameters import Parameters
from mixwell.hypergradient.traces.base import Combined, StepModel, Traces
from mixwell.hypergradient.traces.dense import DenseTraces
from mixwell.hypergradient.traces.forward_mode import ForwardModeTraces
from mixwell.typing import Gradients, Json, Vector


@final
class SubsetTraces(Traces):
    """Traces of a chosen subset of the parameters; the others count as if they did not depend on the weights.

    Args:
        select: names or shell patterns (``"*.bias"``, ``"layers.11.*"``), or a function of the name.
        inner: how to store them.

    Raises:
        ValueError: the inner traces differentiate the whole step, and so need all parameters.

    Example:
        >>> SubsetTraces(["head.*", "*.bias"])
        SubsetTraces(['head.*', '*.bias'], DenseTraces())
    """

    def __init__(self, select: Sequence[str] | Callable[[str], bool], inner: Traces | None = None) -> None:
        self.select = select
        self.inner = inner or DenseTraces()
        if isinstance(self.inner, ForwardModeTraces):
            raise ValueError(
                "CarriedTraces differentiate the whole step and need all parameters, not a subset"
            )
        self.supports_mixed_batches = self.inner.supports_mixed_batches

    def __repr__(self) -> str:
        shown = getattr(self.select, "__name__", "function") if callable(self.select) else list(self.select)
        return f"SubsetTraces({shown}, {self.inner!r})"

    def allocate(self, parameters: Parameters, domains: int, step: StepModel) -> None:
        """Choose the parameters and take memory for those.

        Args:
            parameters: what is trained.
            domains: the number m.
            step: what a step does.

        Raises:
            ValueError: nothing is selected, or a pattern fits no parameter.
        """
        select = self.select
        if callable(select):
            self._indices = [i for i, name in enumerate(parameters.names) if select(name)]
        else:
            unused = [p for p in select if not any(fnmatchcase(n, p) for n in parameters.names)]
            if unused:
                raise ValueError(f"no parameter is named like {unused}; names: {list(parameters.names)}")
            self._indices = [
                i for i, name in enumerate(parameters.names) if any(fnmatchcase(name, p) for p in select)
            ]
        if not self._indices:
            raise ValueError(f"no parameter is selected; names: {list(parameters.names)}")
        self.inner.allocate(parameters.subset(self._indices), domains, step.subset(self._indices))

    def reset(self, round_index: int, validation: Gradients | None = None) -> None:
        """Set all traces to zero.

        Args:
            round_index: the number of the round that begins.
            validation: the validation gradient that ended the round before, where there was one.
        """
        self.inner.reset(round_index, None if validation is None else self._selected(validation))

    def begin_step(self, step: StepModel) -> None:
        """Fade the traces.

        Args:
            step: what the step does.
        """
        self.inner.begin_step(step.subset(self._indices))

    def add(self, domain: int, gradients: Gradients, scale: float) -> None:
        """Fold the selected part of a gradient in.

        Args:
            domain: which.
            gradients: its gradient.
            scale: its factor.
        """
        self.inner.add(domain, self._selected(gradients), scale)

    def rows(self, segments: RowGroups, weights: Vector) -> AbstractContextManager[CaptureContext]:
        """Let the inner traces watch a mixed batch.

        Args:
            segments: which rows belong to which domain.
            weights: by which the losses of the rows are weighted.

        Returns:
            A context, which gives what is to be told the weighted losses.
        """
        return self.inner.rows(segments, weights)

    def end_step(self, combined: Combined) -> None:
        """Pass the selected part on.

        Args:
            combined: what the optimizer is about to be given.
        """
        selected = self._selected(combined.gradients)
        self.inner.end_step(Combined(selected, combined.clip, combined.norm))

    def dot(self, vector: Gradients) -> Vector:
        """The inner products over the selected parameters.

        Args:
            vector: one tensor per parameter.

        Returns:
            Shape ``(m,)``.
        """
        return self.inner.dot(self._selected(vector))

    @property
    def nbytes(self) -> int:
        """The memory of the inner traces."""
        return self.inner.nbytes

    def state(self) -> tuple[Json, dict[str, Tensor]]:
        """The state of the inner traces."""
        return self.inner.state()

    def load_state(self, values: Json, tensors: Mapping[str, Tensor]) -> None:
        """Take up the state of the inner traces.

        Args:
            values: plain values.
            tensors: tensors.
        """
        self.inner.load_state(values, tensors)

    def _selected(self, tensors: Gradients) -> Gradients:
        return [tensors[i] for i in self._indices]
