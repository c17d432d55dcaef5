"""Mixtures that are never learned: the baselines that every comparison must include."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from typing_extensions import override

from mixwell.methods import base
from mixwell.methods.base import MethodContext, Recipe


class KnownMixtureOptions(base.Options):
    """Settings of a mixture that follows from the domains."""

    @property
    @override
    def mixer_settings(self) -> frozenset[str]:
        return frozenset()


class TemperatureOptions(KnownMixtureOptions):
    """Settings of temperature sampling."""

    temperature: Annotated[float, Field(gt=0)] = 2.0
    """tau of `w_j ~ n_j^(1/tau)`: 1 is proportional to the rows, infinity is uniform."""


def uniform(context: MethodContext) -> Recipe:
    """Return the same weight for every domain."""
    return base.keep_weights(context, dict.fromkeys(context.domains, 1.0))


def proportional(context: MethodContext) -> Recipe:
    """Return weights by the number of rows."""
    return base.keep_weights(context, {name: float(context.rows[name]) for name in context.domains})


def temperature(context: MethodContext) -> Recipe:
    """Return ``w_j ~ n_j^(1/tau)``, between proportional and uniform."""
    tau = context.options_as(TemperatureOptions).temperature
    return base.keep_weights(
        context, {name: float(context.rows[name]) ** (1 / tau) for name in context.domains}
    )


base.register(
    base.Method(
        name="fixed",
        kind="static",
        line="the weights that are given, kept",
        paper="by hand",
        needs=base.Needs(domains=1),
        recipe=base.keep_weights,
    ),
    base.Method(
        name="uniform",
        kind="static",
        line="the same weight for every domain",
        paper="baseline",
        needs=base.Needs(domains=1),
        recipe=uniform,
        options=KnownMixtureOptions,
    ),
    base.Method(
        name="proportional",
        kind="static",
        line="weights by the number of rows, as if all were one data set",
        paper="baseline",
        needs=base.Needs(domains=1),
        recipe=proportional,
        options=KnownMixtureOptions,
    ),
    base.Method(
        name="temperature",
        kind="static",
        line="weights by a root of the number of rows, between proportional and uniform",
        paper="Devlin et al. 2018; Arivazhagan et al. 2019, arXiv:1907.05019",
        needs=base.Needs(domains=1),
        recipe=temperature,
        options=TemperatureOptions,
    ),
)
