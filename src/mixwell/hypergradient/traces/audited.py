"""What a compressed trace gets wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from torch import Tensor

from mixwell.hypergradient.parameters import Parameters
from mixwell.hypergradient.traces.base import Combined, StepModel, Traces
from mixwell.hypergradient.traces.dense import DenseTraces
from mixwell.reference.comparison import relative_error, tangent_cosine
from mixwell.typing import Gradients, Json, Vector


@final
@dataclass(frozen=True)
class TraceError:
    """The inner products of a compressed trace against those of a dense one.

    Args:
        relative: ``|compressed - dense| / |dense|``.
        cosine: of the two in the tangent space of the simplex; the direction in which the weights would move.
        nbytes: memory of the compressed traces.
        dense_nbytes: memory of the dense ones.
    """

    relative: float
    cosine: float
    nbytes: int
    dense_nbytes: int


@final
class AuditedTraces(Traces):
    """Compressed traces with dense ones beside them, to report the error that the compression causes.

    Results are those of the compressed traces; after each round :attr:`error` compares them. Run some rounds
    with it to choose a kind, then drop it to have the memory back.

    Args:
        inner: the traces to judge.
    """

    def __init__(self, inner: Traces) -> None:
        self.inner = inner
        self._dense = DenseTraces()
        self.error: TraceError | None = None

    def __repr__(self) -> str:
        return f"AuditedTraces({self.inner!r})"

    def allocate(self, parameters: Parameters, domains: int, step: StepModel) -> None:
        """Take the memory of both.

        Args:
            parameters: what is trained.
            domains: the number m.
            step: what a step does.
        """
        self.inner.allocate(parameters, domains, step)
        self._dense.allocate(parameters, domains, step)

    def reset(self, round_index: int, validation: Gradients | None = None) -> None:
        """Set both to zero.

        Args:
            round_index: the number of the round that begins.
            validation: the validation gradient that ended the round before, where there was one.
        """
        self.inner.reset(round_index, validation)
        self._dense.reset(round_index)

    def begin_step(self, step: StepModel) -> None:
        """Fade both.

        Args:
            step: what the step does.
        """
        self.inner.begin_step(step)
        self._dense.begin_step(step)

    def add(self, domain: int, gradients: Gradients, scale: float) -> None:
        """Fold a gradient into both.

        Args:
            domain: which.
            gradients: its gradient.
            scale: its factor.
        """
        self.inner.add(domain, gradients, scale)
        self._dense.add(domain, gradients, scale)

    def end_step(self, combined: Combined) -> None:
        """Pass the combined gradient to both.

        Args:
            combined: what the optimizer is about to be given.
        """
        self.inner.end_step(combined)
        self._dense.end_step(combined)

    def dot(self, vector: Gradients) -> Vector:
        """The inner products of the inner traces; the comparison is kept in :attr:`error`.

        Args:
            vector: one tensor per parameter.

        Returns:
            Shape ``(m,)``.
        """
        estimate, reference = self.inner.dot(vector), self._dense.dot(vector)
        self.error = TraceError(
            relative=relative_error(estimate, reference),
            cosine=tangent_cosine(estimate, reference),
            nbytes=self.inner.nbytes,
            dense_nbytes=self._dense.nbytes,
        )
        return estimate

    @property
    def nbytes(self) -> int:
        """The memory of both."""
        return self.inner.nbytes + self._dense.nbytes

    def state(self) -> tuple[Json, dict[str, Tensor]]:
        """The state of both."""
        values, tensors = self.inner.state()
        dense_values, dense_tensors = self._dense.state()
        return {"inner": values, "dense": dense_values}, {
            **{f"inner.{name}": value for name, value in tensors.items()},
            **{f"dense.{name}": value for name, value in dense_tensors.items()},
        }

    def load_state(self, values: Json, tensors: Mapping[str, Tensor]) -> None:
        """Take up the state of both.

        Args:
            values: plain values.
            tensors: tensors.
        """
        for part, traces in (("inner", self.inner), ("dense", self._dense)):
            own = {k.removeprefix(f"{part}."): t for k, t in tensors.items() if k.startswith(f"{part}.")}
            part_values = values[part]
            assert isinstance(part_values, dict)
            traces.load_state(part_values, own)
