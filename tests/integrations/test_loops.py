"""Plain loops and Accelerate, mixing."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor, nn
from torch.utils.data import DataLoader

import mixwell
from helpers.regression_data import SOURCES, draw
from mixwell.data.mixture_dataset import MixtureDataset
from mixwell.integrations.loops import MixerLoop


@pytest.fixture(autouse=True)
def accelerate_state() -> Iterator[None]:
    """Accelerate keeps its settings for the whole process."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def row_losses(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return (model(batch["x"]) - batch["y"]).square().mean(dim=1)


def new_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def new_loader(**settings: Any) -> mixwell.MixtureLoader:
    return mixwell.MixtureLoader({name: draw(name, 90) for name in SOURCES}, **{"batch_size": 12, **settings})


def new_loop(
    accelerator: Accelerator | None = None, *, loader: Any = None, **settings: Any
) -> tuple[MixerLoop, nn.Module, Any]:
    model: Any = new_model()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    if loader is None:
        loader = DataLoader(MixtureDataset({name: draw(name, 90) for name in SOURCES}), batch_size=12)
        if accelerator is not None:
            loader = accelerator.prepare(loader)
    if accelerator is not None:
        model, optimizer = accelerator.prepare(model, optimizer)
    validation = DataLoader(draw("shifted", 60), batch_size=20)
    chosen = {"budget": 40, "horizon": 10, **settings}
    return MixerLoop(loader, model, optimizer, validation, row_losses, mixer=chosen), model, optimizer


def run(loop: MixerLoop, model: nn.Module, optimizer: Any, steps: int | None = None) -> None:
    for batch in loop:
        loop.weighted_loss(row_losses(model, batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if loop.mixer.steps_done == steps:
            break


def assert_same_training(
    mixer: mixwell.Mixer, own: nn.Module, other_mixer: mixwell.Mixer, other: nn.Module
) -> None:
    for a, b in zip(mixer.rounds, other_mixer.rounds, strict=True):
        np.testing.assert_allclose(list(a.scores.values()), list(b.scores.values()), rtol=1e-5)
    for one, twin in zip(own.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, twin, rtol=1e-6, atol=1e-7)


def test_learns_weights_and_stops_at_budget() -> None:
    loop, model, optimizer = new_loop(budget=120)
    run(loop, model, optimizer)
    assert loop.mixer.steps_done == 120
    assert loop.mixer.weights["shifted"] > 0.7
    assert loop.data.weights == pytest.approx(loop.mixer.weights.last)


@pytest.mark.filterwarnings("ignore")  # of the compiler
def test_compiled_model_trains_as_the_plain_one() -> None:
    signal = {"signal": mixwell.Hypergradient(traces=mixwell.ProjectedTraces(), trace_every=3)}
    found: list[tuple[mixwell.Mixer, Any]] = []
    for settings in ({}, {"dynamo_backend": "aot_eager"}):
        accelerator = Accelerator(cpu=True, **settings)
        loop, model, optimizer = new_loop(accelerator, **copy.deepcopy(signal))
        for batch in loop:
            accelerator.backward(loop.weighted_loss(row_losses(model, batch)))
            optimizer.step()
            optimizer.zero_grad()
        assert isinstance(model, torch._dynamo.OptimizedModule) == bool(settings)
        found.append((loop.mixer, model))
        AcceleratorState._reset_state(reset_partial_state=True)
    (mixer, own), (other_mixer, other) = found
    assert_same_training(mixer, own, other_mixer, other)


def test_accelerate_accumulation_matches_plain_loop() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    loop, model, optimizer = new_loop(accelerator, budget=20)
    kept: list[Any] = []
    for batch in loop:
        kept.append(batch)
        with accelerator.accumulate(model):
            accelerator.backward(loop.weighted_loss(row_losses(model, batch)))
            optimizer.step()
            optimizer.zero_grad()
    assert loop.mixer.steps_done == 20
    assert len(kept) == 60

    own = new_model()
    plain = torch.optim.AdamW(own.parameters(), lr=0.01)
    signal = mixwell.Hypergradient(traces=mixwell.ProjectedTraces())
    mixer = mixwell.Mixer(own, plain, SOURCES, budget=20, horizon=10, signal=signal)
    validation = itertools.cycle(DataLoader(draw("shifted", 60), batch_size=20))
    for number, batch in enumerate(kept):
        counts = {name: weight * 12 for name, weight in mixer.weights.last.items()}
        with mixer.batch(batch["domain"], expected_counts=counts) as mixed:
            (mixed.weighted_loss(row_losses(own, batch)) / 3).backward()
        if number % 3 < 2:
            continue
        mixer.step()
        if mixer.validation_due:
            with mixer.validation():
                row_losses(own, next(validation)).mean().backward()
    assert_same_training(mixer, own, loop.mixer, model)


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_loader_matches_plain_loop(micro_batches: int) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=micro_batches)
    size = {"batch_size": 12 * micro_batches, "micro_batches": micro_batches}
    loop, model, optimizer = new_loop(accelerator, loader=new_loader(**size), budget=20)
    for rows in loop:
        with accelerator.accumulate(model):
            accelerator.backward(loop.weighted_loss(row_losses(model, rows)))
            optimizer.step()
            optimizer.zero_grad()
    assert loop.mixer.steps_done == 20

    own = new_model()
    plain = torch.optim.AdamW(own.parameters(), lr=0.01)
    signal = mixwell.Hypergradient(traces=mixwell.ProjectedTraces())
    mixer = mixwell.Mixer(own, plain, SOURCES, budget=20, horizon=10, signal=signal)
    validation = itertools.cycle(DataLoader(draw("shifted", 60), batch_size=20))
    for number, batch in enumerate(new_loader(**size).follow(mixer)):
        with mixer.batch(batch) as scope:
            scope.weighted_loss(row_losses(own, batch.rows)).backward()
        if (number + 1) % micro_batches:
            continue
        mixer.step()
        if mixer.validation_due:
            with mixer.validation():
                row_losses(own, next(validation)).mean().backward()
    assert_same_training(mixer, own, loop.mixer, model)


@pytest.mark.parametrize("prepared", [False, True])
def test_micro_batches_take_the_step_of_one_batch(prepared: bool) -> None:
    """Accelerate divides the loss by their number, and a plain loop does not."""
    found: list[list[Tensor]] = []
    for micro_batches in (1, 3):
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=micro_batches) if prepared else None
        loader = new_loader(micro_batches=micro_batches)
        model: Any = new_model()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.5)
        if accelerator is not None:
            model, optimizer = accelerator.prepare(model, optimizer)
        loop = MixerLoop(loader, model, optimizer, [], row_losses, mixer={"horizon": 10})
        for rows, number in zip(loop, range(micro_batches), strict=False):
            loss = loop.weighted_loss(row_losses(model, rows))
            if accelerator is None:
                loss.backward()
                if number + 1 == micro_batches:
                    optimizer.step()
            else:
                with accelerator.accumulate(model):
                    accelerator.backward(loss)
                    optimizer.step()
        assert loop.mixer.steps_done == 1
        found.append(list(model.parameters()))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_unprepared_optimizer_with_accumulation_of_accelerate_raises() -> None:
    """`accelerator.backward` would divide the loss, and the loop could not know."""
    Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loop = MixerLoop(new_loader(micro_batches=2), model, optimizer, [], row_losses, mixer={"horizon": 10})
    with pytest.raises(ValueError, match=r"the optimizer that accelerator\.prepare"):
        next(iter(loop))


