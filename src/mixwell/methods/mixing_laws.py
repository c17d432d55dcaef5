"""Data Mixing Laws: the loss of proxies as an exponential function of their mixtures, which is then minimized."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from mixwell.methods import base, proxies
from mixwell.methods.base import MethodContext, Stages

if TYPE_CHECKING:  # so that listing the methods does not import numpy
    import numpy as np

    from mixwell.methods.search.mixtures import Matrix
    from mixwell.typing import Vector


class MixingLawsOptions(proxies.MixtureSearchOptions):
    """Settings of Data Mixing Laws."""

    parts: base.Whole = 3
    """Terms of the law: the validation set is modeled as a mixture of this number of unknown parts. With one, all
    weight goes to one domain (as far as `repeats` allows)."""
    penalty: base.NotNegative | Literal["auto"] = "auto"
    """How strongly the terms are held together; `auto` is `.005 (p/n)^2` for p parameters and n proxies, 0 the
    paper's."""
    starts: base.Whole = 16
    """Points from which the fit is searched."""


def stages(context: MethodContext) -> Stages:
    """Train proxies, fit a law to their losses, minimize it."""
    from mixwell.methods.search import laws, mixtures

    options = context.options_as(MixingLawsOptions)
    domains = len(context.domains)

    def propose(rng: np.random.Generator, tried: Matrix, losses: Vector) -> Vector:
        penalty = options.penalty
        if penalty == "auto":
            penalty = laws.usual_penalty(parts=options.parts, domains=domains, proxies=options.proxies)
        seed = int(rng.integers(2**31))
        law = laws.fit(tried, losses, parts=options.parts, penalty=penalty, starts=options.starts, seed=seed)
        return laws.minimizer(law, options.repeats * mixtures.data_shares(context))

    # With this strength, mixtures of domains of one size are uniform on the simplex.
    return (yield from mixtures.search_mixture(context, propose, strengths=(float(domains),)))


base.register(
    base.Method(
        name="mixing-laws",
        kind="offline",
        line="fits an exponential law to the losses of proxies on many mixtures, and minimizes it",
        paper="Ye et al. 2024, arXiv:2403.16952",
        needs=base.Needs(validation=True, proxies=True, packages=("scipy",)),
        memory="nothing in the run; a directory for every proxy",
        recipe=base.keep_weights,
        options=MixingLawsOptions,
        stages=stages,
        extra=proxies.search_extra,
    )
)
