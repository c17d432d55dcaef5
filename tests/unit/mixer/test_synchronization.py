"""No step waits for an accelerator: steps on the meta device, where a number that is read raises.

A tensor there has no values, so that ``item()``, ``float()``, ``bool()``, ``tolist()``, ``cpu()`` and operations
with a shape that depends on values raise: all for which the host waits for an accelerator. Only what is read once
is not: the first batch is verified, and the first gradient of a run shows the leading directions. What is read
later is tested on the CPU, where the same numbers can be read at once.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mixwell
from mixwell.hypergradient.capture.hooks import LayerHooks
from mixwell.mixer.readings import MOST, Readings
from mixwell.training.models.gpt import Gpt

LABELS = [0, 0, 1, 2, 2, 2]
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
    "steps on the device": lambda model: steps_on_device(torch.optim.AdamW(model.parameters(), lr=0.01)),
}
TRACES: dict[str, Callable[[], mixwell.Traces]] = {
    "projected": lambda: mixwell.ProjectedTraces(4),
    "dense": mixwell.DenseTraces,
}


def steps_on_device(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Keep the number of steps on the meta device between steps, as fused optimizers keep it on theirs."""
    kept: dict[int, Tensor] = {}

    def before(*_: Any) -> None:
        for index, state in enumerate(optimizer.state.values()):
            state["step"] = kept[index]

    def after(*_: Any) -> None:
        for index, state in enumerate(optimizer.state.values()):
            kept[index], state["step"] = state["step"], state["step"].to("meta")

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
    return optimizer


def new_model(device: str) -> nn.Module:
    torch.manual_seed(0)
    return Gpt(11, context=8, layers=2, heads=2, width=8).to(device)


def rows(device: str, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 11, (6, 8), generator=generator).to(device)


def train(mixer: mixwell.Mixer, model: nn.Module, device: str, *, steps: int, mixed: bool = True) -> None:
    for step in range(steps):
        x = rows(device, step)
        if mixed:
            with mixer.batch(LABELS) as batch:
                batch.weighted_loss(model(x).square().flatten(1).mean(1)).backward()
        else:
            for name, part in zip("abc", x.split(2), strict=True):
                with mixer.domain(name) as scope:
                    loss = model(part).square().mean()
                    scope.record_loss(loss)
                    loss.backward()
        mixer.step()


def leave_out_first_batch(traces: Any, parameters: Any) -> None:
    """Leave out what is read once in a run."""
    if isinstance(traces, mixwell.ProjectedTraces):
        traces.check = False
        for projection in traces._projections.each:
            projection.aligned = True
    else:
        traces._hooks = LayerHooks(parameters, unsupported="per_domain", check=False)


@pytest.mark.parametrize("every", [1, 3, 400], ids=["every step traced", "some", "none"])
@pytest.mark.parametrize("clip_norm", [None, 1.0])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("mixed", [True, False])
@pytest.mark.parametrize("traces", TRACES)
def test_steps_wait_for_nothing(traces: str, mixed: bool, optimizer: str, clip_norm: Any, every: int) -> None:
    if traces == "dense" and clip_norm is not None and every < 400:
        pytest.skip("dense traces read the norm of a clipped gradient in steps that are traced")
    model = new_model("meta")
    signal = mixwell.Hypergradient(traces=TRACES[traces](), trace_every=every)
    mixer = mixwell.Mixer(
        model, OPTIMIZERS[optimizer](model), list("abc"), horizon=400, signal=signal, clip_norm=clip_norm
    )
    mixer._round.begin_step()  # the round, and with it the projections
    leave_out_first_batch(signal.traces, mixer._parameters)
    train(mixer, model, "meta", steps=12, mixed=mixed)
    assert mixer.steps_done == 12
    traced = sum(step < 12 for step in signal.observed_steps(0, 400).steps)
    assert traced == {1: 12, 3: 4, 400: 0}[every]


def test_the_device_of_the_test_refuses_to_be_read() -> None:
    tensor = torch.zeros(2, device="meta")
    for read in (float, bool, torch.Tensor.tolist, torch.Tensor.cpu, torch.nonzero):
        with pytest.raises((RuntimeError, NotImplementedError)):
            read(tensor.sum() if read in (float, bool) else tensor)


