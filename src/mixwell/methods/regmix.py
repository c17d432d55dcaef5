"""RegMix: the loss of small proxies as a regression on their mixtures."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from mixwell.methods import base
from mixwell.methods.base import Extra, MethodContext, Outcome, Stages, Trial
from mixwell.utils.costs import FORWARD

if TYPE_CHECKING:
    import numpy as np

    from mixwell.methods.search.mixtures import Matrix
    from mixwell.typing import Vector


class MixtureSearchOptions(base.Options):
    """Settings of methods that train proxies on many mixtures."""

    proxies: Annotated[int, Field(ge=4, strict=True)] = 32
    """The number of mixtures that are tried, each in its own run."""
    proxy_steps: base.Steps = "auto"
    """Training steps of a proxy; `auto` divides the steps of one run among all of them."""
    proxy_model: dict[str, Any] = Field(default_factory=dict)
    """Settings of the model that differ in proxies, to make them smaller: `{layers: 2, width: 64}`."""
    repeats: Annotated[float, Field(gt=1, allow_inf_nan=False)] = 15.0
    """The largest weight of a domain in a proxy, in multiples of its share of all rows."""
    least: Annotated[float, Field(gt=0, lt=1)] = 2e-4
    """A smaller weight of a mixture becomes zero, and its domain is left out of that proxy."""

    def steps(self, context: MethodContext) -> int:
        """Return the training steps of a proxy; with ``auto`` all together take about as many as the run."""
        return max(1, context.steps // self.proxies) if self.proxy_steps == "auto" else self.proxy_steps


class RegMixOptions(MixtureSearchOptions):
    """Settings of RegMix."""

    model: Literal["auto", "linear", "log-linear", "lightgbm"] = "auto"
    """The fitted model; `auto` is `lightgbm` (the paper's) from 128 proxies on, else `log-linear`."""
    samples: base.Whole = 100_000
    """Mixtures for which the loss is predicted."""
    top: base.Whole = 128
    """The number of best mixtures that are averaged."""

    @model_validator(mode="after")
    def _enough_samples(self) -> Self:
        if self.top > self.samples:
            raise ValueError(f"top must be at most samples ({self.samples}), got {self.top}")
        return self


def data_shares(context: MethodContext) -> Vector:
    """Return the domains' shares of all rows, shape ``(m,)``."""
    import numpy as np

    shares = np.array([context.rows[name] for name in context.domains], dtype=np.float64)
    return shares / shares.sum()


def train_proxies(
    context: MethodContext, rng: np.random.Generator, **candidates: Any
) -> Generator[Sequence[Trial], Sequence[Outcome], tuple[Matrix, Vector]]:
    """Train a proxy on each of many mixtures, all at once; return the mixtures and the validation losses."""
    from mixwell.methods.search import mixtures

    options = context.options_as(MixtureSearchOptions)
    tried = mixtures.candidates(
        data_shares(context),
        options.proxies,
        rng,
        repeats=options.repeats,
        least=options.least,
        **candidates,
    )
    steps = options.steps(context)
    planned = mixtures.trials(context.domains, tried, steps=steps, model=options.proxy_model)
    outcomes = yield planned
    return tried, mixtures.losses(planned, outcomes)


def stages(context: MethodContext) -> Stages:
    """Train proxies, fit their losses, propose a mixture."""
    import numpy as np

    from mixwell.methods.search import proposals, regression

    options = context.options_as(RegMixOptions)
    model = regression.chosen(options.model, options.proxies)
    regression.expect_installed(model)
    rng = np.random.default_rng(context.seed)
    tried, losses = yield from train_proxies(context, rng)
    predict = regression.fit(model, tried, losses, seed=int(rng.integers(2**31)))
    samples = rng.dirichlet(data_shares(context), options.samples)
    return proposals.settings(context.domains, proposals.best_average(predict, samples, options.top))


def extra(context: MethodContext) -> Extra:
    """Return the cost of the proxies, as if they were no smaller than the model, and of their evaluations."""
    options = context.options_as(MixtureSearchOptions)
    evaluation = FORWARD * (context.evaluated or 0) / context.batch_rows
    return Extra(before=options.proxies * (options.steps(context) + evaluation))


base.register(
    base.Method(
        name="regmix",
        kind="offline",
        line="fits the losses of proxies on many mixtures, and averages the mixtures with the best predictions",
        paper="Liu et al. 2024, arXiv:2407.01492",
        needs=base.Needs(validation=True, proxies=True),
        memory="nothing in the run; a directory for every proxy",
        recipe=base.keep_weights,
        options=RegMixOptions,
        stages=stages,
        extra=extra,
    )
)
