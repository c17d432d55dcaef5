"""A block that raises leaves the mixer as it was before, or every later call is refused."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import mixwell
from helpers.contract_tables import ESTIMATORS, FORMS, OPTIMIZERS
from helpers.toy_problems import Batch, mse, names, regression_batches, two_layer
from mixwell.mixer.batch import StepCounts

STEPS, FAILING = 7, (0, 1, 2, 5)
REFUSED = r"step \d was interrupted .*mixer.load_state_dict"
# Where a backward pass on a mixed batch adds to the traces themselves, which cannot be undone.
IN_PLACE = {"default", "every step", "last iterate", "window", "dense", "per-tensor", "subset", "bfloat16"}
MOMENTS = ["before the forward pass", "after the forward pass", "after the backward pass", "not finite"]


class DeliberateError(Exception):
    pass


class Run:
    """A training loop in which some blocks fail at first."""

    def __init__(self, estimator: str, form: str, optimizer: str, **settings: Any) -> None:
        self.model = two_layer(0)
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.mixed = form == "mixed batches"
        self.mixer = mixwell.Mixer(
            self.model, self.optimizer, names(3), horizon=4, signal=ESTIMATORS[estimator](), **settings
        )

    def go(self, fails: Callable[[int], str | None] = lambda step: None) -> Run:
        batches, validation = regression_batches(0, steps=STEPS)
        for number in range(self.mixer.steps_done, STEPS):
            parts = [dict(batches[number])] if self.mixed else [{n: b} for n, b in batches[number].items()]
            for position, part in enumerate(parts):
                moment = fails(number)
                if moment is not None and position in (0, len(parts) - 1):
                    with pytest.raises((DeliberateError, FloatingPointError)):
                        self.block(part, moment)
                    assert all(p.grad is None for p in self.model.parameters())
                self.block(part)
            self.mixer.step()
            if self.mixer.validation_due:
                moment = fails(number)
                if moment is not None:
                    with pytest.raises((DeliberateError, FloatingPointError)):
                        self.validate(validation, moment)
                self.validate(validation)
        return self

    def block(self, part: dict[str, Batch], moment: str | None = None) -> None:
        factor = torch.nan if moment == "not finite" else 1.0
        if not self.mixed:
            ((name, batch),) = part.items()
            with self.mixer.domain(name) as scope:
                loss = mse(self.model, batch) * factor
                scope.record_loss(loss)
                self.differentiate(loss, moment)
            return
        x, y = (torch.stack(tensors, dim=1).flatten(0, 1) for tensors in zip(*part.values(), strict=True))
        with self.mixer.batch(list(part) * (len(x) // len(part))) as scope:
            fail_if(moment == MOMENTS[0])
            losses = (self.model(x) - y).square().mean(dim=1) * factor
            self.differentiate(scope.weighted_loss(losses), moment)

    def validate(self, batch: Batch, moment: str | None = None) -> None:
        with self.mixer.validation() as scope:
            loss = mse(self.model, batch) * (torch.nan if moment == "not finite" else 1.0)
            scope.record_loss(loss)
            loss.backward()
            fail_if(moment is not None and moment != "not finite")

    def differentiate(self, loss: Tensor, moment: str | None) -> None:
        fail_if(moment in MOMENTS[:2])
        loss.backward(create_graph=self.mixer.signal.requirements.graph)
        fail_if(moment == MOMENTS[2])

    def results(self) -> dict[str, Any]:
        state = self.mixer.state_dict()
        return {
            "parameters": {name: p.detach() for name, p in self.model.named_parameters()},
            "tensors": state["tensors"],
            "values": state["values"],
        }


def fail_if(condition: bool) -> None:
    if condition:
        raise DeliberateError


def assert_equal(found: Run, expected: Run) -> None:
    one, other = found.results(), expected.results()
    assert one["values"] == other["values"]
    for kind in ("parameters", "tensors"):
        assert one[kind].keys() == other[kind].keys()
        for name, tensor in one[kind].items():
            assert torch.equal(tensor, other[kind][name]), name


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("optimizer", ["momentum", "adamw with strong decay"])
@pytest.mark.parametrize(("estimator", "form"), FORMS)
def test_a_block_that_failed_can_be_tried_again(
    estimator: str, form: str, optimizer: str, moment: str
) -> None:
    run = Run(estimator, form, optimizer)
    in_place = form == "mixed batches" and estimator in IN_PLACE and moment in MOMENTS[2:]
    if not in_place:
        assert_equal(run.go(lambda s: moment if s in FAILING else None), Run(estimator, form, optimizer).go())
        return
    # In the window of its last three steps, the first of a round of four is not traced.
    begin = 1 if estimator == "window" else 0
    with pytest.raises(RuntimeError, match=REFUSED):
        run.go(lambda step: moment if step >= begin else None)
    for call in (run.mixer.step, run.mixer.before_step, run.mixer.state_dict):
        with pytest.raises(RuntimeError, match=REFUSED):
            call()
    with pytest.raises(RuntimeError, match=REFUSED), run.mixer.domain("d0"):
        pass
    with pytest.raises(RuntimeError, match=REFUSED):
        run.mixer.state_dict(forget_step=True)


def test_a_mixer_whose_step_was_interrupted_continues_from_a_state() -> None:
    run, whole = (Run("dense", "mixed batches", "momentum") for _ in range(2))
    whole.go()
    saved: dict[str, Any] = {}

    def fails(step: int) -> str | None:
        saved.setdefault(str(step), copy.deepcopy(run.mixer.state_dict()))
        return MOMENTS[2] if step == 2 else None

    with pytest.raises(RuntimeError, match=REFUSED):
        run.go(fails)
    run.mixer.load_state_dict(saved["2"])
    assert_equal(run.go(), whole)


def test_an_adam_with_decay_by_element_is_not_applied_twice() -> None:
    """The decay is then a tensor, which dense traces multiply at once."""
    run, whole = (Run("dense", "mixed batches", "adam with decay") for _ in range(2))
    assert_equal(run.go(lambda step: MOMENTS[1]), whole.go())


def test_a_later_batch_of_a_step_that_fails_drops_the_step() -> None:
    """Its gradient is on the parameters with those of the earlier ones, and goes with it."""
    batches, _ = regression_batches(0, steps=2)

    def made() -> tuple[nn.Module, mixwell.Mixer]:
        model = two_layer(0)
        signal = mixwell.Hypergradient(traces=mixwell.ProjectedTraces(3))
        return model, mixwell.Mixer(
            model, torch.optim.SGD(model.parameters(), 0.1), names(3), horizon=4, signal=signal
        )

    def parts(step: int) -> list[tuple[mixwell.MixtureBatch, Tensor, Tensor]]:
        x, y = (torch.cat(tensors) for tensors in zip(*batches[step].values(), strict=True))
        numbers = torch.arange(3).repeat_interleave(16)
        counts = dict.fromkeys(names(3), 16)
        whole = mixwell.MixtureBatch(tuple(names(3)), numbers, StepCounts(counts, counts), (x, y))
        return [(part, *part.rows) for part in whole.split(24)]

    def give(model: nn.Module, mixer: mixwell.Mixer, part: Any, x: Tensor, y: Tensor, **counts: Any) -> None:
        with mixer.batch(part, **counts) as scope:
            scope.weighted_loss((model(x) - y).square().mean(dim=1)).backward()

    def fail(model: nn.Module, mixer: mixwell.Mixer, part: Any, x: Tensor, y: Tensor, **counts: Any) -> None:
        with pytest.raises(FloatingPointError):
            give(model, mixer, part, x * torch.nan, y, **counts)

    (model, mixer), (other, whole) = made(), made()
    for step in range(2):
        first, second = parts(step)
        give(model, mixer, *first)
        fail(model, mixer, *second)
        give(model, mixer, *second)
        with pytest.raises(ValueError, match=r"the micro-batches of step \d are 0.5 of it"):
            mixer.step()
        fail(model, mixer, *second)
        for given in (first, second):
            give(model, mixer, *given)
            give(other, whole, *given)
        mixer.step()
        whole.step()
    # Not bit for bit: the sums of a batch that is verified run in another order.
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q)
    assert mixer.state_dict()["values"] == whole.state_dict()["values"]
    # Of labels alone nobody could see that a step is not complete.
    (first, *rows), (second, *others) = parts(0)
    counts = {"expected_counts": dict.fromkeys(names(3), 16.0)}
    give(model, mixer, first.labels, *rows, **counts)
    fail(model, mixer, second.labels, *others, **counts)
    with pytest.raises(RuntimeError, match=rf"{REFUSED}.*|the earlier batches of that step"):
        give(model, mixer, second.labels, *others, **counts)


@pytest.mark.parametrize("error", [KeyboardInterrupt, torch.OutOfMemoryError])
def test_an_interrupt_while_a_gradient_is_folded_in_is_not_forgotten(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run("dense", "by domain", "momentum")
    add, calls = mixwell.DenseTraces._add, [0]

    def interrupted(self: Any, *args: Any) -> None:
        calls[0] += 1
        if calls[0] == 6:
            raise error("now")
        add(self, *args)

    monkeypatch.setattr(mixwell.DenseTraces, "_add", interrupted)
    with pytest.raises(error):
        run.go()
    with pytest.raises(RuntimeError, match=REFUSED):
        run.go()
    with pytest.raises(RuntimeError, match=REFUSED):
        run.mixer.save("nowhere")


def test_what_a_signal_refuses_can_be_given_again() -> None:
    model = two_layer(0)
    batches, _ = regression_batches(0, steps=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    signal = mixwell.Hypergradient(mixwell.ExactCurvature())
    mixer = mixwell.Mixer(model, optimizer, names(3), horizon=2, signal=signal)
    for name, batch in batches[0].items():
        with pytest.raises(ValueError, match="create_graph=True"), mixer.domain(name):
            mse(model, batch).backward()
        with mixer.domain(name):
            mse(model, batch).backward(create_graph=True)
    mixer.step()


def test_a_validation_gradient_whose_score_overflowed_can_be_given_again() -> None:
    found = []
    for overflows in (False, True):
        model = two_layer(0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        mixer = mixwell.Mixer(model, optimizer, names(3), horizon=1, update=1.0)
        batches, validation = regression_batches(0, steps=1)
        for name, batch in batches[0].items():
            with mixer.domain(name):
                (1e4 * mse(model, batch)).backward()
        mixer.step()
        if overflows:
            found_at = torch.autograd.grad(mse(model, validation), list(model.parameters()))
            scale = 1e307 / float(max(gradient.abs().max() for gradient in found_at))
            with pytest.raises(FloatingPointError, match="overflowed in round 0"):
                with mixer.validation(fraction=0.5):
                    mse(model, validation).backward()
                with mixer.validation(fraction=0.5):
                    (mse(model, validation) * scale).backward()
            with mixer.validation(fraction=0.5):
                mse(model, validation).backward()
            with pytest.raises(RuntimeError, match=r"fractions that sum to 0\.5 of 1 were given"):
                mixer.step()
        else:
            with mixer.validation(fraction=0.5):
                mse(model, validation).backward()
        with mixer.validation(fraction=0.5):
            mse(model, validation).backward()
        found.append(mixer.state_dict()["values"])
    assert found[0] == found[1]


def test_a_state_that_forgets_a_step_has_nothing_of_it() -> None:
    batches, _ = regression_batches(0, steps=2)
    for estimator in ("dense", "sketched", "forward mode", "projected"):
        run = Run(estimator, "by domain", "momentum")
        for name, batch in batches[0].items():
            run.block({name: batch})
        run.mixer.step()
        before = copy.deepcopy(run.mixer.state_dict())
        run.block({"d0": batches[1]["d0"]})
        if estimator in ("dense", "sketched"):
            with pytest.raises(RuntimeError, match=r"in the middle of a step.*ProjectedTraces"):
                run.mixer.state_dict(forget_step=True)
            continue
        after = run.mixer.state_dict(forget_step=True)
        assert after["values"] == before["values"]
        for name, tensor in before["tensors"].items():
            np.testing.assert_array_equal(after["tensors"][name].numpy(), tensor.numpy())


def test_a_dropped_step_does_not_count_what_it_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    signal = mixwell.Hypergradient(traces=mixwell.ProjectedTraces(2))
    settings = {"on_nonfinite": "skip", "clip_norm": 1.0, "horizon": 3}
    mixer = mixwell.Mixer(model, optimizer, ["a", "b"], signal=signal, **settings)

    def give() -> None:
        for name, factor in (("a", math.nan), ("b", 1.0)):
            with mixer.domain(name):
                (model(torch.ones(2, 3)).mean() * factor).backward()

    def fail(*_: object) -> None:
        raise KeyError("clipping")

    with monkeypatch.context() as patched, pytest.warns(UserWarning, match="'a' at step 0"):
        patched.setattr(torch.nn.utils, "clip_grad_norm_", fail)
        give()
        with pytest.raises(KeyError, match="clipping"):
            mixer.step()
    assert mixer.skipped == {}
    with pytest.warns(UserWarning, match="'a' at step 0"):
        give()
    mixer.step()
    assert mixer.skipped == {"a": 1}
