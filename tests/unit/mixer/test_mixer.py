"""What the mixer does to a training run."""

from __future__ import annotations

import copy
import gc
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import mixwell
from helpers.toy_problems import Point, mse, names, regression_batches, train, two_layer
from mixwell.simplex.updates import RoundContext


def make(model: nn.Module, domains: int = 3, *, lr: float = 0.05, **settings) -> mixwell.Mixer:
    settings.setdefault("horizon", 4)
    return mixwell.Mixer(model, torch.optim.SGD(model.parameters(), lr=lr), names(domains), **settings)


def test_step_equals_training_on_weighted_loss() -> None:
    batches, validation = regression_batches(0, steps=6)
    model = two_layer(0)
    plain = copy.deepcopy(model)
    weights = [0.6, 0.3, 0.1]
    mixer = make(model, weights=weights, horizon=6, clip_norm=0.5)
    train(mixer, model, batches, validation)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    for step in batches:
        optimizer.zero_grad()
        sum(w * mse(plain, b) for w, b in zip(weights, step.values(), strict=True)).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_weight_moves_to_domain_like_validation_set() -> None:
    batches, validation = regression_batches(1, steps=200, rows=32)
    model = two_layer(1)
    mixer = make(model, budget=200, horizon=None)
    train(mixer, model, batches, validation)
    assert mixer.horizon == 17
    assert [r.steps for r in mixer.rounds] == [17] * 11 + [13]
    assert [r.points for r in mixer.rounds] == [8] * 11 + [7]
    assert mixer.weights["d1"] > 0.7
    assert mixer.weights.average["d1"] > 0.5


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("shares", [[0.25] * 4, [0.5, 0.125, 0.125, 0.25]])
def test_micro_batches_average_to_full_batch(shares: list[float], kind) -> None:
    batches, validation = regression_batches(2, steps=4)
    whole, parts = two_layer(2), two_layer(2)
    reference, mixer = (
        mixwell.Mixer(model, kind(model.parameters(), lr=0.01), names(3), horizon=4)
        for model in (whole, parts)
    )
    train(reference, whole, batches, validation)
    for step in batches:
        start = 0
        for share in shares:  # interleaved: all domains' first parts, then all second parts, ...
            stop = start + round(16 * share)
            for name, (x, y) in step.items():
                with mixer.domain(name, fraction=share):
                    mse(parts, (x[start:stop], y[start:stop])).backward()
            start = stop
        mixer.step()
        if mixer.validation_due:
            for part in range(2):
                with mixer.validation(fraction=0.5):
                    mse(parts, (validation[0][part::2], validation[1][part::2])).backward()
    assert mixer.rounds[0].points == 2
    np.testing.assert_allclose(mixer.weights.log, reference.weights.log, rtol=1e-6)
    for a, b in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)


def test_absent_domain_is_unbiased() -> None:
    """With learning rate zero the trace is the plain sum of gradients, so its mean is known exactly."""
    model = Point(torch.tensor([1.0, -2.0], dtype=torch.float64))
    probability, steps = 0.3, 4000
    mixer = make(model, 2, lr=1e-12, horizon=steps, update=1.0, signal=_no_decay())
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        present = bool(torch.rand((), generator=generator) < probability)
        with mixer.domain(mixwell.DomainBatch("d0", absent=frozenset() if present else frozenset({"d1"}))):
            model.theta.sum().backward()
        if present:
            with mixer.domain(mixwell.DomainBatch("d1", probability=probability)):
                (3 * model.theta[0]).backward()
        mixer.step()
    with mixer.validation():
        (model.theta @ torch.tensor([1.0, 1.0], dtype=torch.float64)).backward()
    scores = mixer.rounds[-1].scores
    # d1's gradient is (3, 0) when it is there: mean 3 per step, standard error 3 sqrt(.7/.3/4000) = 0.072
    assert scores["d1"] / (1e-12 * steps) == pytest.approx(-3.0, abs=0.25)
    assert scores["d0"] / (1e-12 * steps) == pytest.approx(-2.0)


def _no_decay() -> mixwell.Hypergradient:
    return mixwell.Hypergradient(0.0, points=1, trace_every=1)


def test_warmup_keeps_weights_and_traces_empty() -> None:
    batches, validation = regression_batches(3, steps=14)
    model, late = two_layer(3), two_layer(3)
    mixer = make(model, horizon=4, warmup=6, budget=14)
    done = []
    for t, step in enumerate(batches):
        train(mixer, model, [step], validation)
        done.append((t + 1, len(mixer.rounds)))
    assert done[9 - 1] == (9, 0)
    assert done[10 - 1] == (10, 1)
    assert mixer.rounds[0].first_step == 6
    # The first round is that of a mixer that begins where the warm-up ends.
    other = make(late, horizon=4)
    train(make(late, horizon=1000), late, batches[:6], validation)
    train(other, late, batches[6:10], validation)
    np.testing.assert_allclose(
        list(mixer.rounds[0].scores.values()), list(other.rounds[0].scores.values()), rtol=1e-12
    )


