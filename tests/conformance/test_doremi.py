"""DoReMi by its published rule (Xie et al. 2023, Algorithm 1), its dialects, and the runs that it trains first."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch

import mixwell
from helpers.scripted_training import Point, Script, names, play
from mixwell import methods
from mixwell.methods import MethodContext, Outcome
from mixwell.signals.losses import ExcessLosses
from mixwell.simplex.updates import MirrorDescent, UniformSmoothing


def published(excess, eta: float, c: float, horizon: int = 1, absent: str = "last"):
    """``excess[t][k]``: lam of domain k in step t, NaN where it is not in it. Uniform weights at the beginning."""
    count = len(excess[0])
    alpha, lam, total = np.full(count, 1 / count), np.zeros(count), np.zeros(count)
    path = [alpha]
    for t, step in enumerate(excess, start=1):
        for k in range(count):
            if not np.isnan(step[k]):
                lam[k] = step[k]
            elif absent == "zero":
                lam[k] = 0.0
            total[k] += lam[k]
        if t % horizon == 0 or t == len(excess):
            alpha = alpha * np.exp(eta * total)
            alpha = (1 - c) * alpha / alpha.sum() + c / count
            path.append(alpha)
            total = np.zeros(count)
    return np.array(path)


def referred(script: Script):
    assert script.reference is not None
    return script.reference


def rule(eta: float = 1.0, c: float = 1e-3) -> UniformSmoothing:
    return UniformSmoothing(MirrorDescent(eta), c)


def test_one_step_matches_hand_computation() -> None:
    # Excess (1, -1) is (1, 0) after clipping; with eta = log 3 weights of 3 : 1; a fifth is shared out evenly.
    script = Script(np.array([[2.0, 1.0]]), reference=np.array([[1.0, 2.0]]))
    played = play(script, ExcessLosses(), rule(float(np.log(3)), 0.2))
    np.testing.assert_allclose(played.weights[-1], [0.8 * 0.75 + 0.1, 0.8 * 0.25 + 0.1], rtol=1e-14)


@pytest.mark.parametrize("horizon", [1, 3])
@pytest.mark.parametrize("absent", ["last", "zero"])
def test_golden_trajectory(horizon: int, absent) -> None:
    script = Script.random(1, steps=8)
    script.losses[0, 2] = script.losses[3, 0] = script.losses[4, 0] = np.nan
    played = play(script, ExcessLosses(absent=absent), rule(), horizon=horizon)
    excess = np.maximum(0, script.losses - referred(script))
    expected = published(excess, 1.0, 1e-3, horizon, absent)
    np.testing.assert_allclose(played.weights, expected, rtol=1e-12)


def token_steps(steps: int = 6, domains: int = 3):
    """By step and domain the losses of 4 rows of 5 tokens, and those of the reference."""
    random = np.random.default_rng(2)
    return random.uniform(0.5, 2.0, (2, steps, domains, 4, 5))


def excess_of(losses, reference, clip: str):
    apart = losses - reference
    if clip == "element":
        return np.maximum(0, apart).mean(axis=(-1, -2))
    return np.maximum(0, apart.mean(axis=(-1, -2))) if clip == "domain" else apart.mean(axis=(-1, -2))


def token_mixer(signal: ExcessLosses, horizon: int = 2, steps: int = 6) -> tuple[Point, mixwell.Mixer]:
    model = Point(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mixer = mixwell.Mixer(
        model, optimizer, names(3), budget=steps, horizon=horizon, signal=signal, update=rule(0.7, 0.01)
    )
    return model, mixer


def feed(model: Point, mixer: mixwell.Mixer, losses, reference, way: str) -> None:
    for own, other in zip(losses, reference, strict=True):
        values, other = torch.tensor(own) + 0 * model.theta.sum(), torch.tensor(other)
        if way == "mixed":
            order = torch.from_numpy(np.random.default_rng(0).permutation(12))
            labels = np.repeat([0, 1, 2], 4)[order]
            with mixer.batch(labels) as batch:
                rows = values.flatten(0, 1)[order], other.flatten(0, 1)[order]
                batch.weighted_loss(rows[0], reference=rows[1]).backward()
        else:
            for j, name in enumerate(names(3)):
                for part in (slice(0, 1), slice(1, 4)):
                    with mixer.domain(name, fraction=(part.stop - part.start) / 4) as scope:
                        values[j, part].mean().backward(retain_graph=True)
                        scope.record_loss(values[j, part], reference=other[j, part])
        mixer.step()


@pytest.mark.parametrize("clip", ["element", "domain", "none"])
@pytest.mark.parametrize("way", ["mixed", "parts of domains"])
def test_clipping_per_token_or_domain(clip, way: str) -> None:
    losses, reference = token_steps()
    model, mixer = token_mixer(ExcessLosses(clip))
    feed(model, mixer, losses, reference, way)
    expected = published(excess_of(losses, reference, clip), 0.7, 0.01, horizon=2)
    np.testing.assert_allclose(mixer.weights.history, expected, rtol=1e-12)


def test_variants_give_different_weights() -> None:
    losses, reference = token_steps()
    found = [excess_of(losses, reference, clip) for clip in ("element", "domain", "none")]
    assert all(np.abs(a - b).max() > 0.01 for a, b in [found[:2], found[1:], found[::2]])


@pytest.mark.parametrize("stop", [1, 2, 3, 5])
def test_resume_is_bit_for_bit(stop: int, tmp_path: Path) -> None:
    losses, reference = token_steps()
    model, whole = token_mixer(ExcessLosses(), horizon=4)
    feed(model, whole, losses, reference, "mixed")
    model, first = token_mixer(ExcessLosses(), horizon=4)
    feed(model, first, losses[:stop], reference[:stop], "mixed")
    first.save(tmp_path / "state")
    kept = copy.deepcopy(model.state_dict())
    model, resumed = token_mixer(ExcessLosses(), horizon=4)
    model.load_state_dict(kept)
    resumed.load(tmp_path / "state")
    feed(model, resumed, losses[stop:], reference[stop:], "mixed")
    np.testing.assert_array_equal(resumed.weights.log, whole.weights.log)
    assert resumed.rounds == whole.rounds


def test_last_excess_loss_is_restored() -> None:
    """A domain that is absent after the stop counts with what it was seen with before."""

    def run(stop: int | None) -> mixwell.Mixer:
        def make() -> tuple[Point, mixwell.Mixer]:
            model = Point(1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            settings = {"budget": 4, "horizon": 2}
            return model, mixwell.Mixer(
                model, optimizer, ["a", "b"], signal=ExcessLosses(), update=rule(), **settings
            )

        model, mixer = make()
        for t, present in enumerate(["ab", "a", "a", "a"]):
            if t == stop:
                saved = mixer.state_dict()
                model, mixer = make()
                mixer.load_state_dict(saved)
            for name in present:
                probability, absent = 0.5 if name == "b" else 1.0, frozenset("ab") - set(present)
                with mixer.domain(mixwell.DomainBatch(name, probability=probability, absent=absent)) as scope:
                    (0 * model.theta.sum()).backward()
                    scope.record_loss(torch.tensor(2.0 if name == "b" else 1.5), reference=1.0)
            mixer.step()
        return mixer

    expected = published([[0.5, 1.0]] + [[0.5, np.nan]] * 3, 1.0, 1e-3, horizon=2)
    for stop in (None, 1, 2, 3):
        np.testing.assert_allclose(run(stop).weights.history, expected, rtol=1e-12)


def test_missing_reference_raises() -> None:
    model, mixer = token_mixer(ExcessLosses())
    with pytest.raises(ValueError, match=r"needs the losses of a reference model: scope\.record_loss"):
        with mixer.domain("d0") as scope:
            model.theta.sum().backward()
            scope.record_loss(torch.ones(2))
    with pytest.raises(ValueError, match=r"needs the losses of a reference model: batch\.weighted_loss"):
        with mixer.batch([0, 1, 2]) as batch:
            batch.weighted_loss(torch.ones(3) + 0 * model.theta.sum()).backward()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_nonfinite_reference_is_not_zero(bad: float) -> None:
    model, mixer = token_mixer(ExcessLosses())
    with pytest.raises(
        FloatingPointError, match=r"domain 'd1' less those of the reference model are not finite"
    ):
        with mixer.batch([0, 1, 2]) as batch:
            other = torch.tensor([1.0, bad, 1.0])
            batch.weighted_loss(torch.ones(3) + 0 * model.theta.sum(), reference=other).backward()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"clip": "token"}, "clip must be 'element', 'domain' or 'none', got 'token'"),
        ({"absent": "mean"}, "absent must be 'last' or 'zero', got 'mean'"),
        ({"objective": "both"}, "objective must be 'losses' or 'excess', got 'both'"),
    ],
)
def test_invalid_arguments_raise(settings, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ExcessLosses(**settings)


# ------------------------------------------------------------------------------------------------ the method


METHOD = methods.find("doremi")


def task(**options) -> MethodContext:
    return MethodContext(
        domains=("a", "b"),
        rows={"a": 10, "b": 30},
        batch_rows=8,
        steps=100,
        weights={"a": 1.0, "b": 3.0},
        options=METHOD.options(**options),
    )


def outcome(folder: str) -> Outcome:
    return Outcome(reference=folder, loss=1.0, average={"a": 0.25, "b": 0.75})


def staged(one: MethodContext):
    """The trials that were asked for, and what the stages returned."""
    assert METHOD.stages is not None
    stages, trials = METHOD.stages(one), []
    try:
        asked = next(stages)
        while True:
            trials += asked
            asked = stages.send([outcome(f"stages/{trial.name}") for trial in asked])
    except StopIteration as end:
        return trials, end.value


def test_recipe_matches_rule() -> None:
    recipe = METHOD.recipe(task(eta=0.5, smoothing=0.1, clip="domain", absent="zero", objective="excess"))
    script = Script.random(7, steps=5, domains=2)
    script.losses[2, 1] = np.nan
    played = play(script, recipe.signal, recipe.update)
    excess = np.maximum(0, script.losses - referred(script))
    np.testing.assert_allclose(played.weights, published(excess, 0.5, 0.1, absent="zero"), rtol=1e-12)
    assert recipe.signal.requirements.objective == "excess"
    official = METHOD.recipe(task())
    assert official.signal.requirements.objective == "losses"
    assert repr(official.signal) == "ExcessLosses(clip='element', absent='last', objective='losses')"
    assert repr(official.update) == "UniformSmoothing(MirrorDescent(1.0), 0.001)"
    assert METHOD.horizon is not None
    assert METHOD.horizon(100) == 1
    assert official.weights == {"a": 1.0, "b": 1.0}  # whatever the reference is trained with


def test_reference_and_proxy_give_average_weights() -> None:
    trials, last = staged(task(eta=0.5, proxy_steps=40, proxy_model={"width": 8}))
    reference, proxy = trials
    assert (reference.name, reference.steps, reference.model) == ("reference", 100, {"width": 8})
    assert reference.mixer == {"method": "fixed", "weights": {"a": 1.0, "b": 3.0}, "options": {}}
    assert (proxy.name, proxy.steps, proxy.model) == ("proxy", 40, {"width": 8})
    assert proxy.mixer["method"] == "doremi"
    options = METHOD.options(**proxy.mixer["options"])
    assert (options.reference, options.transfer, options.eta) == (
        str(Path("stages/reference")),
        False,
        0.5,
    )
    assert last == {"method": "fixed", "weights": {"a": 0.25, "b": 0.75}, "options": {}}
    # The proxy is a run of its own, which trains nothing more before.
    assert staged(task(**proxy.mixer["options"])) == ([], {})


def test_without_transfer_weights_are_learned_in_run() -> None:
    [reference], last = staged(task(transfer=False, reference_steps=30, clip="none"))
    assert (reference.name, reference.steps) == ("reference", 30)
    options = METHOD.options(**last["options"])
    assert (options.reference, options.transfer) == (str(Path("stages/reference")), False)
    assert options.clip == "none"


def test_existing_reference_is_reused() -> None:
    [proxy], last = staged(task(reference="runs/old"))
    assert proxy.mixer["options"]["reference"] == "runs/old"
    assert last["method"] == "fixed"
    assert staged(task(reference="runs/old", transfer=False)) == ([], {})


@pytest.mark.parametrize(
    ("options", "before", "per_step"),
    [
        ({}, 100 + 100 * 4 / 3, 0.0),
        ({"reference_steps": 20, "proxy_steps": 30}, 20 + 30 * 4 / 3, 0.0),
        ({"reference": "x", "proxy_steps": 30}, 30 * 4 / 3, 0.0),
        ({"transfer": False}, 100.0, 1 / 3),
        ({"transfer": False, "reference": "x"}, 0.0, 1 / 3),
    ],
)
def test_compute_cost(options, before: float, per_step: float) -> None:
    extra = METHOD.extra(task(**options))
    assert extra.before == pytest.approx(before)
    assert (extra.per_step, extra.per_round) == (per_step, 0.0)
