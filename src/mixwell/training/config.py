"""The config of a run, composed of sections that its components own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Self, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    SerializeAsAny,
    create_model,
    model_validator,
)

from mixwell import methods
from mixwell.data.sources.base import SOURCES, SourceConfig
from mixwell.hypergradient.traces import TRACES, TracesConfig
from mixwell.training.constraints import CONSTRAINTS
from mixwell.training.logging.base import LOGGERS, LoggerConfig
from mixwell.training.models.base import MODELS, ModelConfig
from mixwell.training.models.gpt import GptConfig
from mixwell.training.optimization import OPTIMIZERS, AdamWConfig, OptimizerConfig
from mixwell.training.parallel import ParallelConfig
from mixwell.utils.sections import (
    AnySection,
    ByKey,
    ByKind,
    ByName,
    ConfigSection,
    Count,
    NotNegative,
    Positive,
    Whole,
)


def _known_traces(kind: str) -> str:
    if kind != "auto":
        TRACES.get(kind)
    return kind


class BatchConfig(ConfigSection):
    """The rows of a step."""

    rows: Whole = 32
    """Of all domains together."""
    counts: Literal["weight", "equal"] = "weight"
    """Rows by weight, or equal for all domains (the paper's)."""
    min_rows_per_domain: Count | Literal["auto"] = "auto"
    """Rows that each domain has in every step; `auto` is a quarter of an equal share; 0 if weights are kept."""
    micro_rows: Whole | None = None
    """The greatest number of rows in one forward pass (gradient accumulation); null for no limit."""


class OutputConfig(ConfigSection):
    """Intervals of logging, evaluations and checkpoints."""

    log_every: Whole = 10
    """Steps between two lines of metrics."""
    evaluate_every: Whole | Literal["auto"] = "auto"
    """Steps between two evaluations; `auto` is a twentieth of all."""
    evaluate_rows: Whole = 512
    """The greatest number of rows of the validation set (and of the test set) that an evaluation takes."""
    checkpoint_every: Whole | Literal["auto"] = "auto"
    """Steps between two checkpoints; `auto` is about every two minutes."""
    keep: Whole = 2
    """Checkpoints that are kept."""


class MixerConfig(ConfigSection):
    """How the weights of the domains are found. Registered constraints and kinds of traces add their keys."""

    method: str = "mixwell"
    """`mixwell` learns them, `fixed` trains with those that are given; `mixwell methods` lists all."""
    options: dict[str, Any] = Field(default_factory=dict)
    """The method's own settings; `mixwell methods NAME` lists them."""
    weights: Literal["uniform", "proportional"] | dict[str, Positive] = "uniform"
    """Initial weights: all the same, by size, or numbers by domain."""
    horizon: Whole | Literal["auto", "long"] = "auto"
    """T, training steps per weight update; `long` is sqrt(N log N), `auto` what the method's authors use (for
    `mixwell` half of that)."""
    step_size: Positive | Literal["auto"] = "auto"
    """alpha of mirror descent; `auto` is tuned from the hypergradients seen."""
    curvature: NotNegative = 0.01
    """gamma of H = gamma I."""
    traces: Annotated[str, AfterValidator(_known_traces)] = "auto"
    """Where the hypergradient is accumulated: `projected` (from one mixed batch), `dense` (m copies of the
    parameters), `bfloat16` (half of that), or `sketched`. `auto` is `projected` for language models, else
    `dense`."""
    trace_every: Whole | Literal["auto"] = "auto"
    """s: one of every s steps of a round leaves a trace, with weight s; the others are plain training. `auto` is
    a 64th of the round, and 1 (every step) for less than 96 steps."""
    warmup: Count = 0
    """Steps before the first round."""
    validation_rows: Whole | Literal["auto"] = "auto"
    """Rows of each validation gradient; `auto` is a twentieth of the rows of a round's traced steps (5% of
    training, and 1% for rounds of 300 steps), divided by the gradients of a round (`options.points` of `mixwell`),
    at most the whole set."""
    on_nonfinite: Literal["raise", "skip"] = "raise"
    """A gradient that is not finite stops the run, or its domain is left out of that step and counted."""

    def part(self, owner: type[AnySection]) -> AnySection:
        """Return the keys of a constraint or a kind of traces as the section that declares them."""
        return owner.model_validate({key: getattr(self, key) for key in owner.model_fields})


def keys_by_domain() -> list[str]:
    """Return the keys of the mixer that may have a value for each domain: of the weights, and of constraints."""
    return ["weights", *(key for name in CONSTRAINTS.names() for key in CONSTRAINTS.get(name).model_fields)]


def mixer_section() -> type[MixerConfig]:
    """Return the section ``mixer`` with the keys of all constraints and kinds of traces registered now."""
    constraints = [CONSTRAINTS.get(name) for name in CONSTRAINTS.names()]
    return _composed((*(TRACES.get(kind) for kind in TRACES.names()), *constraints))


@cache
def _composed(owners: tuple[type[ConfigSection], ...]) -> type[MixerConfig]:
    fields: Any = {
        key: (field.annotation, field) for owner in owners for key, field in owner.model_fields.items()
    }
    return create_model("MixerConfig", __base__=MixerConfig, __doc__=MixerConfig.__doc__, **fields)


def _mixer(given: Any) -> Any:
    return mixer_section().model_validate(given) if isinstance(given, Mapping) else given


SOURCE = ByKey(SOURCES, short="files")
MODEL = ByKind(MODELS, default="gpt")
OPTIMIZER = ByKind(OPTIMIZERS, default="adamw")
Data = Annotated[SerializeAsAny[SourceConfig], SOURCE]


class Config(ConfigSection):
    """The config of a run."""

    domains: dict[str, Data] = Field(min_length=1)
    """By name, where the training rows come from."""
    validation: Data | None = None
    """The data that the model should do well on; most methods learn the weights for it."""
    test: Data | None = None
    """Rows of the same kind that nothing is learned from, for an honest number at the end."""
    steps: Whole = 2000
    """N, training steps."""
    seed: Annotated[int, Field(ge=0, lt=2**63, strict=True)] = 0
    """Random seed of the model, the order of the rows, and everything else."""
    model: Annotated[SerializeAsAny[ModelConfig], MODEL] = GptConfig()
    tokenizer: str = "bytes"
    """`bytes`, or a file of the `tokenizers` library (`mixwell tokenizer` makes one)."""
    optimizer: Annotated[SerializeAsAny[OptimizerConfig], OPTIMIZER] = AdamWConfig()
    batch: BatchConfig = BatchConfig()
    mixer: Annotated[SerializeAsAny[MixerConfig], BeforeValidator(_mixer)] = Field(
        default_factory=lambda: mixer_section()()
    )
    compare: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Settings of the mixer in `mixwell compare`, by method or by variant (which names its `method`)."""
    output: OutputConfig = OutputConfig()
    loggers: Annotated[dict[str, LoggerConfig], ByName(LOGGERS)] = Field(default_factory=dict)
    """Loggers in addition to `metrics.jsonl`: `true`, or settings."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """bfloat16 is autocast; parameters stay in float32."""
    compile: bool = False
    """torch.compile the model; steps that leave a trace run eagerly."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda`, `cuda:1`, `mps`. With several processes each takes the GPU of its local rank."""
    parallel: ParallelConfig = ParallelConfig()
    base: Path = Path()
    """The folder to which relative paths refer; by default that of the file."""

    @property
    def trace_kind(self) -> str:
        """The kind of traces that was chosen, or that `auto` resolves to."""
        if self.mixer.traces != "auto":
            return self.mixer.traces
        return "projected" if self.model.is_language_model else "dense"

    @property
    def traces(self) -> TracesConfig:
        """The kind of traces with its settings."""
        return self.mixer.part(TRACES.get(self.trace_kind))

    @model_validator(mode="before")
    @classmethod
    def _drop_empty(cls, given: Any) -> Any:
        """Drop sections in which everything is commented out."""
        if not isinstance(given, dict):
            return given
        return {key: value for key, value in cast("dict[str, Any]", given).items() if value is not None}

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if "validation" in self.domains:
            raise ValueError("domains: the name 'validation' is taken; give that domain another one")
        for key in keys_by_domain():
            named = getattr(self.mixer, key)
            unknown = sorted(set(named) - set(self.domains)) if isinstance(named, dict) else []
            if unknown:
                raise ValueError(
                    f"mixer.{key} names unknown domains {', '.join(unknown)}; there are {', '.join(self.domains)}"
                )
        given = self.mixer.weights
        missing = [name for name in self.domains if isinstance(given, dict) and name not in given]
        if missing:
            raise ValueError(f"mixer.weights must name every domain; {', '.join(missing)} is missing")
        self._check_method()
        if isinstance(self.mixer.horizon, int) and self.mixer.horizon > self.steps:
            raise ValueError(
                f"mixer.horizon is {self.mixer.horizon}, more than the {self.steps} steps of the run; lower it"
            )
        for name in CONSTRAINTS.names():
            self.mixer.part(CONSTRAINTS.get(name))  # validates keys of one constraint against each other
        least = self.batch.min_rows_per_domain
        if isinstance(least, int) and least * len(self.domains) > self.batch.rows:
            raise ValueError(
                f"batch.rows is {self.batch.rows}, too few for batch.min_rows_per_domain = {least} of each of "
                f"{len(self.domains)} domains"
            )
        return self

    def _check_method(self) -> None:
        """Refuse a method that lacks something that it needs, before anything is trained."""
        method = methods.find(self.mixer.method)
        options = method.parse_options(self.mixer.options)
        needs, name = method.needs, f"mixer.method: {method.name}"
        if needs.validation and options.uses_validation and self.validation is None:
            able = [one.name for one in methods.every().values() if not one.needs.validation]
            raise ValueError(
                f"{name} needs a validation set, and there is none: give `validation`, or a method that needs "
                f"none ({', '.join(able)})"
            )
        unread = constraints_without_effect(self.mixer)
        if unread:
            raise ValueError(
                f"{', '.join(unread)}: {method.name} does not learn weights in rounds, so that nothing "
                "would apply such a constraint; leave it out"
            )
        if len(self.domains) < needs.domains:
            raise ValueError(
                f"{name} needs {needs.domains} domains or more, and there is {len(self.domains)}; with one, "
                "`mixer: {method: fixed}` trains the model"
            )
        if needs.row_losses and self.batch.micro_rows and self.batch.micro_rows < self.batch.rows:
            raise ValueError(
                f"{name} weighs the rows of a step against each other, so they must be computed at once; leave "
                f"out batch.micro_rows, got {self.batch.micro_rows} of {self.batch.rows}"
            )
        if needs.second_order and self.compile:
            raise ValueError(
                f"{name} differentiates twice, which a compiled model cannot; set compile: false"
            )


def constraints_without_effect(mixer: MixerConfig) -> list[str]:
    """Return the keys of constraints that are set, and that the method does not apply."""
    if methods.find(mixer.method).has_rounds:
        return []
    owners = [CONSTRAINTS.get(name) for name in CONSTRAINTS.names()]
    fields = {
        key: one for owner in owners if not owner.limits_rows for key, one in owner.model_fields.items()
    }
    return [f"mixer.{key}" for key, one in fields.items() if getattr(mixer, key) != one.default]


def drop_constraints(mixer: dict[str, Any]) -> None:
    """Reset the constraints in plain settings whose method, which was chosen for the user, does not apply them."""
    if methods.find(mixer["method"]).has_rounds:
        return
    for owner in (CONSTRAINTS.get(name) for name in CONSTRAINTS.names()):
        if not owner.limits_rows:
            mixer |= {key: field.default for key, field in owner.model_fields.items()}


def section_at(path: Sequence[str], plain: Mapping[str, Any]) -> type[BaseModel] | None:
    """Return the section that validates the value at a path of keys; ``None`` where the value does not say which.

    Args:
        path: keys from the top of the config.
        plain: the config as a file has it.
    """
    value: Any = plain
    for key in path:
        value = cast("Mapping[str, Any]", value).get(key) if isinstance(value, Mapping) else None
    try:
        match list(path):
            case []:
                return Config
            case ["mixer"]:
                return mixer_section()
            case ["loggers", name]:
                return LOGGERS.get(name)
            case ["model"]:
                return MODEL.section(value)
            case ["optimizer"]:
                return OPTIMIZER.section(value)
            case ["domains", _] | ["validation"] | ["test"]:
                return SOURCE.section(SOURCE.complete(value))
            case [key]:
                kind = Config.model_fields[key].annotation
                return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None
            case _:
                return None
    except (ValueError, KeyError, AttributeError):
        return None
