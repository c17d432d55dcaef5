"""The golden table of the paper's quadratic example, by the real mixer."""

from __future__ import annotations

import numpy as np
import pytest

from mixwell.lab.quadratic import example as quadratic
from mixwell.lab.quadratic.example import QuadraticSettings

HORIZONS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
TABLE = {
    (150, 1): (-35.9500, -27.4050, -7.4671, 2.4506, 3.1718, 2.8761, 2.2623, 1.6044, 0.8775, 0.5),
    (150, 5): (-179.75, -137.025, -37.3337, 4.5807, 4.9702, 4.6653, 4.0855, 3.5208, 2.8793, 2.5),
    (1000, 1): (-800.95, -715.905, -509.383, -284.221, -78.216, 2.5682, 2.2572, 1.6044, 0.8775, 0.5),
}


@pytest.mark.parametrize("case", TABLE)
def test_every_table_cell(case: tuple[int, int]) -> None:
    setting = QuadraticSettings(*case)
    for horizon, expected in zip(HORIZONS, TABLE[case], strict=True):
        path = quadratic.run(setting, horizon)
        # The table has four decimals, or four significant digits where that is coarser.
        assert path.phi[-1] == pytest.approx(expected, rel=5e-5, abs=5e-5)
        assert quadratic.deviation(path, quadratic.recursion(setting, horizon)) < 1e-11


def test_short_last_round_follows_recursion() -> None:
    setting = QuadraticSettings(150, 1, budget=250)
    path = quadratic.run(setting, 84)
    assert path.steps.tolist() == [0, 84, 168, 250]
    expected = quadratic.recursion(setting, 84)
    np.testing.assert_allclose(path.phi, expected.phi, rtol=1e-11)
    np.testing.assert_allclose(path.theta, expected.theta, rtol=1e-11)


def test_greedy_update_recovers_with_larger_budget() -> None:
    assert quadratic.run(QuadraticSettings(150, 1, budget=1400), 1).phi[-1] == pytest.approx(1.46, abs=0.005)


def test_both_cases_of_the_theorem() -> None:
    claims = quadratic.check_theorem(QuadraticSettings(150, 1), margin=1.0)
    assert [claim.holds for claim in claims] == [True, True]
    assert quadratic.failure_radius(QuadraticSettings(150, 1)) == pytest.approx(111.1, abs=0.05)
    assert quadratic.safe_horizon(QuadraticSettings(150, 1), margin=1.0) == 109
    near = quadratic.check_theorem(QuadraticSettings(100, 1), margin=1.0)
    assert [claim.holds for claim in near] == [None, None]


def test_violation_of_theorem_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(setting: QuadraticSettings, horizon: int) -> quadratic.Trajectory:
        path = quadratic.recursion(setting, horizon)
        return quadratic.Trajectory(path.steps, path.theta, -path.phi)

    monkeypatch.setattr(quadratic, "run", wrong)
    claims = quadratic.check_theorem(QuadraticSettings(150, 1), margin=1.0)
    assert [claim.holds for claim in claims] == [False, False]