# What is read later, with real numbers.


def later(mixer: mixwell.Mixer) -> mixwell.Mixer:
    mixer._round.readings.at_once = False
    return mixer


def new_mixer(model: nn.Module, clip_norm: float | None, **settings: Any) -> mixwell.Mixer:
    signal = mixwell.Hypergradient(traces=mixwell.ProjectedTraces(4), trace_every=2, points=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return mixwell.Mixer(
        model, optimizer, list("abc"), horizon=9, signal=signal, clip_norm=clip_norm, update=1.0, **settings
    )


@pytest.mark.parametrize("clip_norm", [None, 0.05])
@pytest.mark.parametrize("mixed", [True, False])
def test_numbers_that_are_read_later_are_the_same(mixed: bool, clip_norm: float | None) -> None:
    found = []
    for delayed in (False, True):
        model = new_model("cpu")
        mixer = new_mixer(model, clip_norm)
        mixer = later(mixer) if delayed else mixer
        while len(mixer.rounds) < 2:
            train(mixer, model, "cpu", steps=1, mixed=mixed)
            if mixer.validation_due:
                with mixer.validation():
                    model(rows("cpu", 99)).square().mean().backward()
        found.append((model, mixer.rounds))
    for a, b in zip(found[0][0].parameters(), found[1][0].parameters(), strict=True):
        torch.testing.assert_close(a, b)
    for one, other in zip(found[0][1], found[1][1], strict=True):
        assert other.losses == pytest.approx(one.losses, rel=1e-5)
        # The decay has the factor of clipping as it was last read.
        assert other.scores == pytest.approx(one.scores, rel=1e-4)


@pytest.mark.parametrize("mixed", [True, False])
def test_what_is_not_finite_ends_training_when_it_is_read(mixed: bool) -> None:
    model = new_model("cpu")
    mixer = later(new_mixer(model, None))
    train(mixer, model, "cpu", steps=2, mixed=mixed)
    if mixed:
        with mixer.batch(LABELS) as batch:
            losses = model(rows("cpu")).square().flatten(1).mean(1)
            batch.weighted_loss(losses * torch.tensor([1, 1, float("nan"), 1, 1, 1])).backward()
    else:
        for name in "abc":
            with mixer.domain(name):
                (model(rows("cpu")).square().mean() * (float("nan") if name == "b" else 1)).backward()
    mixer.step()
    message = r"non-finite .* step 2, which was seen at step 3: .* Load a state from before step 2"
    with pytest.raises(FloatingPointError, match=message):
        mixer.state_dict()
    with pytest.raises(RuntimeError, match="load a state"):
        train(mixer, model, "cpu", steps=1, mixed=mixed)


def test_loading_a_state_undoes_steps_whose_numbers_are_not_read() -> None:
    """A state of another run is refused, and leaves them to be read."""
    model = new_model("cpu")
    mixer = later(new_mixer(model, None))
    train(mixer, model, "cpu", steps=2)
    trained = model, mixer._step._optimizer
    before, others = copy.deepcopy(mixer.state_dict()), [copy.deepcopy(one.state_dict()) for one in trained]
    with mixer.batch(LABELS) as batch:
        batch.weighted_loss(model(rows("cpu")).square().flatten(1).mean(1) * float("nan")).backward()
    mixer.step()
    with pytest.raises(ValueError, match="another run"):
        mixer.load_state_dict({**before, "settings": {**before["settings"], "horizon": 11}})
    assert mixer._round.readings._kept
    for one, state in zip(trained, others, strict=True):
        one.load_state_dict(state)
    mixer.load_state_dict(before)
    train(mixer, model, "cpu", steps=1)
    mixer.state_dict()


def test_with_skipping_every_number_is_read_at_once() -> None:
    assert Readings(torch.device("meta"), at_once=True).at_once
    model = new_model("meta")
    mixer = new_mixer(model, None, on_nonfinite="skip")
    assert mixer._round.readings.at_once


def test_kept_readings_are_bounded_and_in_order() -> None:
    readings, found = Readings(torch.device("meta"), at_once=False), list[float]()
    for number in range(MOST):
        assert not found
        readings.add(torch.tensor([float(number)]), found.extend)
    assert found == list(range(MOST))
