"""The verdict on a run: both ways of being wrong, with simulated scores of which the truth is known."""

from __future__ import annotations

import json
import math
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from helpers.text_configs import write_config
from mixwell.training import command, config_io, metrics
from mixwell.training.agreement import State, measure_agreement, sign_flip_limit
from mixwell.training.run import Run
from mixwell.training.verdict import judge, read_verdict

RUNS = 400


def states(rounds: int, domains: int, mean: Any, *, seed: int = 0) -> dict[State, float]:
    """The fractions of the states over simulated runs with unit noise and ``mean(k)`` times a direction."""
    random = np.random.default_rng(seed)
    direction = np.zeros(domains)
    direction[0], direction[-1] = 1.0, -1.0
    signal = np.array([mean(k / (rounds - 1)) for k in range(rounds)])[:, None] * direction
    found = [
        measure_agreement(signal + random.normal(size=(rounds, domains)), np.ones((rounds, domains))).state
        for _ in range(RUNS)
    ]
    return {state: found.count(state) / RUNS for state in State}


@pytest.mark.parametrize("domains", [2, 4, 20])
@pytest.mark.parametrize("rounds", [8, 13, 40])
def test_noise_is_called_noise(rounds: int, domains: int) -> None:
    found = states(rounds, domains, lambda _: 0.0)
    assert found[State.MOVING] <= 0.08  # 5% by design
    assert found[State.NOISE] >= 0.85


@pytest.mark.parametrize("domains", [2, 4, 20])
@pytest.mark.parametrize("rounds", [8, 13, 40])
def test_constant_signal_is_not_called_noise(rounds: int, domains: int) -> None:
    found = states(rounds, domains, lambda _: 5.0)
    assert found[State.MOVING] >= 0.95


def test_signal_that_ends_is_called_settled() -> None:
    found = states(40, 4, lambda t: 6.0 if t < 0.5 else 0.0)
    assert found[State.SETTLED] >= 0.75
    assert found[State.NOISE] <= 0.02


def test_scale_and_common_level_do_not_matter() -> None:
    random = np.random.default_rng(1)
    scores = random.normal(size=(10, 3)) + np.array([2.0, 0.0, -2.0])
    one = measure_agreement(scores)
    other = measure_agreement(scores * random.uniform(1e-9, 1e9, size=(10, 1)))
    assert other.agreement == pytest.approx(one.agreement)
    assert measure_agreement(scores + 5.0).agreement == pytest.approx(one.agreement)
    assert one.trust is None


def run_of(
    scores: np.ndarray, weights: np.ndarray, *, method: str = "mixwell", **changes: Any
) -> tuple[Any, ...]:
    """``mixture.json``, lines of rounds and config of a run with these scores and weights."""
    names = [f"d{j}" for j in range(scores.shape[1])]
    by_name = [dict(zip(names, row.tolist(), strict=True)) for row in weights]
    rounds = [
        {
            "step": 10 * (k + 1),
            "scores": dict(zip(names, row.tolist(), strict=True)),
            "noise": dict.fromkeys(names, 1.0),
            "weights": by_name[k],
            "new_weights": by_name[k + 1],
        }
        for k, row in enumerate(scores)
    ]
    average = dict(zip(names, weights[:-1].mean(axis=0).tolist(), strict=True))
    mixture = {
        "domains": names,
        "weights": {"last": by_name[-1], "average": average},
        "history": [{"step": 10 * k, "weights": one} for k, one in enumerate(by_name)],
        "method": method,
        "horizon": 10,
        "budget": 10 * len(scores),
        "steps_done": 10 * len(scores),
        "finished": True,
        **changes,
    }
    return (
        mixture,
        rounds,
        {"mixer": {"weights": "uniform"}, "batch": {"rows": 8}, "domains": {}},
        Path("runs/a b"),
    )


def follow(scores: np.ndarray, rate: float) -> np.ndarray:
    """Weights of mirror descent along scores."""
    log = -rate * np.vstack([np.zeros(scores.shape[1]), np.cumsum(scores, axis=0)])
    log -= log.max(axis=1, keepdims=True)
    return np.exp(log) / np.exp(log).sum(axis=1, keepdims=True)


