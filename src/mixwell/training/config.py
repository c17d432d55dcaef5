"""The settings of a run, as one YAML or TOML file has them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self, cast

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from mixwell import methods
from mixwell.methods.base import NotNegative, Positive, Share, Whole

BelowOne = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """A part of the settings: unknown keys are refused, and nothing changes after it was read."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


SOURCES: dict[str, tuple[str, ...]] = {
    "files": ("encoding", "errors"),
    "jsonl": ("field", "encoding", "errors"),
    "parquet": ("field",),
    "dataset": ("field", "name", "split", "revision", "streaming", "limit"),
    "tokens": ("dtype",),
    "tensors": (),
    "python": ("arguments",),
    "given": (),
}
"""The kinds of sources, and which other keys go with each."""


class DataConfig(Section):
    """Where the rows of a domain, or of the validation set, come from: one of the first eight keys."""

    files: str | list[str] | None = None
    """Text files: a file, a folder, a pattern (`data/**/*.txt`), or several. Each file is a document."""
    jsonl: str | list[str] | None = None
    """JSON Lines, also compressed by gzip; the text is in `field`."""
    parquet: str | list[str] | None = None
    """Parquet files; the text is in the column `field`."""
    dataset: str | None = None
    """A dataset of Hugging Face: a folder written by `save_to_disk`, or a name (which may be downloaded)."""
    tokens: str | None = None
    """Token numbers in a `.npy` file, or in a raw `.bin` file with `dtype`; read in place, never copied."""
    tensors: str | None = None
    """A safetensors file with `inputs` and `targets`."""
    python: str | None = None
    """`module:function`; it is called with `arguments` and gives a PyTorch dataset or tensors."""
    given: str | None = None
    """Data that were handed over by Python code (`mixwell.train`), and what they were."""

    field: str = "text"
    """The field or column that holds the text."""
    encoding: str = "utf-8"
    """Of text files and JSON Lines."""
    errors: Literal["strict", "replace", "ignore"] = "strict"
    """What to do with bytes that are not in the encoding."""
    name: str | None = None
    """Which configuration of a dataset."""
    split: str = "train"
    """Which split of a dataset."""
    revision: str | None = None
    """Which version of a dataset."""
    streaming: bool = False
    """Read a dataset as it comes, without storing it first."""
    limit: Whole | None = None
    """Take only so many documents of a dataset."""
    dtype: Literal["uint16", "uint32", "int32", "int64"] | None = None
    """Of a raw file of tokens."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Of the Python function."""

    @model_validator(mode="before")
    @classmethod
    def _text_is_files(cls, given: Any) -> Any:
        return {"files": given} if isinstance(given, str | list) else given

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        given = [key for key in SOURCES if getattr(self, key) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of {', '.join(SOURCES)}; got {', '.join(given) or 'none'}")
        for key, field in type(self).model_fields.items():
            unused = key not in SOURCES and key not in SOURCES[given[0]]
            if unused and getattr(self, key) != field.get_default(call_default_factory=True):
                allowed = ", ".join(SOURCES[given[0]]) or "nothing"
                raise ValueError(f"{key} does not go with {given[0]}; {allowed} does")
        return self

    @property
    def kind(self) -> str:
        """Which of the sources it is."""
        return next(key for key in SOURCES if getattr(self, key) is not None)


class GptConfig(Section):
    """The built-in small GPT."""

    kind: Literal["gpt"] = "gpt"
    layers: Whole = 4
    heads: Whole = 4
    width: Whole = 128
    context: Whole = 128
    """Tokens of a row."""
    dropout: Share = 0.0


class TransformersConfig(Section):
    """A causal language model of the `transformers` library."""

    kind: Literal["transformers"]
    path: str
    """A folder with a model, or (with `pretrained: false`) with only its `config.json`."""
    pretrained: bool = True
    """Whether to begin with its weights; otherwise with new ones."""
    context: Whole = 128
    """Tokens of a row."""


class CnnConfig(Section):
    """The paper's convolutional network, for images of 28 x 28 pixels."""

    kind: Literal["cnn"]
    channels: Whole = 32
    classes: Whole = 10


class PythonConfig(Section):
    """A model of one's own."""

    kind: Literal["python"]
    entry: str
    """`module:function`; it is called with `arguments` and gives the model, its loss function
    `loss(model, batch)`, the mean over the batch, and (for `projected` traces) one for every row."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Of the Python function."""
    context: Whole | None = None
    """Tokens of a row, where the domains are text."""
    vocabulary: Whole | None = None
    """The number of tokens, where they are not text (`tokens`) and it should be checked."""


class GivenConfig(Section):
    """A model that was handed over by Python code (`mixwell.train`)."""

    kind: Literal["given"]
    name: str
    """What it was."""
    context: Whole | None = None
    """Tokens of a row, where the domains are text."""


ModelConfig = Annotated[
    GptConfig | TransformersConfig | CnnConfig | PythonConfig | GivenConfig, Field(discriminator="kind")
]


class OptimizerConfig(Section):
    """What trains the model."""

    kind: Literal["adamw", "sgd"] = "adamw"
    lr: Positive = 1e-3
    """The greatest learning rate."""
    weight_decay: NotNegative = 0.0
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.95)
    """Of AdamW."""
    momentum: BelowOne = 0.0
    """Of SGD."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """How the learning rate falls after the warm-up."""
    warmup: Annotated[int, Field(ge=0, strict=True)] | Literal["auto"] = "auto"
    """Steps in which it rises; `auto` is a twentieth of all, at most 1000."""
    final: Share = 0.1
    """The share of the learning rate that is left at the end (cosine, linear)."""
    clip_norm: Positive | None = 1.0
    """The gradient is shortened to this norm; null for never."""


class BatchConfig(Section):
    """The rows of a step."""

    rows: Whole = 32
    """Of all domains together."""
    counts: Literal["weight", "equal"] = "weight"
    """Rows by weight, or equal for all domains (the paper's)."""
    least: Annotated[int, Field(ge=0, strict=True)] | Literal["auto"] = "auto"
    """Rows that each domain has in every step; `auto` is a quarter of an equal share; 0 if weights are kept."""
    micro_rows: Whole | None = None
    """At most so many rows in one forward pass (gradient accumulation); null for no limit."""


class MixerConfig(Section):
    """How the weights of the domains are found."""

    method: str = "mixwell"
    """`mixwell` learns them, `fixed` trains with those that are given; `mixwell methods` lists all."""
    options: dict[str, Any] = Field(default_factory=dict)
    """The method's own settings; `mixwell methods NAME` lists them."""
    weights: Literal["uniform", "proportional"] | dict[str, Positive] = "uniform"
    """At the beginning: all the same, by size, or numbers by domain."""
    horizon: Whole | Literal["auto", "long"] = "auto"
    """T, training steps per weight update; `long` is sqrt(N log N), `auto` what the method's authors use (of
    `mixwell` half of that)."""
    step_size: Positive | Literal["auto"] = "auto"
    """alpha of mirror descent; `auto` is tuned from the hypergradients seen."""
    curvature: NotNegative = 0.01
    """gamma of H = gamma I."""
    traces: Literal["auto", "projected", "dense", "bfloat16", "sketched"] = "auto"
    """Where the hypergradient is summed up: projections from one mixed batch, m copies of the parameters, half of
    that, or a sketch. `auto` is `projected` for language models that are not compiled, else `dense`."""
    rank: Whole = 32
    """Of projected traces: more is more exact and slower."""
    sketch_size: Whole = 65_536
    """Numbers per domain of sketched traces."""
    warmup: Annotated[int, Field(ge=0, strict=True)] = 0
    """Steps before the first round."""
    floor: Share | dict[str, Share] = 0.0
    """The least weight, for all domains or by domain."""
    cap: Share | dict[str, Share] = 1.0
    """The greatest weight, for all domains or by domain."""
    prior: dict[str, Positive] | None = None
    """Weights that are pulled to."""
    prior_strength: NotNegative = 0.0
    """How strongly, in units of the validation loss."""
    max_epochs: Positive | dict[str, Positive] | None = None
    """How often the rows of a domain may be seen, for all domains or by domain."""
    validation_rows: Whole | Literal["auto"] = "auto"
    """Of each validation gradient; `auto` is a twentieth of a round's training rows, divided by the gradients of a
    round (`options.points` of `mixwell`), at most the whole set."""
    on_nonfinite: Literal["raise", "skip"] = "raise"
    """A gradient that is not finite stops the run, or its domain is left out of that step and counted."""


class OutputConfig(Section):
    """What is written, and how often."""

    log_every: Whole = 10
    """Steps between two lines of metrics."""
    evaluate_every: Whole | Literal["auto"] = "auto"
    """Steps between two evaluations; `auto` is a twentieth of all."""
    evaluate_rows: Whole = 512
    """Rows of the validation set (and of the test set) that an evaluation takes, at most."""
    checkpoint_every: Whole | Literal["auto"] = "auto"
    """Steps between two checkpoints; `auto` is about every two minutes."""
    keep: Whole = 2
    """Checkpoints that are kept."""


class TensorBoardConfig(Section):
    """Scalars for TensorBoard."""

    folder: str | None = None
    """Of the event files; by default `tensorboard` in the run's directory."""


class WandbConfig(Section):
    """A run of Weights & Biases. What is left out is as its environment variables and own defaults say."""

    project: str | None = None
    """Of the run."""
    entity: str | None = None
    """The team or user."""
    name: str | None = None
    """Of the run; by default that of the run's directory."""
    group: str | None = None
    """Of runs to which it belongs."""
    tags: list[str] = Field(default_factory=list)
    """Of the run."""
    mode: Literal["online", "offline", "disabled"] | None = None
    """`offline` sends nothing; `wandb sync` does it later."""
    folder: str | None = None
    """In which W&B makes its folder `wandb`; by default the run's directory."""


class MlflowConfig(Section):
    """A run of MLflow. What is left out is as its environment variables and own defaults say."""

    uri: str | None = None
    """Of the store: `http://localhost:5000`, `sqlite:///mlflow.db`."""
    experiment: str | None = None
    """Its name; made if it is missing."""
    name: str | None = None
    """Of the run; by default that of the run's directory."""


class JsonlConfig(Section):
    """Lines of JSON with the same names as elsewhere; the run has its `metrics.jsonl` in any case."""

    path: str | None = None
    """Of the file; by default `logged.jsonl` in the run's directory."""


class LoggersConfig(Section):
    """Where the numbers go besides `metrics.jsonl`: `true`, or settings."""

    tensorboard: TensorBoardConfig | None = None
    """TensorBoard."""
    wandb: WandbConfig | None = None
    """Weights & Biases."""
    mlflow: MlflowConfig | None = None
    """MLflow."""
    jsonl: JsonlConfig | None = None
    """A file of JSON Lines."""

    @field_validator("*", mode="before")
    @classmethod
    def _switch(cls, given: Any) -> Any:
        if isinstance(given, bool):
            return {} if given else None
        if given is not None and not isinstance(given, dict | Section):
            raise ValueError(f"give true, false, or settings by name, got {given!r}")
        return given

    @property
    def chosen(self) -> dict[str, dict[str, Any]]:
        """The settings of those that are wanted, by tool."""
        sections = {name: getattr(self, name) for name in type(self).model_fields}
        return {name: one.model_dump(mode="json") for name, one in sections.items() if one is not None}


class ParallelConfig(Section):
    """Several processes, as `torchrun` starts them."""

    way: Literal["ddp", "fsdp"] = "ddp"
    """`ddp`: each has the whole model. `fsdp`: each has a part of every parameter (`fully_shard`)."""
    unused: bool = False
    """Whether some parameters may have no gradient in a step (`find_unused_parameters` of DDP)."""
    timeout: Annotated[float, Field(gt=0)] = 600.0
    """Seconds after which a run stops where another process does not answer."""


class Config(Section):
    """The settings of a run."""

    domains: dict[str, DataConfig] = Field(min_length=1)
    """By name, where the training rows come from."""
    validation: DataConfig | None = None
    """What the model should be good at; most methods learn the weights for it."""
    test: DataConfig | None = None
    """Rows of the same kind that nothing is learned from, for an honest number at the end."""
    steps: Whole = 2000
    """N, training steps."""
    seed: Annotated[int, Field(ge=0, lt=2**63, strict=True)] = 0
    """Of the model, the order of the rows, and everything else that is random."""
    model: ModelConfig = GptConfig()
    tokenizer: str = "bytes"
    """`bytes`, or a file of the `tokenizers` library (`mixwell tokenizer` makes one)."""
    optimizer: OptimizerConfig = OptimizerConfig()
    batch: BatchConfig = BatchConfig()
    mixer: MixerConfig = MixerConfig()
    compare: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """By name settings of the mixer in `mixwell compare`: of a method, or of a variant that names its `method`."""
    output: OutputConfig = OutputConfig()
    loggers: LoggersConfig = LoggersConfig()
    precision: Literal["float32", "bfloat16"] = "float32"
    """bfloat16 is autocast; parameters stay in float32."""
    compile: bool = False
    """torch.compile the model."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda`, `cuda:1`, `mps`. Of several processes each takes the GPU of its number."""
    parallel: ParallelConfig = ParallelConfig()
    base: Path = Path()
    """The folder to which relative paths refer; by default that of the file."""

    @property
    def traces(self) -> Literal["projected", "dense", "bfloat16", "sketched"]:
        """The kind of traces that `auto` means here, or that was chosen."""
        if self.mixer.traces != "auto":
            return self.mixer.traces
        language = isinstance(self.model, GptConfig | TransformersConfig)
        return "projected" if language and not self.compile else "dense"

    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, given: Any) -> Any:
        """A model without a kind is the GPT; a section in which everything is commented out is not there."""
        if not isinstance(given, dict):
            return given
        plain = {key: value for key, value in cast("dict[str, Any]", given).items() if value is not None}
        model = plain.get("model")
        if isinstance(model, dict) and "kind" not in model:
            plain["model"] = {"kind": "gpt", **model}
        return plain

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if "validation" in self.domains:
            raise ValueError("domains: the name 'validation' is taken; give that domain another one")
        for key in ("weights", "floor", "cap", "prior", "max_epochs"):
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
        if self.compile and self.mixer.traces == "projected":
            raise ValueError(
                "mixer.traces: projected watches the layers of the model, which compile hides; set compile: false "
                "or another kind of traces"
            )
        if (self.mixer.prior is None) != (self.mixer.prior_strength == 0):
            raise ValueError("mixer.prior and mixer.prior_strength belong together: give both, or neither")
        least = self.batch.least
        if isinstance(least, int) and least * len(self.domains) > self.batch.rows:
            raise ValueError(
                f"batch.rows is {self.batch.rows}, too few for batch.least = {least} of each of "
                f"{len(self.domains)} domains"
            )
        return self

    def _check_method(self) -> None:
        """Refuse a method that lacks what it needs, before anything is trained."""
        method = methods.find(self.mixer.method)
        options = method.parse_options(self.mixer.options)
        needs, name = method.needs, f"mixer.method: {method.name}"
        if needs.validation and options.uses_validation and self.validation is None:
            able = [one.name for one in methods.every().values() if not one.needs.validation]
            raise ValueError(
                f"{name} needs a validation set, and there is none: give `validation`, or a method that needs "
                f"none ({', '.join(able)})"
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