def test_learning_rate_schedules_are_followed() -> None:
    """For a linear loss ``z_j = (sum of learning rates) * g_j``."""
    model = Point(torch.zeros(2, dtype=torch.float64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    mixer = mixwell.Mixer(model, optimizer, names(2), horizon=3, update=1.0, signal=_no_decay())
    for _ in range(3):
        for index in range(2):
            with mixer.domain(f"d{index}"):
                model.theta[index].backward()
        mixer.step()
        schedule.step()
    with mixer.validation():
        (2 * model.theta[0] + 5 * model.theta[1]).backward()
    scores = mixer.rounds[-1].scores
    total = 0.1 + 0.05 + 0.025
    assert list(scores.values()) == pytest.approx([-2 * total, -5 * total])


def test_skipped_contribution_is_counted() -> None:
    batches, validation = regression_batches(4, steps=4)
    model, clean = two_layer(4), two_layer(4)
    broken = {**batches[1], "d2": (torch.full_like(batches[1]["d2"][0], torch.nan), batches[1]["d2"][1])}
    mixer = make(model, on_nonfinite="skip")
    with pytest.warns(UserWarning, match=r"non-finite gradient of parameter 0.weight in 'd2' at step 1"):
        train(mixer, model, [batches[0], broken, *batches[2:]], validation)
    # Never zeros, never NaN: as if the domain had been absent in that step and nothing else had changed.
    reference = make(clean)
    for t, step in enumerate(batches):
        absent = frozenset({"d2"} if t == 1 else ())
        for name, batch in step.items():
            if (t, name) != (1, "d2"):
                with reference.domain(mixwell.DomainBatch(name, absent=absent)):
                    mse(clean, batch).backward()
        reference.step()
        if reference.validation_due:
            with reference.validation():
                mse(clean, validation).backward()
    np.testing.assert_array_equal(mixer.weights.log, reference.weights.log)
    assert mixer.skipped == {"d2": 1}
    assert mixer.rounds[0].skipped == {"d2": 1}


def test_fully_skipped_step_does_not_change_model() -> None:
    model = two_layer(5)
    before = copy.deepcopy(model.state_dict())
    batches, _ = regression_batches(5, steps=1)
    mixer = make(model, on_nonfinite="skip")
    with pytest.warns(UserWarning, match="non-finite"):
        for name, (x, y) in batches[0].items():
            with mixer.domain(name):
                mse(model, (x * torch.inf, y)).backward()
    mixer.step()
    assert mixer.steps_done == 1
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_nonfinite_validation_gradient_keeps_weights() -> None:
    model = two_layer(6)
    batches, validation = regression_batches(6, steps=8)
    mixer = make(model, on_nonfinite="skip", signal=mixwell.Hypergradient(points=1))
    train(mixer, model, batches[:3], validation)
    with pytest.warns(UserWarning, match="non-finite gradient .* in 'validation'"):
        train(mixer, model, batches[3:4], (validation[0] * torch.nan, validation[1]))
    assert mixer.weights.values == pytest.approx(1 / 3)
    assert mixer.rounds[0].step_size == 0.0
    assert mixer.rounds[0].skipped == {"validation": 1}
    train(mixer, model, batches[4:], validation)
    assert mixer.weights.values != pytest.approx(1 / 3)


def test_skipped_point_uses_mean_of_others() -> None:
    """Of the points after steps 2, 3 and 4 the second is not finite."""
    batches, validation = regression_batches(6, steps=8)
    found = {}
    for lost in ((), (3,), (2, 3, 4)):
        model = two_layer(6)
        signal = mixwell.Hypergradient(points=4, span=0.75)
        mixer = make(model, on_nonfinite="skip", signal=signal)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for t, step in enumerate(batches[:4], 1):
                wrong = torch.nan if t in lost else 1.0
                train(mixer, model, [step], (validation[0] * wrong, validation[1]))
        found[lost] = mixer.rounds[0]
    whole, some, none = (found[lost] for lost in ((), (3,), (2, 3, 4)))
    assert (whole.points, some.points, none.points) == (3, 2, 0)
    assert (whole.skipped, some.skipped, none.skipped) == ({}, {"validation": 1}, {"validation": 3})
    # Validation does not change the model, so that each point alone has the scores that it has among others.
    each = {}
    for t in (2, 4):
        model = two_layer(6)
        others = [s for s in (2, 3, 4) if s != t]
        mixer = make(model, on_nonfinite="skip", signal=mixwell.Hypergradient(points=4, span=0.75))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for number, step in enumerate(batches[:4], 1):
                wrong = torch.nan if number in others else 1.0
                train(mixer, model, [step], (validation[0] * wrong, validation[1]))
        each[t] = mixer.rounds[0].scores
    for name, score in some.scores.items():
        assert score == pytest.approx((each[2][name] + each[4][name]) / 2)
    assert len(some.noise) == 3
    assert none.scores == none.noise == {}
    assert none.new_weights == none.weights
    assert none.step_size == 0


def test_recorded_losses_are_in_records() -> None:
    model = two_layer(7)
    batches, validation = regression_batches(7, steps=4)
    mixer = make(model)
    seen, wanted = [], []
    for step in batches:
        for name, batch in step.items():
            with mixer.domain(name) as scope:
                loss = mse(model, batch)
                scope.record_loss(loss)
                loss.backward()
            if name == "d1":
                seen.append(loss.item())
        mixer.step()
        if mixer.validation_due:
            with mixer.validation() as scope:
                loss = mse(model, validation)
                scope.record_loss(loss)
                loss.backward()
            wanted.append(loss.item())
    record = mixer.rounds[-1]
    assert record.losses["d1"] == pytest.approx(np.mean(seen))
    assert len(wanted) == 2
    assert record.losses["validation"] == pytest.approx(np.mean(wanted))


def test_at_most_one_domain_gradient_is_alive() -> None:
    gc.freeze()  # so that the objects of the test session are not gone through each time
    size = 4099
    model = Point(torch.randn(size))
    mixer = make(model, 12, horizon=3, signal=mixwell.Hypergradient(traces=mixwell.SketchedTraces(64)))

    def alive() -> int:
        gc.collect()
        found = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
        return len({o.data_ptr() for o in found if o.numel() == size and o.is_floating_point()})

    counts, kept = [], []
    for _ in range(2):
        for index in range(12):
            with mixer.domain(f"d{index}") as scope:
                (model.theta * index).square().sum().backward()
                counts.append(alive())
            kept.append(scope)
        mixer.step()
    gc.unfreeze()
    # The parameter, the weighted sum, and the gradient of the one domain.
    assert 2 <= max(counts) <= 3


def test_validation_keeps_running_statistics() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 4)).double()
    batches, validation = regression_batches(8, steps=1)
    mixer = make(model, horizon=1)
    for name, batch in batches[0].items():
        with mixer.domain(name):
            mse(model, batch).backward()
    mixer.step()
    norm = model[1]
    assert isinstance(norm, nn.BatchNorm1d)
    before = copy.deepcopy(norm.state_dict())
    assert int(norm.state_dict()["num_batches_tracked"]) == 3
    with mixer.validation():
        mse(model, validation).backward()
    for name, value in norm.state_dict().items():
        assert torch.equal(value, before[name])


