"""Training steps of a run."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch._dynamo
from torch import nn

from mixwell.data.datasets import TensorRows
from mixwell.training import config_io, optimization, randomness
from mixwell.training.checkpoints import Checkpoint
from mixwell.training.models.base import Trainable
from mixwell.training.trainer import Trainer


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def trainer(rows: int = 64, model: nn.Module | None = None, row_losses=None, **options) -> Trainer:
    generator = torch.Generator().manual_seed(1)

    def data() -> TensorRows:
        return TensorRows(
            torch.randn(rows, 4, generator=generator), torch.randn(rows, 1, generator=generator)
        )

    plain = {
        "domains": {name: {"given": "tensors"} for name in "abc"},
        "validation": {"given": "tensors"},
        "model": {"kind": "given", "name": "linear"},
        "steps": 30,
        "batch": {"rows": 12},
        "mixer": {"horizon": 4},
        **options,
    }
    randomness.seed(0)
    model = model or nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 1))
    trainable = Trainable(model, loss, row_losses=row_losses)
    return Trainer(config_io.validate_config(plain), trainable, {name: data() for name in "abc"}, data())


def row_losses(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return (model(batch[0]) - batch[1]).square().mean(dim=1)


@pytest.mark.parametrize("micro_rows", [None, 5])
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_mixed_batch_step_matches_one_batch_per_domain(kind: str, micro_rows: int | None) -> None:
    """Without dropout, and with projections of full rank."""

    def run(by_row: bool, **mixer) -> Trainer:
        one = trainer(
            model=nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)),
            row_losses=row_losses if by_row else None,
            batch={"rows": 12, "micro_rows": micro_rows},
            optimizer={"kind": kind, "lr": 1e-3, "clip_norm": None},
            mixer={"horizon": 4, "projection_rank": 100, **mixer},
        )
        advance(one, 9)
        return one

    # With Adam the preconditioner is that of each step in one, and of the last in the other.
    method = "mixwell" if kind == "sgd" else "fixed"
    dense, mixed = run(False, traces="dense", method=method), run(True, traces="projected", method=method)
    for a, b in zip(dense.model.parameters(), mixed.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert len(dense.mixer.rounds) == (2 if kind == "sgd" else 0)
    for left, right in zip(dense.mixer.rounds, mixed.mixer.rounds, strict=True):
        np.testing.assert_allclose(list(right.scores.values()), list(left.scores.values()), rtol=1e-3)


class Doubled(nn.Module):
    """Counts its forward passes."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), norm, nn.Tanh(), nn.Linear(8, 1))
        self.passes = 0

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        return self.layers(rows)


@pytest.mark.parametrize("case", ["the same", "rows mixed by BatchNorm", "another loss"])
def test_steps_that_are_not_traced_take_one_batch_where_that_is_the_same(case: str) -> None:
    """With dense traces of 3 domains, one of 5 steps traced; otherwise each domain has a pass of its own."""

    def other(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return 2 * row_losses(model, batch)

    def run(every: int) -> tuple[Trainer, int]:
        model = Doubled(nn.BatchNorm1d(8) if "BatchNorm" in case else nn.Identity())
        one = trainer(
            model=model,
            row_losses=other if case == "another loss" else row_losses,
            mixer={"horizon": 20, "traces": "dense", "trace_every": every, "options": {"points": 1}},
            optimizer={"kind": "sgd", "lr": 1e-2, "clip_norm": None},
        )
        advance(one, 15)
        return one, model.passes

    (every, all_passes), (some, passes) = run(1), run(5)
    assert all_passes == 3 * 15
    # A traced step has a pass per domain; the first other one compares the losses.
    assert passes == (3 * 3 + 12 + 2 if case == "the same" else 3 * 15 + (2 if case == "another loss" else 0))
    for a, b in zip(every.model.parameters(), some.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_projected_traces_require_row_losses() -> None:
    with pytest.raises(ValueError, match="needs the loss of every row"):
        trainer(mixer={"traces": "projected"})


@pytest.mark.filterwarnings("ignore")  # of the compiler
def test_compiled_run_trains_as_the_plain_one() -> None:
    """With projected traces: compiled where nothing is traced, with hooks elsewhere."""

    def run(compiled: bool) -> Trainer:
        torch._dynamo.reset()
        one = trainer(
            model=nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)),
            row_losses=row_losses,
            mixer={"horizon": 12, "traces": "projected", "trace_every": 3},
            compile=compiled,
        )
        advance(one, 24)
        return one

    plain, compiled = run(False), run(True)
    for a, b in zip(plain.model.parameters(), compiled.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
    for left, right in zip(plain.mixer.rounds, compiled.mixer.rounds, strict=True):
        np.testing.assert_allclose(
            list(right.scores.values()), list(left.scores.values()), rtol=0.02, atol=1e-5
        )


def advance(one: Trainer, steps: int) -> None:
    for _ in range(steps):
        one.step()


def copied(checkpoint: Checkpoint) -> Checkpoint:
    """As a file would give it: later steps must not change it."""
    return Checkpoint(
        checkpoint.step,
        {k: t.clone() for k, t in checkpoint.model.items()},
        {k: t.clone() for k, t in checkpoint.training.items()},
        checkpoint.plain,
        checkpoint.own,
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"optimizer": {"kind": "sgd", "momentum": 0.9, "lr": 0.05}},
        {"batch": {"rows": 12, "counts": "equal", "micro_rows": 2}},
        {"mixer": {"horizon": 7, "traces": "bfloat16", "warmup": 3, "floor": 0.05, "max_epochs": 4}},
        {"mixer": {"method": "fixed", "weights": {"a": 1, "b": 2, "c": 3}}},
        {"precision": "bfloat16", "mixer": {"traces": "sketched", "sketch_size": 50, "horizon": 5}},
    ],
)
def test_run_resumed_at_random_steps_is_bit_for_bit(options: dict) -> None:
    whole = trainer(**options)
    advance(whole, 30)
    steps = sorted(
        np.random.default_rng(len(str(options))).choice(np.arange(1, 30), 5, replace=False).tolist()
    )
    current = trainer(**options)
    for begin, end in zip([0, *steps], [*steps, 30], strict=True):
        advance(current, end - begin)
        saved = copied(current.checkpoint())
        torch.randn(7)  # another process has other random numbers
        current = trainer(**options)
        current.load(saved)
    expected, found = whole.checkpoint(), current.checkpoint()
    assert found.plain == expected.plain
    for mine, other in ((found.model, expected.model), (found.training, expected.training)):
        assert mine.keys() == other.keys()
        assert all(torch.equal(mine[name], other[name]) for name in mine)


