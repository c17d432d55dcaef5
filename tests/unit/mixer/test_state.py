"""Stop and resume at any step, bit for bit; other runs' states are refused."""

from __future__ import annotations

import copy
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import mixwell
from helpers.contract_tables import (
    ESTIMATORS,
    FORMS,
    LOOPS,
    ONE_STEP,
    OPTIMIZERS,
    TRACED,
    UNKNOWN,
    UPDATES,
)
from helpers.toy_problems import Batch, mse, names, regression_batches, train, two_layer
from mixwell.mixer import state

STEPS = 11


def build(optimizer: str, signal, **settings) -> tuple[nn.Module, torch.optim.Optimizer, mixwell.Mixer]:
    model = two_layer(0, dtype=torch.float32)
    opt = OPTIMIZERS[optimizer](model.parameters())
    settings = {"horizon": 4, "budget": STEPS, "warmup": 1, "clip_norm": 0.5, **settings}
    return model, opt, mixwell.Mixer(model, opt, names(3), signal=signal(), **settings)


def data() -> tuple[list[dict[str, Batch]], Batch]:
    return regression_batches(0, steps=STEPS, dtype=torch.float32)


def assert_resumes(
    folder: Path,
    estimator: str,
    form: str,
    stop: int,
    *,
    optimizer: str = "adamw",
    update: str = "self-tuned",
) -> None:
    """Stopped and resumed from a file, a run ends as one that was never stopped."""
    batches, validation = data()

    def make() -> tuple[nn.Module, torch.optim.Optimizer, mixwell.Mixer]:
        return build(optimizer, ESTIMATORS[estimator], update=UPDATES[update]())

    model, _, whole = make()
    LOOPS[form](whole, model, batches, validation)

    first, first_opt, mixer = make()
    LOOPS[form](mixer, first, batches[:stop], validation)
    mixer.save(folder / "mixer.safetensors")
    second, second_opt, resumed = make()
    second.load_state_dict(first.state_dict())
    second_opt.load_state_dict(copy.deepcopy(first_opt.state_dict()))
    resumed.load(folder / "mixer.safetensors")
    LOOPS[form](resumed, second, batches[stop:], validation)

    np.testing.assert_array_equal(resumed.weights.log, whole.weights.log)
    np.testing.assert_array_equal(resumed.weights.history, whole.weights.history)
    assert resumed.weights.average == whole.weights.average
    assert resumed.rounds == whole.rounds
    for a, b in zip(model.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("stop", [0, 1, 3, 5, 7])
@pytest.mark.parametrize(("estimator", "form"), FORMS)
@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
def test_resume_bit_for_bit(optimizer: str, estimator: str, form: str, stop: int, tmp_path: Path) -> None:
    assert_resumes(tmp_path, estimator, form, stop, optimizer=optimizer)


@pytest.mark.parametrize("form", LOOPS)
@pytest.mark.parametrize("update", UPDATES)
def test_resume_with_every_update(update: str, form: str, tmp_path: Path) -> None:
    assert_resumes(tmp_path, "projected", form, 7, update=update)


@pytest.mark.filterwarnings(UNKNOWN)
@pytest.mark.parametrize(("optimizer", "estimator"), TRACED)
def test_resume_with_every_optimizer(optimizer: str, estimator: str, tmp_path: Path) -> None:
    assert_resumes(tmp_path, estimator, "by domain", 7, optimizer=optimizer)


def test_resume_between_the_end_of_a_round_and_its_update() -> None:
    batches, validation = data()
    model, _, mixer = build("momentum", ESTIMATORS["dense"])
    train(mixer, model, batches[:4], validation)
    for name, batch in batches[4].items():
        with mixer.domain(name):
            mse(model, batch).backward()
    mixer.step()
    assert mixer.validation_due
    assert mixer.round_left == 0
    saved = copy.deepcopy(mixer.state_dict())
    other, _, resumed = build("momentum", ESTIMATORS["dense"])
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(saved)
    for one, net in ((mixer, model), (resumed, other)):
        with one.validation():
            mse(net, validation).backward()
    np.testing.assert_array_equal(mixer.weights.log, resumed.weights.log)


@pytest.mark.parametrize(("estimator", "form"), FORMS)
@pytest.mark.parametrize("validated", [False, True])
def test_resume_between_validation_points_is_bit_for_bit(
    estimator: str, form: str, validated: bool, tmp_path: Path
) -> None:
    """After step 3 of a round of 4, before or after its validation gradient; steps 2 and 4 have others."""
    batches, validation = data()

    def make() -> tuple[nn.Module, torch.optim.Optimizer, mixwell.Mixer]:
        made = ESTIMATORS[estimator]()
        made.points, made.span = 3, 0.75
        return build("adamw", lambda: made)

    model, _, whole = make()
    LOOPS[form](whole, model, batches, validation)

    first, first_opt, mixer = make()
    LOOPS[form](mixer, first, batches[:3], validation)
    ONE_STEP[form](mixer, first, batches[3])
    assert mixer.validation_due
    if validated:
        with mixer.validation():
            mse(first, validation).backward()
    mixer.save(tmp_path / "mixer.safetensors")
    second, second_opt, resumed = make()
    second.load_state_dict(first.state_dict())
    second_opt.load_state_dict(copy.deepcopy(first_opt.state_dict()))
    resumed.load(tmp_path / "mixer.safetensors")
    assert resumed.validation_due is not validated
    assert resumed.round_ended is None
    if not validated:
        with resumed.validation():
            mse(second, validation).backward()
    LOOPS[form](resumed, second, batches[4:], validation)
    assert [record.points for record in resumed.rounds] == [3, 3, 2]
    assert resumed.rounds == whole.rounds
    for a, b in zip(model.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)


def test_skipped_point_is_restored() -> None:
    batches, validation = data()
    model, _, mixer = build("momentum", ESTIMATORS["dense"], on_nonfinite="skip")
    train(mixer, model, batches[:3], validation)
    with pytest.warns(UserWarning, match="'validation'"):
        train(mixer, model, batches[3:4], (validation[0] * torch.nan, validation[1]))
    other, _, resumed = build("momentum", ESTIMATORS["dense"], on_nonfinite="skip")
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(copy.deepcopy(mixer.state_dict()))
    for one, net in ((mixer, model), (resumed, other)):
        assert not one.validation_due
        train(one, net, batches[4:5], validation)
        assert one.rounds[0].points == 1
        assert one.rounds[0].skipped == {"validation": 1}


def test_old_format_raises(tmp_path: Path) -> None:
    _, _, mixer = build("momentum", ESTIMATORS["dense"])
    old = {**mixer.state_dict(), "format": 1}
    state.write_file(tmp_path / "old", old)
    with pytest.raises(
        ValueError,
        match="the state has format 1, this version of mixwell reads format 5; load it with the version",
    ):
        mixer.load(tmp_path / "old")


def test_state_between_validation_parts_raises() -> None:
    batches, validation = data()
    model, _, mixer = build("momentum", ESTIMATORS["dense"])
    train(mixer, model, batches[:3], validation)
    for name, batch in batches[3].items():
        with mixer.domain(name):
            mse(model, batch).backward()
    mixer.step()
    with mixer.validation(fraction=0.5):
        mse(model, validation).backward()
    with pytest.raises(RuntimeError, match=r"after the block of mixer.validation\(\)"):
        mixer.state_dict()
    with mixer.validation(fraction=0.5):
        mse(model, validation).backward()
    assert mixer.state_dict()["values"]["points"]


def test_state_survives_torch_save_without_code(tmp_path: Path) -> None:
    batches, validation = data()
    model, _, mixer = build("momentum", ESTIMATORS["dense"])
    train(mixer, model, batches[:6], validation)
    torch.save(mixer.state_dict(), tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt", weights_only=True)
    _, _, resumed = build("momentum", ESTIMATORS["dense"])
    resumed.load_state_dict(loaded)
    assert resumed.steps_done == 6


def test_load_after_failure_in_mid_step() -> None:
    batches, validation = data()
    model, _, mixer = build("momentum", ESTIMATORS["dense"])
    train(mixer, model, batches[:3], validation)
    saved, parameters = copy.deepcopy(mixer.state_dict()), copy.deepcopy(model.state_dict())
    train(mixer, model, batches[3:4], validation)
    with mixer.domain("d0"):
        mse(model, batches[4]["d0"]).backward()
    with pytest.raises(FloatingPointError), mixer.domain("d1"):
        (mse(model, batches[4]["d1"]) * torch.nan).backward()
    model.load_state_dict(parameters)
    mixer.load_state_dict(saved)
    assert mixer.steps_done == 3
    train(mixer, model, batches[3:], validation)


def test_many_rounds_and_unusual_values_can_be_saved(tmp_path: Path) -> None:
    batches, validation = data()
    model = two_layer(0, dtype=torch.float32)
    mixer = mixwell.Mixer(
        model,
        torch.optim.SGD(model.parameters(), lr=torch.tensor(0.05)),
        np.array(["d0", "d1", "d2"]),
        horizon=np.int64(2),
        budget=np.int64(10),
        clip_norm=np.float32(0.5),
    )
    train(mixer, model, batches[:4], validation)
    mixer.rounds *= 40_000
    mixer.save(tmp_path / "mixer")
    mixer.load(tmp_path / "mixer")
    assert len(mixer.rounds) == 80_000


def test_state_in_mid_step_raises() -> None:
    batches, _ = data()
    model, _, mixer = build("momentum", ESTIMATORS["dense"])
    with mixer.domain("d0"):
        mse(model, batches[0]["d0"]).backward()
    with pytest.raises(RuntimeError, match="between steps, not in the middle of one"):
        mixer.state_dict()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.update(format=99), r"format 99, this version of mixwell reads format 5"),
        (
            lambda s: s["settings"].update(domains=["web", "code", "wiki"]),
            r"domains: \['web', 'code', 'wiki'\] in the state, \['d0', 'd1', 'd2'\] here",
        ),
        (lambda s: s["settings"].update(horizon=9), r"horizon: 9 in the state, 4 here"),
        (
            lambda s: s["settings"]["parameters"].update({"0.bias": [3]}),
            r"parameters 0.bias: \[3\] in the state, \[16\] here",
        ),
        (lambda s: s["tensors"].pop("signal.traces.0.0.bias"), r"tensor signal.traces.0.0.bias is missing"),
        (
            lambda s: s["tensors"].update({"signal.traces.0.0.bias": torch.zeros(5)}),
            r"signal.traces.0.0.bias: \(5,\) in the state, \(16,\) here",
        ),
        (lambda s: s.pop("settings"), r"not a state of mixwell.Mixer"),
    ],
)
def test_incompatible_state_raises_without_changes(change, message: str) -> None:
    batches, validation = data()
    model, _, mixer = build("momentum", ESTIMATORS["dense"])
    train(mixer, model, batches[:6], validation)
    changed = copy.deepcopy(mixer.state_dict())
    change(changed)
    _, _, fresh = build("momentum", ESTIMATORS["dense"])
    with pytest.raises(ValueError, match=message):
        fresh.load_state_dict(changed)
    assert fresh.steps_done == 0
    assert fresh.rounds == []


def test_invalid_state_files_raise(tmp_path: Path) -> None:
    _, _, mixer = build("momentum", ESTIMATORS["dense"])

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "executed"),)

    evil, cut, foreign = (tmp_path / n for n in ("evil", "cut", "foreign"))
    evil.write_bytes(pickle.dumps(Evil()))
    mixer.save(cut)
    cut.write_bytes(cut.read_bytes()[:-100])
    save_file({"x": torch.zeros(1)}, foreign)
    for path in (evil, cut, foreign):
        with pytest.raises(ValueError, match=f"{path.name} is not a state file of mixwell, or it is damaged"):
            mixer.load(path)
    assert not (tmp_path / "executed").exists()
    with pytest.raises(FileNotFoundError):
        mixer.load(tmp_path / "absent")


def test_failed_write_keeps_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, mixer = build("momentum", ESTIMATORS["dense"])
    target = tmp_path / "mixer.safetensors"
    mixer.save(target)
    before = target.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        mixer.save(target)
    assert target.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["mixer.safetensors"]
