"""Mixtures that are never learned: the baselines that every comparison must include."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from mixwell.methods.base import Method, Needs, Options, Recipe, Task


class TemperatureOptions(Options):
    """Of temperature sampling."""

    temperature: Annotated[float, Field(gt=0)] = 2.0
    """tau of `w_j ~ n_j^(1/tau)`: 1 is proportional to the rows, infinity is uniform."""


def fixed(task: Task) -> Recipe:
    """The weights of the settings, kept.

    Args:
        task: of a run.

    Returns:
        The recipe.
    """
    return _kept(None)


def uniform(task: Task) -> Recipe:
    """The same weight for every domain.

    Args:
        task: of a run.

    Returns:
        The recipe.
    """
    return _kept(dict.fromkeys(task.domains, 1.0))


def proportional(task: Task) -> Recipe:
    """Weights by the number of rows.

    Args:
        task: of a run.

    Returns:
        The recipe.
    """
    return _kept({name: float(task.rows[name]) for name in task.domains})


def temperature(task: Task) -> Recipe:
    """``w_j ~ n_j^(1/tau)``, between proportional and uniform.

    Args:
        task: with :class:`TemperatureOptions`.

    Returns:
        The recipe.
    """
    options: TemperatureOptions = task.options
    return _kept({name: float(task.rows[name]) ** (1 / options.temperature) for name in task.domains})


def _kept(weights: dict[str, float] | None) -> Recipe:
    from mixwell.signals import ConstantWeights

    return Recipe(ConstantWeights(), 1.0, weights=weights)


METHODS = (
    Method(
        name="fixed",
        kind="static",
        line="the weights that are given, kept",
        paper="by hand",
        needs=Needs(domains=1),
        recipe=fixed,
    ),
    Method(
        name="uniform",
        kind="static",
        line="the same weight for every domain",
        paper="baseline",
        needs=Needs(domains=1),
        recipe=uniform,
    ),
    Method(
        name="proportional",
        kind="static",
        line="weights by the number of rows, as if all were one data set",
        paper="baseline",
        needs=Needs(domains=1),
        recipe=proportional,
    ),
    Method(
        name="temperature",
        kind="static",
        line="weights by a root of the number of rows, between proportional and uniform",
        paper="Devlin et al. 2018; Arivazhagan et al. 2019, arXiv:1907.05019",
        needs=Needs(domains=1),
        recipe=temperature,
        options=TemperatureOptions,
    ),
)