@pytest.mark.parametrize("of", ["dataset", "loader"])
@pytest.mark.parametrize("stop", [3, 10, 27])
def test_resume_is_bit_for_bit(stop: int, of: str) -> None:
    def new_loop() -> tuple[MixerLoop, nn.Module, Any]:
        return globals()["new_loop"](loader=new_loader() if of == "loader" else None)

    whole, expected, optimizer = new_loop()
    run(whole, expected, optimizer)
    first, model, optimizer = new_loop()
    run(first, model, optimizer, steps=stop)
    state = copy.deepcopy((first.state_dict(), model.state_dict(), optimizer.state_dict()))
    again, model, optimizer = new_loop()
    model.load_state_dict(state[1])
    optimizer.load_state_dict(state[2])
    again.load_state_dict(state[0])
    run(again, model, optimizer)
    assert again.mixer.rounds == whole.mixer.rounds
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))


def test_error_in_loop_does_not_change_model() -> None:
    loop, model, _ = new_loop()
    with pytest.raises(KeyError, match="mine"):
        for _ in loop:
            raise KeyError("mine")
    assert not any(module._forward_hooks for module in model.modules())


def test_invalid_input_raises() -> None:
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(
        ValueError, match=r"the loader is no MixtureLoader, and does not read from a MixtureDataset"
    ):
        MixerLoop(DataLoader([1]), model, optimizer, [], row_losses, mixer={"budget": 3})
    rows = MixtureDataset({name: draw(name, 9) for name in SOURCES})
    empty = MixerLoop(DataLoader(rows, batch_size=4), model, optimizer, [], row_losses, mixer={"horizon": 1})
    with pytest.raises(ValueError, match="the validation set is empty"):
        run(empty, model, optimizer)
