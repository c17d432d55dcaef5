"""The kinds of problems."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from mixwell.lab.bounds.logistic import LogisticRegression
from mixwell.lab.bounds.problems import BilevelProblem
from mixwell.lab.bounds.shared_quadratics import SharedQuadratics

KINDS: dict[str, Callable[[int], BilevelProblem]] = {
    "quadratic": partial(SharedQuadratics, condition=4.0, noise=1.0),
    "steep quadratic": partial(SharedQuadratics, condition=10.0),
    "noisy quadratic": partial(SharedQuadratics, condition=1.25, noise=3.0),
    "logistic": LogisticRegression,
}
"""Problems by name, from a seed."""
