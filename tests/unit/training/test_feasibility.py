"""Runs that cannot fit into memory are refused before anything is allocated."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch
import yaml

from helpers.commands import mixwell
from helpers.text_configs import write_config
from mixwell.training.config import Config
from mixwell.training.feasibility import needed_bytes
from mixwell.training.models.base import ModelConfig
from mixwell.training.models.cnn import CnnConfig, classification_losses
from mixwell.training.models.gpt import GptConfig
from mixwell.utils.memory import is_out_of_memory

SIZES = ["model.layers", "model.width", "model.context", "batch.rows", "mixer.sketch_size"]


def settings(key: str, size: int) -> list[str]:
    more = ["--set", "mixer.traces=sketched"] if key == "mixer.sketch_size" else []
    return ["--set", f"{key}={size}", *more]


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.parametrize("size", [10**12, 10**30])
@pytest.mark.parametrize("key", SIZES)
@pytest.mark.parametrize("command", ["plan", "run"])
def test_sizes_that_cannot_fit_are_refused(command: str, key: str, size: int, tmp_path: Path) -> None:
    write_config(tmp_path)
    before = peak()
    _, err = mixwell(command, "tiny.yaml", *settings(key, size), cwd=tmp_path, status=2)
    assert "the run needs at least" in err
    assert "TB of memory" in err
    assert key.split(".")[0] in err
    assert peak() - before < 300e6
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("key", ["model.layers", "model.width", "batch.rows"])
def test_fidelity_and_resume_refuse_them_too(key: str, tmp_path: Path) -> None:
    write_config(tmp_path, steps=4, mixer={"horizon": 2})
    mixwell("run", "tiny.yaml", "--out", "run", "--no-report", cwd=tmp_path)
    config = tmp_path / "run/config.yaml"
    plain = yaml.safe_load(config.read_text())
    section, name = key.split(".")
    plain[section][name] = 10**12
    config.write_text(yaml.safe_dump(plain))
    before = peak()
    _, err = mixwell("fidelity", "run", "--steps", "1", cwd=tmp_path, status=2)
    assert "the run needs at least" in err
    mixwell("resume", "run", "--no-report", cwd=tmp_path, status=2)
    assert peak() - before < 300e6


def test_plan_counts_traces_that_nobody_could_hold(tmp_path: Path) -> None:
    write_config(tmp_path)
    out, _ = mixwell("plan", "tiny.yaml", "--set", f"mixer.sketch_size={10**30}", cwd=tmp_path)
    assert "sketched 1.2e+19 TB" in out


@pytest.mark.parametrize(
    "model",
    [
        GptConfig(layers=2, heads=2, width=32, context=16),
        GptConfig(layers=3, heads=4, width=64, context=8),
        CnnConfig(channels=3, classes=5),
    ],
    ids=["gpt", "deep gpt", "cnn"],
)
def test_size_is_counted_and_never_too_large(model: ModelConfig) -> None:
    trainable = model.build(base=Path(), vocabulary=100)
    size = model.size(100)
    assert size is not None
    assert size.parameters == sum(p.numel() for p in trainable.model.parameters())
    assert size.buffers == sum(b.numel() for b in trainable.model.buffers())
    assert size.modules <= len(list(trainable.model.modules()))
    parameters = {p.untyped_storage().data_ptr() for p in trainable.model.parameters()}
    saved: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    rows = 16
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        if isinstance(model, GptConfig):
            assert trainable.row_losses is not None
            trainable.row_losses(trainable.model, torch.randint(100, (rows, model.context + 1)))
        else:
            batch = torch.rand(rows, 1, 28, 28), torch.zeros(rows, dtype=torch.long)
            classification_losses(trainable.model, batch)
    held = sum(t.untyped_storage().nbytes() for k, t in saved.items() if k not in parameters)
    gradient_of_logits = 4 * rows * 100 * getattr(model, "context", 0)
    assert 0.4 * held < 4 * rows * size.activations < held + gradient_of_logits


def test_each_part_follows_its_settings() -> None:
    model = {"layers": 2, "width": 32, "heads": 2, "context": 16}
    plain = {"domains": {"a": "a.txt", "b": "b.txt"}, "validation": "v.txt", "model": model}

    def total(**changes: object) -> int:
        config = Config.model_validate({**plain, **changes})
        return sum(needed_bytes(config, config.model.size(257)).values())

    size = GptConfig(**model).size(257)
    assert size is not None
    fixed, dense = {"method": "fixed"}, {"traces": "dense"}
    assert total(batch={"rows": 64}) > total(batch={"rows": 32})
    assert total(batch={"rows": 64, "micro_rows": 8}) < total(batch={"rows": 32})
    assert total(mixer=dense) - total(mixer=fixed) == 2 * 4 * size.parameters
    adamw, sgd = total(mixer=fixed), total(mixer=fixed, optimizer={"kind": "sgd"})
    assert adamw - sgd == 2 * 4 * size.parameters


def test_memory_that_cannot_be_allocated_is_one_line(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    (tmp_path / "greedy.py").write_text("import torch\ndef make():\n    return torch.empty(1 << 60)\n")
    plain = yaml.safe_load(config.read_text()) | {"model": {"kind": "python", "entry": "greedy:make"}}
    config.write_text(yaml.safe_dump(plain))
    _, err = mixwell("run", config, "--no-report", cwd=tmp_path, status=2)
    assert "mixwell: out of memory" in err
    assert len(err.splitlines()) == 1


def test_other_errors_are_not_taken_for_lack_of_memory() -> None:
    with pytest.raises(RuntimeError) as error:
        torch.dot(torch.ones(2), torch.ones(3))
    assert not is_out_of_memory(error.value)
    assert is_out_of_memory(MemoryError())
