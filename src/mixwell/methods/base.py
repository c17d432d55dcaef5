"""What a method of the field is, here: a recipe, what it needs, and what is trained before."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, final

from pydantic import BaseModel, ConfigDict

from mixwell.utils.sections import NotNegative as NotNegative
from mixwell.utils.sections import Positive as Positive
from mixwell.utils.sections import Share as Share
from mixwell.utils.sections import Whole

if TYPE_CHECKING:  # so that a list of the methods need not wait for torch
    from mixwell.signals import Signal
    from mixwell.simplex.constraints import Constraint
    from mixwell.simplex.updates import Update


Steps = Whole | Literal["auto"]
"""Training steps, or ``auto``, which every option says the meaning of."""


class Options(BaseModel):
    """The settings that a method has of its own (``mixer.options``); unknown ones are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    @property
    def uses_validation(self) -> bool:
        """Whether a method that needs a validation set needs it with these settings, too."""
        return True

    @property
    def learns_in_run(self) -> bool:
        """Whether a method that learns in rounds does so in the last run, and not in a proxy before it."""
        return True


@final
@dataclass(frozen=True)
class Needs:
    """What a method cannot do without.

    Args:
        validation: a validation set.
        reference: a reference model, which is trained first.
        proxies: other runs that are trained first.
        row_losses: a function for the loss of every row.
        second_order: second derivatives, so a model that is not compiled.
        domains: at least so many domains.
        packages: that are not in the base installation but in the extra ``search``.
    """

    validation: bool = False
    reference: bool = False
    proxies: bool = False
    row_losses: bool = False
    second_order: bool = False
    domains: int = 2
    packages: tuple[str, ...] = ()


@final
@dataclass(frozen=True)
class Task:
    """What a recipe may look at.

    Args:
        domains: their names.
        rows: that each domain has.
        batch_rows: of a training step, all domains together.
        steps: N, training steps of the run.
        seed: of the run.
        mixer: the mixer section of the settings (``MixerConfig``).
        options: the method's own settings, an instance of its :attr:`Method.options`.
        traces: the kind of traces that the settings mean.
        held_out: rows of the validation set, where that is known.
        evaluated: rows of it on which a run is evaluated, where that is known.
    """

    domains: tuple[str, ...]
    rows: Mapping[str, int]
    batch_rows: int
    steps: int
    seed: int
    mixer: Any
    options: Any
    traces: str = "dense"
    held_out: int | None = None
    evaluated: int | None = None


@final
@dataclass(frozen=True)
class Recipe:
    """A method for one run: signal, update, constraints.

    Args:
        signal: what is measured.
        update: how the weights move.
        constraints: where the weights may live, besides those of the settings.
        weights: to begin with, by domain, where the method says so; else those of the settings.
    """

    signal: Signal
    update: Update | float | None = None
    constraints: Sequence[Constraint] = ()
    weights: Mapping[str, float] | None = None


@final
@dataclass(frozen=True)
class Trial:
    """A run that is trained before the last one.

    Args:
        name: of its directory, the same whenever the method is asked again.
        mixer: settings of the mixer that differ from those of the whole.
        steps: training steps.
        model: settings of the model that differ (a smaller proxy).
        domains: only these, where not all are trained on.
    """

    name: str
    mixer: Mapping[str, Any]
    steps: int
    model: Mapping[str, Any] = field(default_factory=dict[str, Any])
    domains: Sequence[str] | None = None


@final
@dataclass(frozen=True)
class Outcome:
    """What came of a trial.

    Args:
        folder: its directory; the trained model is in its last checkpoint.
        loss: on the validation set at the end; NaN where there is none.
        average: the average of the weights over the run.
    """

    folder: Path
    loss: float
    average: Mapping[str, float]


Stages = Generator[Sequence[Trial], Sequence[Outcome], Mapping[str, Any]]
"""Yields trials, which are run side by side, is sent their outcomes, and returns settings of the mixer that differ
in the last run (none: the method runs as it is). Asked again with the same task it must yield the same trials, so
that an interrupted search goes on."""


