"""What the files of a run hold, validated when they are read: they may be damaged, edited, or of others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from mixwell.utils.parsing import shown

Whole = Annotated[int, Field(ge=0, lt=2**63, strict=True)]


def _in_range(value: float) -> float:
    # Beyond it float64 overflows as soon as two such numbers are multiplied, in figures too.
    if abs(value) > 1e150:
        raise ValueError("between -1e150 and 1e150")
    return value


Number = Annotated[float, Field(strict=True), AfterValidator(_in_range)]
Weight = Annotated[float, Field(ge=0, le=1 + 1e-6, strict=True)]
Numbers = dict[str, Number | None]
"""By domain; ``None`` for what is not finite."""


class _Fields(BaseModel):
    """Fields that are read; others are left as they are."""

    model_config = ConfigDict(extra="allow")


class _WeightsFrom(_Fields):
    step: Whole
    weights: dict[str, Weight]


class _Scores(_Fields):
    step: Whole
    scores: dict[str, Number]
    noise: dict[str, Number]
    points: Whole
    step_size: Number


class _Rows(_Fields):
    available: dict[str, Whole]
    trained_on: dict[str, Whole]
    computed: Number = 0.0


class MixtureFields(_Fields):
    """``mixture.json``, in addition to what :func:`mixwell.training.mixture_file.check_mixture` examines."""

    history: list[_WeightsFrom] = Field(min_length=1)
    signal: list[_Scores] = Field(default_factory=list[_Scores])
    method: str
    horizon: Whole | None
    budget: Whole | None
    steps_done: Whole
    finished: Annotated[bool, Field(strict=True)]
    seed: Whole
    rows: _Rows
    memory: Whole = 0
    made_with: dict[str, str]


class _Line(_Fields):
    kind: str
    step: Whole


class _StepLine(_Line):
    loss: Number | None
    losses: Numbers
    counts: dict[str, Whole]
    lr: Number | None
    seconds: Number | None


class _EvaluationLine(_Line):
    losses: Numbers


class _RoundLine(_Line):
    index: Whole
    first_step: Whole
    steps: Whole
    weights: dict[str, Weight | None]
    new_weights: dict[str, Weight | None]
    scores: Numbers
    step_size: Number | None
    losses: Numbers = Field(default_factory=dict)
    skipped: dict[str, Whole] = Field(default_factory=dict[str, int])
    noise: Numbers = Field(default_factory=dict)
    points: Whole = 1
    measured: Numbers = Field(default_factory=dict)


_LINES: Mapping[str, type[_Line]] = {"step": _StepLine, "evaluation": _EvaluationLine, "round": _RoundLine}


class _Replication(_Fields):
    replicates: Whole
    agreement: Number
    worst: Number
    effect: dict[str, Number]
    effect_cosine: Number


class _Fidelity(_Fields):
    step: Whole
    horizon: Whole
    cosine: Number | None
    sign_agreement: Number | None
    rank_agreement: Number | None
    relative_error: Number | None
    estimate: dict[str, Number]
    exact: dict[str, Number]
    verdict: str | list[str]
    replication: _Replication | None = None


AnyFields = TypeVar("AnyFields", bound=BaseModel)
_MEASUREMENTS = TypeAdapter(list[_Fidelity])


def check_fields(plain: object, fields: type[AnyFields], *, where: str) -> None:
    """Raise ``ValueError`` with the first field of plain values that is missing or wrong."""
    try:
        fields.model_validate(plain)
    except ValidationError as error:
        raise ValueError(f"{where}: {_first(error)}; was the file edited?") from error


def check_line(plain: object, *, where: str) -> dict[str, Any]:
    """Return the values of a line of ``metrics.jsonl``; raise ``ValueError`` where they are none."""
    kind = plain.get("kind") if isinstance(plain, dict) else None
    check_fields(plain, _LINES.get(kind, _Line) if isinstance(kind, str) else _Line, where=where)
    assert isinstance(plain, dict)
    return plain


def check_measurements(plain: object, *, where: str) -> list[dict[str, Any]]:
    """Return the measurements of ``fidelity.json``; raise ``ValueError`` where they are none."""
    try:
        _MEASUREMENTS.validate_python(plain)
    except ValidationError as error:
        raise ValueError(f"{where}: {_first(error)}; was the file edited?") from error
    assert isinstance(plain, list)
    return plain


def _first(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "missing":
        return f"it has no {key}"
    expected = first["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    return f"{key + ' ' if key else ''}must be {expected}, got {shown(first['input'])}"
