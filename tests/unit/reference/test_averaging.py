"""The closed forms of averaging on quadratics, against simulations of the recursion that they are of."""

import numpy as np
import pytest

from mixwell.reference import averaging
from mixwell.simplex.rounds import validation_points


def simulate(rng: np.random.Generator, eta: float, curvature: float, sigma: float, steps: int) -> np.ndarray:
    """Iterates of many noisy runs that have settled around the minimizer 0, shape ``(runs, steps)``."""
    runs, settle = 20_000, int(20 / (eta * curvature))
    theta = np.zeros(runs)
    kept = []
    for step in range(settle + steps):
        theta = theta - eta * (curvature * theta + sigma * rng.standard_normal(runs))
        if step >= settle:
            kept.append(theta)
    return np.stack(kept, axis=1)


@pytest.mark.parametrize("curvature", [0.2, 1.0, 8.0])
@pytest.mark.parametrize("count", [1, 4, 8])
def test_noise_of_points_matches_simulation(curvature: float, count: int) -> None:
    eta, sigma, length = 0.1, 0.7, 40
    iterates = simulate(np.random.default_rng(0), eta, curvature, sigma, length)
    points = validation_points(length, points=count, span=0.5)
    measured = iterates[:, [point - 1 for point in points]].mean(axis=1).var()
    expected = averaging.iterate_variance(eta, curvature, sigma) * averaging.averaging_factor(
        points, eta, curvature
    )
    assert measured == pytest.approx(expected, rel=0.05)


def test_eight_points_divide_the_noise_of_sharp_directions_by_eight() -> None:
    points = validation_points(84, points=8, span=0.5)
    assert averaging.averaging_factor(points, 0.1, 8.0) == pytest.approx(1 / 8, rel=0.02)
    assert averaging.averaging_factor(points, 0.1, 0.001) > 0.99


def test_unconverged_part_is_between_half_and_full_round() -> None:
    points = validation_points(84, points=8, span=0.5)
    for curvature in (0.05, 0.5, 2.0):
        left = averaging.unconverged_part(points, 0.1, curvature)
        assert (1 - 0.1 * curvature) ** 84 <= left <= (1 - 0.1 * curvature) ** 42


def test_persistence_matches_perturbed_run() -> None:
    eta, curvature, further = 0.1, 0.6, 30
    noise = np.random.default_rng(0).standard_normal(further)

    def end(theta: float) -> float:
        for xi in noise:
            theta -= eta * (curvature * (theta - 2.0) + xi)
        return theta

    assert (end(1.5) - end(1.0)) / 0.5 == pytest.approx(averaging.persistence(further, eta, curvature))
