"""What a method is: a recipe, its requirements, its cost, and the runs that it trains first."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, TypeVar, final

from pydantic import ValidationError
from typing_extensions import Unpack

from mixwell.mixer.recipes import METHODS, HorizonSetting, LoopSettings, Recipe
from mixwell.utils.sections import BelowOne as BelowOne
from mixwell.utils.sections import ConfigSection
from mixwell.utils.sections import NotNegative as NotNegative
from mixwell.utils.sections import Positive as Positive
from mixwell.utils.sections import Share as Share
from mixwell.utils.sections import Whole as Whole

if TYPE_CHECKING:  # so that listing the methods does not import torch
    from mixwell.hypergradient.traces import TracesConfig

Steps = Whole | Literal["auto"]
"""Training steps, or ``auto``, which every option defines."""


class Options(ConfigSection):
    """The settings of a method (``mixer.options``)."""

    @property
    def uses_validation(self) -> bool:
        """Whether a method that needs a validation set needs it with these settings too."""
        return True

    @property
    def learns_in_run(self) -> bool:
        """Whether a method that learns in rounds does so in the last run, and not in a proxy before it."""
        return True

    @property
    def mixer_settings(self) -> frozenset[str]:
        """The settings of the mixer that the method reads with these options, of :data:`OPTIONAL_SETTINGS`."""
        return frozenset({"weights"})

    def without_effect(self, *, step_size: bool = False) -> frozenset[str]:
        """Return the options that have no effect with the others.

        Args:
            step_size: whether the settings have a step size, in place of a self-tuned one.
        """
        return frozenset()

    @property
    def of_earlier_runs(self) -> frozenset[str]:
        """The options of runs that are trained first, which a training loop does not have."""
        return frozenset()

    def changed(self, names: Iterable[str]) -> list[str]:
        """Return those of some options that differ from their defaults."""
        fields = type(self).model_fields
        return [
            n
            for n in fields
            if n in names and getattr(self, n) != fields[n].get_default(call_default_factory=True)
        ]


OPTIONAL_SETTINGS = ("weights", "step_size", "curvature", "traces", "trace_every", "validation_rows")
"""The settings of the mixer that not all methods read (``mixer.weights``: the initial weights)."""
HYPERGRADIENT_SETTINGS = frozenset(OPTIONAL_SETTINGS)
"""What a hypergradient with traces reads."""

OptionsType = TypeVar("OptionsType", bound=Options)


@final
@dataclass(frozen=True)
class Needs:
    """What a method cannot do without.

    Args:
        validation: a validation set.
        reference: a reference model, which is trained first.
        proxies: other runs that are trained first.
        row_losses: a function for the loss of every row.
        probes: batches and losses outside of the training step (:class:`mixwell.Probes`).
        second_order: second derivatives, so a model that is not compiled.
        packages: packages of the extra ``search``.
    """

    validation: bool = False
    reference: bool = False
    proxies: bool = False
    row_losses: bool = False
    probes: bool = False
    second_order: bool = False
    domains: int = 2
    packages: tuple[str, ...] = ()


@final
@dataclass(frozen=True, kw_only=True)
class MethodContext:
    """The run that a method makes its recipe for.

    Args:
        rows: by domain.
        batch_rows: the rows of a training step over all domains.
        steps: N, training steps of the run.
        options: an instance of :attr:`Method.options`.
        weights: the initial weights of the settings.
        horizon: T of the settings.
        warmup: steps before the first round.
        step_size: alpha of mirror descent.
        curvature: gamma of H = gamma I.
        traces: the kind of traces with its settings; ``None`` for those of the signal.
        trace_every: of how many steps one leaves a trace.
        validation_rows: rows of each validation gradient.
        held_out: rows of the validation set, where known.
        evaluated: rows of it on which a run is evaluated, where known.
    """

    domains: tuple[str, ...]
    rows: Mapping[str, int]
    batch_rows: int
    steps: int
    seed: int = 0
    options: Options = field(default_factory=Options)
    weights: Literal["uniform", "proportional"] | Mapping[str, float] = "uniform"
    horizon: HorizonSetting = "auto"
    warmup: int = 0
    step_size: float | Literal["auto"] = "auto"
    curvature: float = 0.01
    traces: TracesConfig | None = None
    trace_every: int | Literal["auto"] = "auto"
    validation_rows: int | Literal["auto"] = "auto"
    held_out: int | None = None
    evaluated: int | None = None

    def options_as(self, kind: type[OptionsType]) -> OptionsType:
        """Return the options as those of one method."""
        assert isinstance(self.options, kind), f"expected {kind.__name__}, got {self.options!r}"
        return self.options

    def trial_steps(self, chosen: Steps) -> int:
        """Return the training steps of a trial; with ``auto`` those of the run."""
        return self.steps if chosen == "auto" else chosen

    @property
    def validation_cost(self) -> float:
        """The cost of a gradient of one validation batch, in training steps: 1, unless the set is smaller."""
        return 1.0 if self.held_out is None else min(1.0, self.held_out / self.batch_rows)

    @property
    def domains_cost(self) -> float:
        """The cost of a gradient of one probe batch of each domain, in training steps: about 1."""
        share = max(1, self.batch_rows // len(self.domains))
        return sum(min(share, self.rows[name]) for name in self.domains) / self.batch_rows


@final
@dataclass(frozen=True)
class Trial:
    """A run that is trained before the last one.

    Args:
        name: of its directory, the same whenever the stages are generated again.
        mixer: settings of the mixer that differ from those of the last run.
        model: settings of the model that differ (a smaller proxy).
        domains: the domains that it trains on, by default all.
    """

    name: str
    mixer: Mapping[str, Any]
    steps: int
    model: Mapping[str, Any] = field(default_factory=dict[str, Any])
    domains: Sequence[str] | None = None


@final
@dataclass(frozen=True)
class Outcome:
    """The result of a trial.

    Args:
        reference: the value of ``mixer.options.reference`` with which a later run takes its trained model.
        loss: on the validation set at the end; NaN where there is none.
        average: the average of the weights over the run.
    """

    reference: str
    loss: float
    average: Mapping[str, float]


Stages = Generator[Sequence[Trial], Sequence[Outcome], Mapping[str, Any]]
"""Yields trials, which run in parallel, is sent their outcomes, and returns settings of the mixer that differ in
the last run (none: the method runs as it is). For the same context it must yield the same trials, so that an
interrupted search resumes."""


@final
@dataclass(frozen=True)
class Extra:
    """The cost of a method in addition to plain training, in training steps (a gradient of a batch each).

    Args:
        before: all trials before the run.
        per_step: in every step.
        per_round: in every round, without the validation gradient.
    """

    before: float = 0.0
    per_step: float = 0.0
    per_round: float = 0.0


@final
@dataclass(frozen=True, kw_only=True)
class Method:
    """A named method of the field.

    Args:
        paper: authors, year and where.
        recipe: makes the parts of the mixer for a run.
        kind: ``"online"`` learns while the model trains, ``"offline"`` trains other runs first, ``"static"``
            never learns.
        memory: what it holds in addition to the model, in words.
        horizon: the authors' T by N steps; ``None`` for the paper's ``ceil(sqrt(N log N))``.
        stages: the trials that it trains first.
    """

    name: str
    line: str
    paper: str
    recipe: Callable[[MethodContext], Recipe]
    kind: Literal["online", "offline", "static"] = "online"
    needs: Needs = Needs()
    memory: str = "nothing"
    options: type[Options] = Options
    horizon: Callable[[int], int] | None = None
    stages: Callable[[MethodContext], Stages] | None = None
    extra: Callable[[MethodContext], Extra] = lambda context: Extra()

    @property
    def has_rounds(self) -> bool:
        """Whether weights are learned in rounds of T steps: in the run itself, or in a proxy before it."""
        return self.kind == "online" or self.horizon is not None

    def round_length(self, chosen: HorizonSetting, steps: int) -> int:
        """Return T of a run of N steps; N where the weights never change."""
        from mixwell.simplex import horizons

        if self.kind == "static":
            return steps
        if chosen == "auto" and self.horizon is not None:
            return max(1, min(self.horizon(steps), steps))
        return horizons.resolve(chosen if isinstance(chosen, int) else horizons.StochasticHorizon(), steps)

    def learns(self, options: Options) -> bool:
        """Return whether weights are learned in the run itself; if not, they are static or from trials."""
        return self.has_rounds and options.learns_in_run

    def expect_installed(self) -> None:
        """Raise ``ValueError`` for a package that is not installed."""
        missing = [one for one in self.needs.packages if find_spec(one) is None]
        if missing:
            raise ValueError(
                f"{self.name} needs {', '.join(missing)}, which is not installed: pip install 'mixwell[search]'"
            )

    def parse_options(self, given: Mapping[str, Any]) -> Options:
        """Return the method's settings with all defaults.

        Raises:
            ValueError: with the key, the value and the allowed values, for everything that is wrong.
        """
        try:
            return self.options.model_validate(dict(given))
        except ValidationError as error:
            raise ValueError("; ".join(self._problem(one) for one in error.errors())) from None

    def _problem(self, one: Any) -> str:
        key = ".".join(["mixer.options", *(str(part) for part in one["loc"])])
        if one["type"] == "extra_forbidden":
            known = ", ".join(self.options.model_fields) or "none"
            return f"{key}: {self.name} has no such option; it has {known}"
        if one["type"] == "value_error":
            return f"{key}: {one['msg'].removeprefix('Value error, ')}"
        return f"{key} must be {one['msg'].removeprefix('Input should be ')}, got {one['input']!r}"

    def loop_recipe(self, domains: Sequence[str], **settings: Unpack[LoopSettings]) -> Recipe:
        """Return the recipe for :meth:`mixwell.Mixer.from_method`."""
        self.expect_installed()
        if self.needs.proxies and not self.has_rounds:
            raise ValueError(
                f"{self.name} trains proxies on many mixtures first, which a training loop cannot; use "
                f"mixwell.train(..., mixer={{'method': {self.name!r}}}) or `mixwell run`, and give the weights "
                "that it finds to a Mixer"
            )
        if len(domains) < self.needs.domains:
            raise ValueError(f"{self.name} needs {self.needs.domains} domains or more, got {list(domains)}")
        options = self.parse_options(settings["options"])
        self._expect_read(options, settings)
        context = MethodContext(
            domains=tuple(domains),
            rows=_Sizes(self.name, settings["rows"]),
            batch_rows=settings["batch_rows"],
            steps=settings["budget"],
            seed=settings["seed"],
            options=options,
            horizon=settings["horizon"],
            warmup=settings["warmup"],
            step_size=settings["step_size"],
        )
        return self.recipe(context)

    def _expect_read(self, options: Options, settings: LoopSettings) -> None:
        """Raise ``ValueError`` for settings of a training loop that the method does not read."""
        fixed = settings["step_size"] != "auto"
        unread = ["step_size"] if fixed and "step_size" not in options.mixer_settings else []
        if not self.has_rounds:
            unread += ["horizon"] if settings["horizon"] != "auto" else []
            unread += ["warmup"] if settings["warmup"] else []
        ignored = options.without_effect(step_size=fixed) | options.of_earlier_runs
        unread += [f"options[{name!r}]" for name in options.changed(ignored)]
        if unread:
            raise ValueError(
                f"{self.name} does not read {', '.join(unread)} here; leave out what has no effect"
            )


class _Sizes(dict[str, int]):
    """Rows by domain, with a message for those that are missing."""

    def __init__(self, method: str, rows: Mapping[str, int]) -> None:
        super().__init__(rows)
        self._method = method

    def __missing__(self, name: str) -> int:
        raise ValueError(
            f"{self._method} uses the domains' sizes; give rows={{{name!r}: ..., }} for all of them"
        )


def register(*methods: Method) -> Method:
    """Add methods to the registry, and return the first."""
    for method in methods:
        METHODS.add(method.name, method)
    return methods[0]


def parts_of_run(count: int) -> Callable[[int], int]:
    """Return a horizon with ``count`` rounds in a run."""
    return lambda steps: -(-steps // count)


def every_step(steps: int) -> int:
    """Return 1, the horizon of greedy methods."""
    return 1


def keep_weights(context: MethodContext, weights: Mapping[str, float] | None = None) -> Recipe:
    """Return a recipe that never changes the weights."""
    from mixwell.signals import ConstantWeights

    return Recipe(ConstantWeights(), 1.0, weights=weights)
