"""The paper's bounds, and its choices of horizon and step size, as functions of the budget and the constants.

"Less is More: Convergence Benefits of Fewer Data Weight Updates over Longer Horizon" (Das, Patel,
Razaviyayn, Mirrokni): the main convergence theorem (Theorem "thm2", deterministic) and its stochastic case
(Theorem "thm:stochastic-case").

With the constants of a problem at hand::

    constants = theory.Constants(domains=3, gradient=2.0, smoothness=4.0, ...)
    theory.deterministic_bound(constants, budget=10_000, horizon=200, learning_rate=0.05).total
    theory.best_deterministic_horizon(constants, budget=10_000, learning_rate=0.05)
"""

from mixwell.reference.theory.averaging import (
    averaging_factor,
    iterate_variance,
    persistence,
    unconverged_part,
)
from mixwell.reference.theory.bounds import (
    Bound,
    deterministic_bound,
    hypergradient_error_bound,
    stochastic_bound,
)
from mixwell.reference.theory.constants import Constants
from mixwell.reference.theory.horizons import (
    noisy_learning_rate,
    shortest_horizon,
    shortest_noisy_horizon,
)
from mixwell.reference.theory.solvers import best_deterministic_horizon, best_stochastic_horizon
from mixwell.simplex.horizons import deterministic_horizon, stochastic_horizon
from mixwell.simplex.updates.step_size import mirror_step_size

__all__ = [
    "Bound",
    "Constants",
    "averaging_factor",
    "best_deterministic_horizon",
    "best_stochastic_horizon",
    "deterministic_bound",
    "deterministic_horizon",
    "hypergradient_error_bound",
    "iterate_variance",
    "mirror_step_size",
    "noisy_learning_rate",
    "persistence",
    "shortest_horizon",
    "shortest_noisy_horizon",
    "stochastic_bound",
    "stochastic_horizon",
    "unconverged_part",
]
