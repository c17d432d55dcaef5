"""Data Mixing Laws: the loss of proxies as an exponential function of their mixtures, which is then minimized."""

from __future__ import annotations

from typing import Literal

from mixwell.methods.base import Method, Needs, NotNegative, Stages, Task, Whole
from mixwell.methods.regmix import ProxyOptions, proxies_first, proxy_steps, recipe


class MixingLawsOptions(ProxyOptions):
    """Of Data Mixing Laws."""

    parts: Whole = 3
    """Terms of the law: the validation set is taken as a mixture of so many unknown parts. With one, all weight
    goes to one domain (as far as `repeats` allows)."""
    penalty: NotNegative | Literal["auto"] = "auto"
    """How strongly the terms are held together; `auto` is `.005 (p/n)^2` for p parameters and n proxies, 0 the
    paper's."""
    starts: Whole = 16
    """Points from which the fit is searched."""


def stages(task: Task) -> Stages:
    """Train proxies, fit a law to their losses, minimize it.

    Args:
        task: with :class:`MixingLawsOptions`.

    Yields:
        All proxies at once.

    Returns:
        Fixed weights for the last run.
    """
    import numpy as np

    from mixwell.methods.search import laws, mixtures, proposals

    options: MixingLawsOptions = task.options
    domains = len(task.domains)
    rng = np.random.default_rng(task.seed)
    shares = np.array([task.rows[name] for name in task.domains], dtype=np.float64)
    shares /= shares.sum()
    # Domains of one size have mixtures that are spread evenly over the simplex.
    tried = mixtures.candidates(
        shares,
        options.proxies,
        rng,
        strengths=(float(domains),),
        repeats=options.repeats,
        least=options.least,
    )
    planned = mixtures.trials(task.domains, tried, steps=proxy_steps(task), model=options.proxy_model)
    outcomes = yield planned
    losses = mixtures.losses(planned, outcomes)
    penalty = options.penalty
    if penalty == "auto":
        penalty = laws.usual_penalty(parts=options.parts, domains=domains, proxies=options.proxies)
    seed = int(rng.integers(2**31))
    law = laws.fit(tried, losses, parts=options.parts, penalty=penalty, starts=options.starts, seed=seed)
    return proposals.settings(task.domains, proposals.minimizer(law, options.repeats * shares))


METHODS = (
    Method(
        name="mixing-laws",
        kind="offline",
        line="fits an exponential law to the losses of proxies on many mixtures, and minimizes it",
        paper="Ye et al. 2024, arXiv:2403.16952",
        needs=Needs(validation=True, proxies=True, packages=("scipy",)),
        memory="nothing in the run; a directory for every proxy",
        recipe=recipe,
        options=MixingLawsOptions,
        stages=stages,
        extra=proxies_first,
    ),
)
