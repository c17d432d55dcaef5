"""What hooks find out about a model: the parameters whose gradients they do not separate, and why."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self, final

from torch import Tensor

from mixwell.hypergradient.capture.projections import Projections
from mixwell.hypergradient.capture.row_groups import FIRST_DIMENSION
from mixwell.hypergradient.parameters import Parameters
from mixwell.typing import Json

Unsupported = Literal["ignore", "per_domain"]

# The largest difference between the hooks' sum and the gradient itself, before a parameter counts as unsupported.
# Half precision stays well below it.
TOLERANCE = 0.05
# The same in single and double precision, TF32 among them.
FINE_TOLERANCE = 0.005
FINE = 1e-6
# Gradients below this times the largest of any parameter are zero but for rounding.
ROUNDING = 1e-6
ROWS_ELSEWHERE = "is used where the first dimension is not the batch"
USED_ELSEWHERE = "is also used outside its own layer's forward pass"
NOT_SEEN = (
    "is used in a way that hooks do not see, such as in compiled code, in reentrant activation checkpointing or "
    "in a module of another library"
)
IN_PLACE = (
    "is part of a tensor that an operation changes in place; use the operation that returns a new tensor"
)


@final
@dataclass(frozen=True)
class HookFindings:
    """What hooks have found out about a model, which a resumed run must know: it looks only at the first batch.

    Args:
        verified: the batches that are left for each layer and operation to be verified; see ``Verification.left``.
        unsupported: the reason for each unsupported parameter, by name.
        unfused: the names of layers with other gradients when they are fused.
        without_rows: the parameters that have met values whose first dimension is not the batch.
    """

    verified: Mapping[str, int] = field(default_factory=dict[str, int])
    unsupported: Mapping[str, str] = field(default_factory=dict[str, str])
    unfused: Sequence[str] = ()
    without_rows: Sequence[str] = ()

    def to_json(self) -> Json:
        """Return the findings as plain values."""
        return {
            "verified": dict(self.verified),
            "unsupported": dict(self.unsupported),
            "unfused": list(self.unfused),
            "without_rows": list(self.without_rows),
        }

    @classmethod
    def from_json(cls, values: Any) -> Self:
        """Return the findings of :meth:`to_json`."""
        unfused, without_rows = tuple(values["unfused"]), tuple(values["without_rows"])
        return cls(dict(values["verified"]), dict(values["unsupported"]), unfused, without_rows)


def reason_in_layer(reason: str, name: str) -> str:
    """Return a reason for the parameters of a layer; if its rows were not found, with its name and what to do."""
    if reason not in (FIRST_DIMENSION, ROWS_ELSEWHERE):
        return reason
    return f"{reason} in layer {name}; use batch_first=True, or one batch per domain (mixer.domain)"


def mixed_rows_message(layers: Sequence[str]) -> str:
    """Return the error for layers in which a row's loss has a gradient in other rows, the first layer last."""
    return (
        f"the rows of a batch are not independent in layer {layers[-1]} ({len(layers)} such layers): either "
        "its first dimension is not the batch (batch_first=False), or something mixes rows (BatchNorm, a "
        "loss over pairs). Give one batch per domain (mixer.domain). ProjectedTraces(check=False) omits "
        "this check; gradients in such a layer then count for the wrong domains"
    )


def unseen_gradients(
    seen: Tensor, gradient: Tensor, projections: Projections, *, known: Container[int], epsilon: float
) -> dict[int, str]:
    """Return the parameters whose gradient is not the sum of what hooks saw of it, with a reason.

    Args:
        seen: by the hooks, projected, by domain, shape ``(m, size)``.
        gradient: the sum over all domains, projected, shape ``(size,)``.
        known: parameters that are not looked at.
        epsilon: the machine epsilon of the lowest precision of the backward pass.
    """
    found: dict[int, str] = {}
    tolerance = TOLERANCE if epsilon > FINE else FINE_TOLERANCE
    largest = max(float(gradient[columns].norm()) for columns in projections.slices)
    for index, columns in enumerate(projections.slices):
        if index in known:
            continue
        parts, whole = seen[:, columns], gradient[columns]
        apart, size = float((parts.sum(dim=0) - whole).norm()), float(parts.norm(dim=1).sum())
        # A gradient that is zero but for rounding, such as that of the bias of keys, depends on the order of sums.
        rounding = max(ROUNDING, epsilon) if size else ROUNDING
        # Relative to the parts as well: gradients of domains may cancel in the sum.
        if apart > max(tolerance * (size + float(whole.norm())), rounding * largest):
            found[index] = USED_ELSEWHERE if size else NOT_SEEN
    return found


def unsupported_warning(
    parameters: Parameters, reasons: Mapping[int, str], fresh: Sequence[int], mode: Unsupported
) -> str:
    """Return the warning of unsupported parameters: their share, names and reasons, and what to do.

    Raises:
        ValueError: there are no others.
    """
    names = [f"{parameters.names[i]} ({reasons[i]})" for i in fresh[:8]]
    if len(reasons) == len(parameters):
        raise ValueError(
            "no layer of the model is supported, so a mixed batch cannot be separated by domain: "
            f"{names[0]}. Give one batch per domain (mixer.domain)"
        )
    share = sum(parameters.tensors[i].numel() for i in fresh) / parameters.numel
    listed = ", ".join([*names, "..."] if len(fresh) > 8 else names)
    if mode == "per_domain":
        return f"{share:.2%} of the parameters are handled by one more pass per domain: {listed}"
    return (
        f"{share:.2%} of the parameters are left out of the traces: {listed}. "
        "ProjectedTraces(unsupported='per_domain') includes them, by one more backward pass per domain"
    )