def test_training_beyond_budget_warns_once() -> None:
    model = two_layer(9)
    batches, validation = regression_batches(9, steps=9)
    mixer = make(model, horizon=2, budget=5)
    train(mixer, model, batches[:5], validation)
    with pytest.warns(UserWarning, match="after the budget of 5 steps") as warned:
        train(mixer, model, batches[5:], validation)
    assert len(warned) == 1
    assert [r.steps for r in mixer.rounds] == [2, 2, 1, 2, 2]


def test_single_domain_is_plain_training() -> None:
    batches, validation = regression_batches(10, steps=8, domains=1)
    model = two_layer(10)
    plain = copy.deepcopy(model)
    mixer = make(model, 1, constraints=[mixwell.Floor(0.1)])
    train(mixer, model, batches, validation)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    for step in batches:
        optimizer.zero_grad()
        mse(plain, step["d0"]).backward()
        optimizer.step()
    assert mixer.weights.last == {"d0": 1.0}
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a, b)


def test_nbytes_reports_memory() -> None:
    model = two_layer(11)
    count = sum(p.numel() for p in model.parameters())
    mixer = make(model)
    assert mixer.nbytes == 3 * count * 8
    batches, _ = regression_batches(0, steps=1)
    for name, batch in batches[0].items():
        with mixer.domain(name):
            mse(model, batch).backward()
    mixer.step()
    assert mixer.nbytes == (3 + 1) * count * 8
    sketched = make(model, signal=mixwell.Hypergradient(traces=mixwell.SketchedTraces(11)))
    assert sketched.nbytes == 3 * 11 * 8 + count + count * 8