@final
@dataclass(frozen=True)
class Extra:
    """What a method computes beside plain training, in training steps (a gradient of a batch each).

    Args:
        before: in all the trials before the run.
        per_step: in every step.
        per_round: in every round, besides the validation gradient.
    """

    before: float = 0.0
    per_step: float = 0.0
    per_round: float = 0.0


def nothing_extra(task: Task) -> Extra:
    """A method that computes nothing besides training and validation gradients.

    Args:
        task: not used.

    Returns:
        Nothing.
    """
    return Extra()


def steps_of(chosen: Steps, task: Task) -> int:
    """Training steps of a trial.

    Args:
        chosen: as the options have it.
        task: of the run.

    Returns:
        As many as the run has with ``auto``.
    """
    return task.steps if chosen == "auto" else chosen


def validation_batch(task: Task) -> float:
    """The rows of one probe batch of the validation set, in training steps: 1, unless the set is smaller.

    Args:
        task: of a run.

    Returns:
        Their number over the rows of a training step.
    """
    return 1.0 if task.held_out is None else min(1.0, task.held_out / task.batch_rows)


def batch_of_each(task: Task) -> float:
    """The rows of one probe batch of each domain, in training steps: about 1.

    Args:
        task: of a run.

    Returns:
        Their number over the rows of a training step.
    """
    share = max(1, task.batch_rows // len(task.domains))
    return sum(min(share, task.rows[name]) for name in task.domains) / task.batch_rows


@final
@dataclass(frozen=True)
class Method:
    """A named method of the field.

    Args:
        name: by which settings and commands know it.
        kind: ``"online"`` learns while the model trains, ``"offline"`` trains other runs first, ``"static"``
            never learns.
        line: what it does, in one line.
        paper: authors, year and where.
        needs: what it cannot do without.
        memory: what it holds besides the model, in words.
        recipe: makes it for a run.
        options: its own settings.
        horizon: the T that its authors use, of N steps; ``None`` for ``ceil(sqrt(N log N))``, the paper's.
        stages: what it trains before, if anything.
        extra: what it computes beside plain training.
    """

    name: str
    kind: Literal["online", "offline", "static"]
    line: str
    paper: str
    recipe: Callable[[Task], Recipe]
    needs: Needs = Needs()
    memory: str = "nothing"
    options: type[Options] = Options
    horizon: Callable[[int], int] | None = None
    stages: Callable[[Task], Stages] | None = None
    extra: Callable[[Task], Extra] = nothing_extra

    @property
    def has_rounds(self) -> bool:
        """Whether weights are learned in rounds of T steps: in the run itself, or in a proxy before it."""
        return self.kind == "online" or self.horizon is not None

    def length(self, chosen: int | Literal["auto", "long"], steps: int) -> int:
        """T of a run.

        Args:
            chosen: as the settings have it.
            steps: N.

        Returns:
            Steps of a round; all of them where the weights never change.
        """
        from mixwell.simplex import horizons

        if self.kind == "static":
            return steps
        if chosen == "auto" and self.horizon is not None:
            return max(1, min(self.horizon(steps), steps))
        return horizons.resolve(chosen if isinstance(chosen, int) else horizons.StochasticHorizon(), steps)

    def learns(self, options: Options) -> bool:
        """Whether weights are learned in the run itself.

        Args:
            options: of the method.

        Returns:
            If not, they are kept: static ones, or what trials have found.
        """
        return self.has_rounds and options.learns_in_run

    def expect_installed(self) -> None:
        """Find out early whether the packages that the method needs are there.

        Raises:
            ValueError: one is not.
        """
        missing = [one for one in self.needs.packages if find_spec(one) is None]
        if missing:
            raise ValueError(
                f"{self.name} needs {', '.join(missing)}, which is not installed: pip install 'mixwell[search]'"
            )


def every_step(steps: int) -> int:
    """The horizon of greedy methods.

    Args:
        steps: N, not used.

    Returns:
        1.
    """
    return 1
