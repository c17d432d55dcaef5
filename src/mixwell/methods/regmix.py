"""RegMix: the loss of small proxies as a regression on their mixtures."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from mixwell.methods.base import Extra, Method, Needs, Options, Recipe, Stages, Steps, Task, Whole
from mixwell.utils.costs import FORWARD


class ProxyOptions(Options):
    """Of methods that train proxies on many mixtures."""

    proxies: Annotated[int, Field(ge=4, strict=True)] = 32
    """How many mixtures are tried, each by a run of its own."""
    proxy_steps: Steps = "auto"
    """Training steps of a proxy; `auto` shares the steps of one run among all of them."""
    proxy_model: dict[str, Any] = Field(default_factory=dict)
    """Settings of the model that differ in proxies, to make them smaller: `{layers: 2, width: 64}`."""
    repeats: Annotated[float, Field(gt=1, allow_inf_nan=False)] = 15.0
    """No proxy has more of a domain than so many times its share of all rows."""
    least: Annotated[float, Field(gt=0, lt=1)] = 2e-4
    """A smaller weight of a mixture becomes zero, and its domain is left out of that proxy."""


class RegMixOptions(ProxyOptions):
    """Of RegMix."""

    model: Literal["auto", "linear", "log-linear", "lightgbm"] = "auto"
    """What is fitted; `auto` is `lightgbm` (the paper's) from 128 proxies on, else `log-linear`."""
    samples: Whole = 100_000
    """Mixtures whose losses are predicted."""
    top: Whole = 128
    """The best of them, which are averaged."""

    @model_validator(mode="after")
    def _enough_samples(self) -> Self:
        if self.top > self.samples:
            raise ValueError(f"top must be at most samples ({self.samples}), got {self.top}")
        return self


def stages(task: Task) -> Stages:
    """Train proxies, fit their losses, propose a mixture.

    Args:
        task: with :class:`RegMixOptions`.

    Yields:
        All proxies at once.

    Returns:
        Fixed weights for the last run.
    """
    import numpy as np

    from mixwell.methods.search import mixtures, proposals, regression

    options: RegMixOptions = task.options
    model = regression.chosen(options.model, options.proxies)
    regression.expect_installed(model)
    rng = np.random.default_rng(task.seed)
    shares = np.array([task.rows[name] for name in task.domains], dtype=np.float64)
    shares /= shares.sum()
    tried = mixtures.candidates(shares, options.proxies, rng, repeats=options.repeats, least=options.least)
    planned = mixtures.trials(task.domains, tried, steps=proxy_steps(task), model=options.proxy_model)
    outcomes = yield planned
    losses = mixtures.losses(planned, outcomes)
    predict = regression.fit(model, tried, losses, seed=int(rng.integers(2**31)))
    samples = rng.dirichlet(shares, options.samples)
    return proposals.settings(task.domains, proposals.best_average(predict, samples, options.top))


def proxy_steps(task: Task) -> int:
    """Training steps of a proxy.

    Args:
        task: with :class:`ProxyOptions`.

    Returns:
        As the options say; with ``auto`` all proxies together take about as many as the run.
    """
    options: ProxyOptions = task.options
    return max(1, task.steps // options.proxies) if options.proxy_steps == "auto" else options.proxy_steps


def proxies_first(task: Task) -> Extra:
    """What the proxies compute, and the looks at the validation set that are learned from.

    Args:
        task: with :class:`ProxyOptions`.

    Returns:
        The steps of all proxies, as if they were no smaller than the model.
    """
    look = FORWARD * (task.evaluated or 0) / task.batch_rows
    return Extra(before=task.options.proxies * (proxy_steps(task) + look))


def recipe(task: Task) -> Recipe:
    """The last run: the weights that the proxies have found are kept.

    Args:
        task: of a run.

    Returns:
        The recipe.
    """
    from mixwell.signals import ConstantWeights

    return Recipe(ConstantWeights(), 1.0)


METHODS = (
    Method(
        name="regmix",
        kind="offline",
        line="fits the losses of proxies on many mixtures, and takes the mixtures that the fit likes best",
        paper="Liu et al. 2024, arXiv:2407.01492",
        needs=Needs(validation=True, proxies=True),
        memory="nothing in the run; a directory for every proxy",
        recipe=recipe,
        options=RegMixOptions,
        stages=stages,
        extra=proxies_first,
    ),
)
