"""RegMix: the loss of small proxies as a regression on their mixtures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Self

from pydantic import model_validator

from mixwell.methods import base, proxies
from mixwell.methods.base import MethodContext, Stages

if TYPE_CHECKING:  # so that listing the methods does not import numpy
    import numpy as np

    from mixwell.methods.search.mixtures import Matrix
    from mixwell.typing import Vector


class RegMixOptions(proxies.MixtureSearchOptions):
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


def stages(context: MethodContext) -> Stages:
    """Train proxies, fit their losses, and average the mixtures with the best predictions."""
    from mixwell.methods.search import mixtures, regression

    options = context.options_as(RegMixOptions)
    model = regression.chosen(options.model, options.proxies)
    regression.expect_installed(model)

    def propose(rng: np.random.Generator, tried: Matrix, losses: Vector) -> Vector:
        predict = regression.fit(model, tried, losses, seed=int(rng.integers(2**31)))
        samples = rng.dirichlet(mixtures.data_shares(context), options.samples)
        return regression.best_average(predict, samples, options.top)

    return (yield from mixtures.search_mixture(context, propose))


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
        extra=proxies.search_extra,
    )
)