def test_auto_step_size_recovers_from_large_first_round() -> None:
    """A first hypergradient 1000 times the later ones, pointing the wrong way, must not be the last word."""
    update = mixwell.MirrorDescent("auto")
    log = np.log(np.full(3, 1 / 3))
    for k in range(24):
        scores = np.array([-1000.0, 0.0, 0.0]) if k == 0 else np.array([0.0, -1.0, 0.0])
        log = log - update.next_step_size(scores, RoundContext(k, 24)) * scores
    assert np.argmax(log) == 1
    assert np.exp(log - np.logaddexp.reduce(log))[1] > 0.9


def test_short_last_round_moves_weights_less() -> None:
    update = mixwell.MirrorDescent("auto")
    scores = np.array([1.0, -1.0])
    whole = update.next_step_size(scores, RoundContext(0, 3)) * 2
    short = update.next_step_size(scores / 4, RoundContext(1, 3, fraction=1 / 4)) * 2 / 4
    assert short == pytest.approx(whole / 4)


@pytest.mark.parametrize("clip", [None, 0.05])
def test_before_and_after_step_equal_step(clip: float | None) -> None:
    batches, validation = regression_batches(3, steps=4)
    scores: list[dict[str, float]] = []
    models = two_layer(3), two_layer(3)
    for halves, model in zip((False, True), models, strict=True):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        own_clip = None if halves else clip
        signal = mixwell.Hypergradient(points=1)
        mixer = mixwell.Mixer(model, optimizer, names(3), horizon=4, signal=signal, clip_norm=own_clip)
        labels = [name for name, batch in batches[0].items() for _ in range(len(batch[0]))]
        for step in batches:
            rows = tuple(torch.cat(parts) for parts in zip(*step.values(), strict=True))
            with mixer.batch(labels) as batch:
                batch.weighted_loss((model(rows[0]) - rows[1]).square().mean(dim=1)).backward()
            if not halves:
                mixer.step()
                continue
            norm = None
            if clip is not None:
                norm = float(nn.utils.clip_grad_norm_(model.parameters(), clip))
            mixer.before_step(norm=norm, clip_norm=clip)
            optimizer.step()
            mixer.after_step()
        with mixer.validation():
            mse(model, validation).backward()
        scores.append(mixer.rounds[-1].scores)
    assert scores[0] == scores[1]
    assert all(torch.equal(a, b) for a, b in zip(*(m.parameters() for m in models), strict=True))


def test_before_and_after_step_order() -> None:
    batches, _ = regression_batches(0, steps=1)
    model = two_layer(0)
    mixer = make(model, clip_norm=1.0)
    with pytest.raises(RuntimeError, match=r"after_step\(\) without mixer.before_step\(\)"):
        mixer.after_step()
    for name, batch in batches[0].items():
        with mixer.domain(name):
            mse(model, batch).backward()
    with pytest.raises(ValueError, match=r"clipped to 2 by the trainer and to 1 by the mixer"):
        mixer.before_step(norm=3.0, clip_norm=2.0)
    mixer.before_step()
    with pytest.raises(RuntimeError, match=r"step\(\) after mixer.before_step\(\)"):
        mixer.step()
    mixer.after_step()
    assert mixer.steps_done == 1


def test_skipped_step_leaves_optimizer_without_gradients() -> None:
    model = two_layer(0)
    before = copy.deepcopy(list(model.parameters()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    mixer = mixwell.Mixer(model, optimizer, names(2), horizon=4, on_nonfinite="skip")
    with pytest.warns(UserWarning, match="non-finite loss"), mixer.batch([0, 1]) as batch:
        losses = model(torch.randn(2, 6).double()).square().mean(dim=1)
        batch.weighted_loss(losses * torch.tensor([1.0, float("nan")])).backward()
    mixer.before_step()
    optimizer.step()
    mixer.after_step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
    assert mixer.skipped == {"d1": 1}


def test_losses_in_bfloat16_do_not_round_the_weights() -> None:
    model = nn.Linear(2, 1).bfloat16()
    weights = {"a": 0.5017, "b": 0.4983}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    signal = mixwell.Hypergradient(traces=mixwell.ProjectedTraces())
    mixer = mixwell.Mixer(model, optimizer, ["a", "b"], horizon=2, signal=signal, weights=weights)
    with mixer.batch(["a", "b"]) as scope:
        losses = model(torch.ones(2, 2, dtype=torch.bfloat16)).squeeze(1)
        loss = scope.weighted_loss(losses)
        loss.backward()
    expected = sum(w * one for w, one in zip(weights.values(), losses.tolist(), strict=True))
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-6)