def test_micro_batches_add_up_to_batch() -> None:
    model = nn.Linear(4, 1)
    whole = trainer(model=nn.Linear(4, 1))
    parts = trainer(model=model, batch={"rows": 12, "micro_rows": 1})
    for one in (whole, parts):
        with torch.no_grad():
            for parameter in one.model.parameters():
                parameter.fill_(0.1)
        advance(one, 8)
    for mine, other in zip(whole.model.parameters(), parts.model.parameters(), strict=True):
        assert torch.allclose(mine, other, atol=1e-5)
    assert parts.mixer.weights.last == pytest.approx(whole.mixer.weights.last, abs=1e-4)


def test_step_is_weighted_gradient_of_drawn_rows() -> None:
    """Against one step written out by hand."""
    one = trainer(model=nn.Linear(4, 1), optimizer={"kind": "sgd", "lr": 0.1, "warmup": 0, "clip_norm": None})
    before = [p.detach().clone() for p in one.model.parameters()]
    twin = nn.Linear(4, 1)
    twin.load_state_dict(one.model.state_dict())
    drawn = trainer(model=nn.Linear(4, 1)).loader.sampler.draw(np.full(3, 1 / 3))
    total = sum(loss(twin, one._domains[name].batch(rows)) / 3 for name, rows in drawn.items())
    total.backward()  # type: ignore[union-attr]
    outcome = one.step()
    assert outcome.learning_rate == 0.1
    for start, now, parameter in zip(before, one.model.parameters(), twin.parameters(), strict=True):
        assert parameter.grad is not None
        assert torch.allclose(now, start - 0.1 * parameter.grad, atol=1e-6)


def test_evaluation_is_mean_over_rows_without_side_effects() -> None:
    one = trainer()
    assert one._validation is not None
    before, state = copied(one.checkpoint()), torch.get_rng_state()
    value = one.evaluate(one._validation, at_most=64)
    one.model.eval()
    with torch.no_grad():
        assert value == pytest.approx(float(loss(one.model, one._validation.batch(np.arange(64)))), rel=1e-5)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before.model[k], t) for k, t in one.checkpoint().model.items())


def test_resume_with_other_data_raises() -> None:
    saved = trainer(rows=64).checkpoint()
    with pytest.raises(ValueError, match="the data of a, b, c, validation have changed since the checkpoint"):
        trainer(rows=65).load(saved)


def test_weight_decay_only_for_matrices() -> None:
    config = config_io.validate_config(
        {"domains": {"a": "x"}, "mixer": {"method": "fixed"}, "optimizer": {"weight_decay": 0.1}}
    ).optimizer
    groups = optimization.build_optimizer(config, list(nn.Linear(3, 2).parameters())).param_groups
    assert [(group["weight_decay"], group["params"][0].dim()) for group in groups] == [(0.1, 2), (0.0, 1)]


def test_epoch_cap_limits_weight() -> None:
    """Domain a is alone useful, but its 64 rows may be seen once: 64 of 360 rows."""
    one = trainer(
        steps=30, batch={"rows": 12, "min_rows_per_domain": 0}, mixer={"horizon": 3, "max_epochs": {"a": 1}}
    )
    advance(one, 30)
    assert one.loader.taken["a"] <= 64
    assert max(record.new_weights["a"] for record in one.mixer.rounds[:-1]) < 0.5


def test_unknown_device_is_named() -> None:
    with pytest.raises(ValueError, match="device: 'abacus' is not available .*; try auto or cpu"):
        trainer(device="abacus")


def test_probes_are_built_where_the_method_declares_them() -> None:
    plain, probing = trainer(), trainer(mixer={"method": "tandem", "horizon": 4})
    for one in (plain, probing):
        one.step()
    assert plain.checkpoint().plain["probes"] is None
    assert probing.checkpoint().plain["probes"]["spent"] > 0
    assert plain.computed == 12
