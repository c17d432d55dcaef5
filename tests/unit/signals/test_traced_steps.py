"""Traces of some of a round's steps: which steps, with what weight, and that all others are plain training."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import mixwell
from helpers.toy_problems import names, two_layer
from mixwell.simplex.rounds import trace_interval, traced_steps

STEPS, EVERY, ROWS = 23, 4, 6
KINDS: dict[str, Callable[[], mixwell.Traces]] = {
    "dense": mixwell.DenseTraces,
    "projected": lambda: mixwell.ProjectedTraces(rank=64),  # of full rank, so that it is exact
    "sketched": lambda: mixwell.SketchedTraces(10_007),
}


@given(
    st.integers(0, 50),
    st.integers(1, 400),
    st.integers(1, 40) | st.just("auto"),
    st.none() | st.integers(1, 500),
)
def test_one_of_every_s_steps_is_traced(index: int, length: int, every: Any, window: int | None) -> None:
    found = traced_steps(index, length, every=every, window=window)
    allowed = range(length - min(window or length, length), length)
    blocks = [allowed[i : i + found.interval] for i in range(0, len(allowed), found.interval)]
    in_blocks = [sum(step in found for step in block) for block in blocks]
    assert all(
        count == 1 for block, count in zip(blocks, in_blocks, strict=True) if len(block) == found.interval
    )
    assert in_blocks[-1] <= 1
    assert sum(in_blocks) == len(found)
    assert list(found.steps) == sorted(found.steps)


def test_every_step_is_traced_equally_often() -> None:
    counts = np.zeros(50)
    for index in range(4000):
        counts[list(traced_steps(index, 50, every=7).steps)] += 7
    # A step is traced with probability 1/7: standard deviation of the mean sqrt(6 / 4000) = .039.
    np.testing.assert_allclose(counts / 4000, 1.0, atol=0.16)


@pytest.mark.parametrize(("length", "interval"), [(1, 1), (95, 1), (96, 2), (304, 5), (2000, 31)])
def test_about_64_steps_of_a_long_round_are_traced(length: int, interval: int) -> None:
    assert trace_interval(length) == interval
    assert len(traced_steps(3, length)) <= 96


def _data(steps: int) -> tuple[list[dict[str, tuple[Tensor, Tensor]]], tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    batches = [{name: (normal(ROWS, 6), normal(ROWS, 3)) for name in names(3)} for _ in range(steps)]
    return batches, (normal(ROWS, 6), normal(ROWS, 3))


def _row_losses(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean(dim=1)


def _step(
    mixer: mixwell.Mixer, model: nn.Module, step: dict[str, tuple[Tensor, Tensor]], *, mixed: bool
) -> None:
    if mixed:
        x, y = (torch.cat([part[i] for part in step.values()]) for i in range(2))
        with mixer.batch([name for name in step for _ in range(ROWS)]) as scope:
            scope.weighted_loss(_row_losses(model, (x, y))).backward()
    else:
        for name, batch in step.items():
            with mixer.domain(name):
                _row_losses(model, batch).mean().backward()
    mixer.step()


def _validate(mixer: mixwell.Mixer, model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    with mixer.validation():
        _row_losses(model, batch).mean().backward()


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def _mixer(model: nn.Module, traces: mixwell.Traces, lr: float = 0.05, gamma: float = 2.0) -> mixwell.Mixer:
    signal = mixwell.Hypergradient(gamma, traces, points=1, trace_every=EVERY)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return mixwell.Mixer(
        model, optimizer, names(3), horizon=STEPS, budget=2 * STEPS, signal=signal, update=1.0
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mixed", [False, True])
def test_scores_are_the_weighted_sum_over_the_traced_steps(kind: str, mixed: bool) -> None:
    """``h_j = -<grad L_V, sum over traced t of s eta (1 - eta gamma)^(T - 1 - t) g_j,t>``, computed by hand."""
    lr, gamma = 0.05, 2.0
    batches, validation = _data(STEPS)
    model, twin = _model(), _model()
    mixer = _mixer(model, KINDS[kind](), lr, gamma)
    plain = torch.optim.SGD(twin.parameters(), lr=lr)
    expected, traced = np.zeros(3), 0
    gradients: list[tuple[int, list[list[Tensor]]]] = []
    for t, step in enumerate(batches):
        parts = [
            torch.autograd.grad(_row_losses(twin, one).mean(), list(twin.parameters()))
            for one in step.values()
        ]
        if mixer.trace_due:
            gradients.append((t, [list(part) for part in parts]))
            traced += 1
        for parameter, *each in zip(twin.parameters(), *parts, strict=True):
            parameter.grad = sum(each) / 3  # type: ignore[assignment]
        plain.step()
        # The sketch takes one batch per domain; where nothing is traced a mixed batch will do.
        _step(mixer, model, step, mixed=mixed and (kind != "sketched" or not mixer.trace_due))
    assert traced == len(traced_steps(0, STEPS, every=EVERY)) in (5, 6)
    wanted = torch.autograd.grad(_row_losses(twin, validation).mean(), list(twin.parameters()))
    for t, parts in gradients:
        decay = EVERY * lr * (1 - lr * gamma) ** (STEPS - 1 - t)
        expected -= decay * np.array(
            [sum(float((v * g).sum()) for v, g in zip(wanted, p, strict=True)) for p in parts]
        )
    _validate(mixer, model, validation)
    np.testing.assert_allclose(list(mixer.rounds[0].scores.values()), expected, rtol=1e-9)


def test_steps_that_are_not_traced_are_plain_training() -> None:
    """No layer has a hook, and the parameters move as in an ordinary loop."""
    batches, _ = _data(STEPS)
    model = _model()
    mixer = _mixer(model, mixwell.ProjectedTraces())
    seen = []
    for step in batches:
        x = torch.cat([part[0] for part in step.values()])
        y = torch.cat([part[1] for part in step.values()])
        due = mixer.trace_due
        with mixer.batch([name for name in step for _ in range(ROWS)]) as scope:
            hooked = any(module._forward_hooks or "forward" in vars(module) for module in model.modules())
            seen.append((due, hooked))
            scope.weighted_loss(_row_losses(model, (x, y))).backward()
        mixer.step()
        if mixer.validation_due:
            break
    assert all(due == hooked for due, hooked in seen)
    assert {due for due, _ in seen} == {True, False}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stop", [7, 8, 9, 10])
def test_resuming_between_traced_steps_is_exact(kind: str, stop: int) -> None:
    batches, validation = _data(STEPS)
    found = []
    for resumed in (False, True):
        model = _model()
        mixer = _mixer(model, KINDS[kind]())
        for t, step in enumerate(batches):
            if resumed and t == stop:
                buffer = io.BytesIO()
                torch.save((mixer.state_dict(), model.state_dict()), buffer)
                buffer.seek(0)
                states = torch.load(buffer, weights_only=False)
                model = _model()
                model.load_state_dict(states[1])
                mixer = _mixer(model, KINDS[kind]())
                mixer.load_state_dict(states[0])
            _step(mixer, model, step, mixed=False)
        _validate(mixer, model, validation)
        found.append(mixer.rounds[0].scores)
    assert found[0] == found[1]


def test_traces_in_forward_mode_follow_every_step() -> None:
    with pytest.raises(ValueError, match="follow every step"):
        mixwell.Hypergradient(traces=mixwell.ForwardModeTraces(), trace_every=2)
    signal = mixwell.Hypergradient(traces=mixwell.ForwardModeTraces())
    assert len(signal.observed_steps(0, 1000)) == 1000


@pytest.mark.parametrize("every", [0, -1, 1.5])
def test_wrong_intervals_are_refused(every: Any) -> None:
    with pytest.raises(ValueError, match="trace_every must be a whole number"):
        mixwell.Hypergradient(trace_every=every)


def test_fixed_weights_trace_nothing() -> None:
    model = two_layer(0)
    mixer = mixwell.Mixer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        names(2),
        horizon=5,
        signal=mixwell.ConstantWeights(),
    )
    assert not mixer.trace_due


@pytest.mark.parametrize("nesterov", [False, True])
def test_steps_that_are_not_traced_decay_with_momentum(nesterov: bool) -> None:
    """With a constant gradient the mean over rounds is the score with every step traced."""

    def scores(every: int, rounds: int) -> list[float]:
        torch.manual_seed(0)
        model = nn.Linear(3, 1, bias=False).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=nesterov)
        signal = mixwell.Hypergradient(0.2, points=1, trace_every=every)
        mixer = mixwell.Mixer(model, optimizer, ["a", "b"], horizon=24, signal=signal, update=1e-9)
        x = torch.ones(1, 3).double()
        for _ in range(24 * rounds):
            for domain, factor in (("a", 1.0), ("b", 0.5)):
                with mixer.domain(domain):
                    (factor * model(x)).sum().backward()
            mixer.step()
            if mixer.validation_due:
                with mixer.validation():
                    model(x).sum().backward()
        return [record.scores["a"] for record in mixer.rounds]

    assert np.mean(scores(4, rounds=40)) == pytest.approx(scores(1, rounds=2)[-1], rel=0.05)
