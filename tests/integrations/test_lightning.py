"""Lightning, mixing."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import mixwell
from helpers.regression_data import SOURCES, draw
from mixwell.data.mixture_dataset import MixtureDataset
from mixwell.integrations.lightning import MixerCallback

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*isinstance\\(treespec, LeafSpec\\).*",
    "ignore:.*does not have many workers.*",
    "ignore:.*You're resuming from a checkpoint that ended before the epoch ended.*",
    "ignore:Checkpoint directory .* exists and is not empty.*",
)


class Regression(lightning.LightningModule):
    def __init__(self, mixing: MixerCallback) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
        self._mixing = [mixing]  # not a part of the model

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        return self._mixing[0].weighted_loss((self.net(batch["x"]) - batch["y"]).square().mean(dim=1))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def new_callback(*, micro_batches: int = 0, **settings: Any) -> MixerCallback:
    """On a dataset, or on a loader if it says how many micro-batches that has."""
    sources = {name: draw(name, 90) for name in SOURCES}
    data = MixtureDataset(sources)
    if micro_batches:
        data = mixwell.MixtureLoader(sources, 12 * micro_batches, micro_batches=micro_batches)
    validation = DataLoader(draw("shifted", 60), batch_size=20)
    return MixerCallback(data, validation, **{"mixer": {"horizon": 10}, **settings})


def new_trainer(folder: Path, mixing: MixerCallback, **settings: Any) -> lightning.Trainer:
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "accelerator": "cpu",
    }
    return lightning.Trainer(
        default_root_dir=folder,
        callbacks=[mixing, *settings.pop("callbacks", [])],
        **{"max_steps": 40, "enable_checkpointing": False, **quiet, **settings},
    )


def fit(trainer: lightning.Trainer, mixing: MixerCallback, **settings: Any) -> Regression:
    model = Regression(mixing)
    data: Any = mixing.data
    trainer.fit(
        model,
        DataLoader(data, batch_size=12) if isinstance(data, MixtureDataset) else mixing.batches,
        **settings,
    )
    return model


def test_learns_weights(tmp_path: Path) -> None:
    mixing = new_callback()
    trainer = new_trainer(tmp_path, mixing, max_steps=120)
    fit(trainer, mixing)
    assert mixing.mixer.steps_done == 120
    assert len(mixing.mixer.rounds) == 12
    assert mixing.mixer.weights["shifted"] > 0.7
    assert mixing.data.weights == pytest.approx(mixing.mixer.weights.last)
    assert float(trainer.callback_metrics["mixwell/weight/shifted"]) == pytest.approx(
        mixing.mixer.weights["shifted"], rel=1e-6
    )


@pytest.mark.parametrize(("accumulation", "clip"), [(1, None), (2, 0.3)])
def test_matches_plain_loop(accumulation: int, clip: float | None, tmp_path: Path) -> None:
    mixing = new_callback()
    found = fit(
        new_trainer(
            tmp_path, mixing, accumulate_grad_batches=accumulation, gradient_clip_val=clip, max_steps=20
        ),
        mixing,
    )
    model = Regression(mixing)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.9)
    signal = mixwell.Hypergradient(traces=mixwell.ProjectedTraces())
    mixer = mixwell.Mixer(model, optimizer, SOURCES, budget=20, horizon=10, signal=signal, clip_norm=clip)
    # Lightning has one batch in hand when the weights change.
    rows = MixtureDataset({name: draw(name, 90) for name in SOURCES})
    batches = iter(DataLoader(rows, batch_size=12))
    validation = itertools.cycle(new_callback()._validation._source)
    ahead = next(batches)
    while mixer.steps_done < 20:
        for _ in range(accumulation):
            batch, ahead = ahead, next(batches)
            with mixer.batch(batch["domain"], expected_counts=rows.expected_counts(12)) as mixed:
                losses = (model.net(batch["x"]) - batch["y"]).square().mean(dim=1)
                (mixed.weighted_loss(losses) / accumulation).backward()
        mixer.step()
        schedule.step()
        if mixer.validation_due:
            with mixer.validation():
                wanted = next(validation)
                (model.net(wanted["x"]) - wanted["y"]).square().mean().backward()
            rows.weights = mixer.weights.last
    for own, other in zip(mixer.rounds, mixing.mixer.rounds, strict=True):
        np.testing.assert_allclose(
            list(own.scores.values()), list(other.scores.values()), rtol=1e-4, atol=1e-7
        )
    for a, b in zip(model.parameters(), found.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_loader_matches_plain_loop(accumulation: int, tmp_path: Path) -> None:
    mixing = new_callback(micro_batches=accumulation)
    found = fit(new_trainer(tmp_path, mixing, accumulate_grad_batches=accumulation, max_steps=20), mixing)
    model = Regression(mixing)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.9)
    signal = mixwell.Hypergradient(traces=mixwell.ProjectedTraces())
    mixer = mixwell.Mixer(model, optimizer, SOURCES, budget=20, horizon=10, signal=signal)
    other = new_callback(micro_batches=accumulation)
    validation = itertools.cycle(other._validation._source)
    assert isinstance(other.data, mixwell.MixtureLoader)
    for number, batch in enumerate(other.data.follow(mixer)):
        with mixer.batch(batch) as scope:
            losses = (model.net(batch.rows["x"]) - batch.rows["y"]).square().mean(dim=1)
            scope.weighted_loss(losses).backward()
        if (number + 1) % accumulation:
            continue
        mixer.step()
        schedule.step()
        if mixer.validation_due:
            with mixer.validation():
                wanted = next(validation)
                (model.net(wanted["x"]) - wanted["y"]).square().mean().backward()
    for a, b in zip(mixer.rounds, mixing.mixer.rounds, strict=True):
        np.testing.assert_allclose(list(a.scores.values()), list(b.scores.values()), rtol=1e-4, atol=1e-7)
    for one, two in zip(model.parameters(), found.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)


class _Saving(lightning.Callback):
    def __init__(self, folder: Path, steps: list[int]) -> None:
        self._folder, self._steps = folder, steps

    def on_train_batch_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        if trainer.global_step in self._steps:
            trainer.save_checkpoint(self._folder / f"{trainer.global_step}.ckpt")


@pytest.mark.parametrize("micro_batches", [0, 1])
def test_resume_is_bit_for_bit(micro_batches: int, tmp_path: Path) -> None:
    def new_callback() -> MixerCallback:
        return globals()["new_callback"](micro_batches=micro_batches)

    whole = new_callback()
    expected = fit(new_trainer(tmp_path, whole, callbacks=[_Saving(tmp_path, [1, 7, 20])]), whole)
    for step in (1, 7, 20):
        mixing = new_callback()
        found = fit(
            new_trainer(tmp_path, mixing), mixing, ckpt_path=tmp_path / f"{step}.ckpt", weights_only=False
        )
        assert mixing.mixer.rounds == whole.mixer.rounds
        for a, b in zip(found.parameters(), expected.parameters(), strict=True):
            assert torch.equal(a, b)


def test_epochs_continue_in_the_data(tmp_path: Path) -> None:
    mixing = new_callback(mixer={"horizon": 8, "signal": mixwell.ConstantWeights()})
    seen: list[float] = []

    class Seeing(lightning.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            seen.extend(batch["x"][:, 0].tolist())

    trainer = new_trainer(
        tmp_path, mixing, max_steps=-1, max_epochs=3, limit_train_batches=5, callbacks=[Seeing()]
    )
    fit(trainer, mixing)
    assert len(seen) == len(set(seen)) == 3 * 5 * 12


def test_validation_loss_is_not_logged_as_training_loss(tmp_path: Path) -> None:
    class Logging(Regression):
        def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
            loss = super().training_step(batch, index)
            self.log("rows", float(len(batch["x"])))
            return loss

    mixing = new_callback()
    trainer = new_trainer(tmp_path, mixing, max_steps=10)
    trainer.fit(Logging(mixing), DataLoader(mixing.data, batch_size=12))
    assert float(trainer.callback_metrics["rows"]) == 12  # a validation batch has 20


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_precisions(precision: Any, tmp_path: Path) -> None:
    mixing = new_callback()
    fit(new_trainer(tmp_path, mixing, max_steps=20, precision=precision), mixing)
    assert len(mixing.mixer.rounds) == 2


def test_checkpoint_before_training(tmp_path: Path) -> None:
    mixing = new_callback()
    assert mixing.state_dict() == {}
    mixing.load_state_dict({})
    endless = new_trainer(tmp_path, mixing, max_steps=-1, max_epochs=1)
    with pytest.raises(ValueError, match="the number of steps is not known; give max_steps"):
        fit(endless, mixing)


def test_invalid_input_raises(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="mixer: budget is chosen by the trainer or loop; leave it out"):
        new_callback(mixer={"budget": 3})
    empty = new_callback()
    empty._validation = type(empty._validation)([])
    with pytest.raises(ValueError, match="the validation set is empty"):
        fit(new_trainer(tmp_path, empty), empty)
    clipped = new_callback()
    with pytest.raises(ValueError, match="gradients that are clipped by value cannot be mixed"):
        fit(new_trainer(tmp_path, clipped, gradient_clip_val=1.0, gradient_clip_algorithm="value"), clipped)
    lost = new_callback()
    with pytest.raises(ValueError, match="the batch has no 'domain' that names the domain of each row"):
        loader = DataLoader(lost.data, batch_size=4, collate_fn=lambda rows: {"x": torch.zeros(4, 6)})
        new_trainer(tmp_path, lost).fit(Regression(lost), loader)
    unseen = new_callback(labels=lambda batch: ["books"] * 12)
    with pytest.raises(ValueError, match="unknown domain 'books'; the domains are clean, shifted, noisy"):
        fit(new_trainer(tmp_path, unseen), unseen)
