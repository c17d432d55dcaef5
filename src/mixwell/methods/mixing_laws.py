"""Data Mixing Laws: the loss of proxies as an exponential function of their mixtures, which is then minimized."""

from __future__ import annotations

from typing import Literal

from mixwell.methods import base
from mixwell.methods.base import MethodContext, Stages
from mixwell.methods.regmix import MixtureSearchOptions, data_shares, extra, train_proxies


class MixingLawsOptions(MixtureSearchOptions):
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
    import numpy as np

    from mixwell.methods.search import laws, proposals

    options = context.options_as(MixingLawsOptions)
    domains = len(context.domains)
    rng = np.random.default_rng(context.seed)
    # With this strength, mixtures of domains of one size are uniform on the simplex.
    tried, losses = yield from train_proxies(context, rng, strengths=(float(domains),))
    penalty = options.penalty
    if penalty == "auto":
        penalty = laws.usual_penalty(parts=options.parts, domains=domains, proxies=options.proxies)
    seed = int(rng.integers(2**31))
    law = laws.fit(tried, losses, parts=options.parts, penalty=penalty, starts=options.starts, seed=seed)
    best = proposals.minimizer(law, options.repeats * data_shares(context))
    return proposals.settings(context.domains, best)


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
        extra=extra,
    )
)