def test_prediction_of_noise_covers_zero_and_of_signal_does_not() -> None:
    random = np.random.default_rng(3)
    covered = 0
    signs: list[int] = []
    for _ in range(200):
        noise = random.normal(size=(12, 4))
        predicted = judge(*run_of(noise, follow(noise, 0.3))).predicted
        assert predicted is not None
        covered += 0.0 in predicted.interval
        signs.append(predicted.sign)
    assert 0.88 <= covered / 200 <= 0.99  # in-sample effects of the last weights would nearly never cover it
    assert signs.count(-1) / 200 <= 0.08  # 5% by design
    assert signs.count(1) / 200 <= 0.08
    scores = random.normal(size=(12, 4)) + np.array([6.0, 0.0, 0.0, -6.0])
    predicted = judge(*run_of(scores, follow(scores, 0.05))).predicted
    assert predicted is not None
    assert predicted.interval.high < 0
    assert predicted.sign == -1


def test_right_mixture_is_named() -> None:
    """Noise, a signal that ends after few rounds, and weights that are best as they were and overshoot."""
    random, size = np.random.default_rng(6), (16, 4)
    first = np.zeros(size)
    first[:7] = 8 * np.array([-1.0, 0.0, 0.0, 1.0])
    named: dict[str, list[str]] = {"noise": [], "early": [], "overshoot": []}
    for _ in range(100):
        scores = {"noise": random.normal(size=size), "early": first + random.normal(size=size)}
        weights = {kind: follow(one, 0.1) for kind, one in scores.items()}
        # Steps that are too long for a loss with its least value at equal weights.
        weights["overshoot"] = np.full((17, 4), 0.25) + 0.1 * random.uniform(-1, 1, size=(17, 1)) * np.array(
            [1, -1, 0, 0]
        )
        weights["overshoot"][0] = 0.25
        scores["overshoot"] = 40 * (weights["overshoot"][:-1] - 0.25) + random.normal(size=size)
        for kind, one in scores.items():
            named[kind].append(judge(*run_of(one, weights[kind])).mixture)

    def fraction(kind: str, words: str) -> float:
        return sum(words in text for text in named[kind]) / len(named[kind])

    assert fraction("noise", "the average over the run") <= 0.08  # 5% by design
    assert fraction("noise", "does not decide") >= 0.85
    assert fraction("early", "the average over the run") >= 0.9
    assert fraction("overshoot", "the initial weights, uniform") >= 0.9
    assert fraction("overshoot", "the average over the run") == 0.0


@pytest.mark.parametrize("count", [1, 4, 5, 12, 30])
def test_limit_of_random_signs(count: int) -> None:
    """Compared with all patterns of signs of values of which the first are the largest."""
    values = np.array([100.0, 90.0, 80.0, *np.linspace(1.0, 0.1, 27)])[:count]
    limit = sign_flip_limit(values)
    if count < 5:
        assert limit == math.inf  # even equal signs are more frequent by chance
        return
    patterns = np.array(list(product((1.0, -1.0), repeat=min(count, 12))))
    sums = patterns @ values[:12]
    rest = np.random.default_rng(1).choice((1.0, -1.0), size=(len(sums), max(count - 12, 0))) @ values[12:]
    assert np.mean((sums + rest) / count >= limit) == pytest.approx(0.05, abs=0.02)


def test_unfinished_run_and_too_few_rounds_name_no_mixture() -> None:
    scores = np.random.default_rng(7).normal(size=(12, 3)) + np.array([9.0, 0.0, -9.0])
    stopped = judge(*run_of(scores, follow(scores, 0.02), finished=False, steps_done=70))
    assert stopped.mixture.startswith("Mixture after 70 of 120 steps: ")
    few = judge(*run_of(scores[:1], follow(scores[:1], 0.02)))
    assert "does not decide" in few.mixture
    assert "Rounds with scores: 1;" in few.settled


def test_words_and_commands_fit_the_state() -> None:
    random = np.random.default_rng(4)
    noise = random.normal(size=(12, 3))
    verdict = judge(*run_of(noise, follow(noise, 0.1)), validation_rows=16)
    assert verdict.state is State.NOISE
    assert "No common direction" in verdict.settled
    assert "does not decide" in verdict.mixture
    assert (
        verdict.command
        == "mixwell run 'runs/a b/config.yaml' --set mixer.validation_rows=64 --out 'runs/a b-more-validation'"
    )
    # Scores far beyond their standard errors that reverse at every round: more validation rows would not help.
    reversing = 20 * random.normal(size=(12, 3))
    verdict = judge(*run_of(reversing, follow(reversing, 0.1)), validation_rows=16)
    assert verdict.state is State.NOISE
    assert verdict.command == "mixwell compare 'runs/a b/config.yaml' --methods mixwell,uniform --seeds 5"
    signal = noise + np.array([9.0, 0.0, -9.0])
    moving = judge(*run_of(signal, follow(signal, 0.02)))
    assert moving.state is State.MOVING
    assert moving.command == "mixwell run 'runs/a b/config.yaml' --set steps=240 --out 'runs/a b-240-steps'"
    assert "average over the run" in moving.mixture
    # At the edge of the simplex the scores go on agreeing, and nothing moves.
    edge = judge(*run_of(signal, follow(signal, 20.0)))
    assert edge.state is State.SETTLED
    assert "edge" in edge.settled
    assert edge.command == "mixwell compare 'runs/a b/config.yaml' --methods mixwell,uniform --seeds 5"
    assert judge(*run_of(signal, follow(signal, 0.02), finished=False)).command == "mixwell resume 'runs/a b'"
    few = judge(*run_of(signal[:3], follow(signal[:3], 0.02)))
    assert few.state is State.TOO_FEW
    assert "not known" in few.settled


def test_what_is_not_known_is_said() -> None:
    scores = np.random.default_rng(5).normal(size=(12, 3)) + np.array([9.0, 0.0, -9.0])
    mixture, rounds, *rest = run_of(scores, follow(scores, 0.02), method="doge")
    for line in rounds:
        line["noise"] = {}
    verdict = judge(mixture, rounds, *rest)
    assert verdict.predicted is None
    assert "no prediction" in verdict.effect
    assert "no standard errors" in verdict.settled
    assert "not derivatives of the validation loss" in verdict.settled
    fixed = judge(*run_of(scores, np.full((13, 3), 1 / 3), method="fixed"))
    assert fixed.state is None
    assert "--methods mixwell,uniform" in fixed.command


def test_verdict_is_printed_after_a_run_and_its_command_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MIXWELL_CACHE", str(tmp_path / "cache"))
    path = write_config(tmp_path)
    command.run(path, out=tmp_path / "run", overrides=[], after=None)
    printed = capsys.readouterr().out
    assert "Mixture to use: " in printed
    line = next(one for one in printed.splitlines() if one.startswith("Next: "))
    assert f"mixwell run {tmp_path}/run/config.yaml --set steps=" in line
    steps = line.rpartition("--set ")[2].partition(" ")[0]
    again = config_io.read_config(tmp_path / "run" / "config.yaml", [steps])
    Run(again, tmp_path / "again", console=Console(quiet=True)).load()


@pytest.mark.parametrize("key", ["weights", "new_weights"])
@pytest.mark.parametrize("value", [None, "absent"])
def test_rounds_of_other_domains_are_named(key: str, value: str | None, tmp_path: Path) -> None:
    config = config_io.read_config(write_config(tmp_path))
    Run(config, tmp_path / "run", console=Console(quiet=True)).start()
    path = tmp_path / "run" / metrics.FILE
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    changed = next(line for line in lines if line["kind"] == "round")[key]
    if value is None:
        changed["letters"] = None
    else:
        del changed["letters"]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ValueError, match=f"the {key} of round 0 are not those of the domains"):
        read_verdict(tmp_path / "run")
