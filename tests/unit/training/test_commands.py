"""The other commands of a user's journey."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from helpers.commands import mixwell
from helpers.text_configs import write_config
from mixwell.training import config_io
from mixwell.training.run import Run


def test_plan_prints_cost_of_run(tmp_path: Path) -> None:
    out, _ = mixwell("plan", write_config(tmp_path), cwd=tmp_path)
    assert "T = 5 steps, 5 weight updates" in out
    parameters = int(re.search(r"parameters +([\d,]+)", out)[1].replace(",", ""))  # type: ignore[index]
    config = config_io.read_config(tmp_path / "tiny.yaml")
    trainable, _ = Run(config, tmp_path / "none").load()
    assert parameters == sum(p.numel() for p in trainable.model.parameters())
    # Three traces, the weighted sum, and for the derivative of clipping three sketches of a model that is small.
    assert f"dense {7 * 4 * parameters / 1000:.3g} KB" in out
    assert re.search(r"\d+ ms per step, [\d.]+ times that of fixed weights", out)
    assert not (tmp_path / "runs").exists()


def test_plan_and_run_limit_small_domain(tmp_path: Path) -> None:
    path = write_config(tmp_path)
    (tmp_path / "letters.txt").write_text("alpha beta gamma " * 2)  # two rows, of 192 that the run takes
    out, _ = mixwell("plan", path, cwd=tmp_path)
    assert "greatest weight at first: letters 17% (mixer.options.epochs_ahead" in out
    mixwell("run", path, "--no-report", cwd=tmp_path)
    (done,) = (tmp_path / "runs").iterdir()
    history = json.loads((done / "mixture.json").read_text())["history"]
    assert history[0]["weights"]["letters"] == pytest.approx(2 * 16 / 192)
    out, _ = mixwell("plan", path, "--set", "mixer.options.epochs_ahead=null", cwd=tmp_path)
    assert "greatest weight" not in out


def test_plan_prints_communication_and_memory_of_ranks(tmp_path: Path) -> None:
    args = ("plan", write_config(tmp_path), "--processes", "4", "--set", "mixer.traces=dense")
    out, _ = mixwell(*args, cwd=tmp_path)
    parameters = int(re.search(r"parameters +([\d,]+)", out)[1].replace(",", ""))  # type: ignore[index]
    # Three domains and the sum of their gradients; 3/4 of a gradient is sent to be added up, and as much back.
    assert re.search(r"processes +4, ddp; traces in each: (.*, )?projected", out)
    assert f"dense {parameters * 7 * 4 / 1000:.3g} KB" in out
    assert re.search(
        rf"each sends {parameters * 4 * 2 * 3 / 4 / 1000:.3g} KB in a step \(plain training", out
    )
    _, said = mixwell("plan", "tiny.yaml", "--processes", "0", cwd=tmp_path, status=2)
    assert "--processes must be at least 1, got 0" in said


@pytest.mark.parametrize("traces", ["projected", "dense", "bfloat16", "sketched"])
def test_planned_memory_matches_run(traces: str, tmp_path: Path) -> None:
    from mixwell.training import plan
    from mixwell.training.trainer import Trainer

    config = config_io.read_config(write_config(tmp_path, mixer={"traces": traces, "sketch_size": 500}))
    trainable, rows = Run(config, tmp_path / "none").load()
    trainer = Trainer(config, trainable, rows.domains, rows.validation)
    trainer.step()
    assert plan.trace_memory(config, list(trainable.model.parameters()))[traces] == trainer.mixer.nbytes


def test_custom_tokenizer(tmp_path: Path) -> None:
    config = write_config(tmp_path, steps=6, model={"context": 8})
    out, _ = mixwell("tokenizer", config, "--size", "300", "--out", "tok.json", cwd=tmp_path)
    assert "tok.json has " in out
    mixwell("run", config, "--set", "tokenizer=tok.json", "--out", "run", "--no-report", cwd=tmp_path)
    assert "tokenizer: tok.json" in (tmp_path / "run" / "config.yaml").read_text()


def test_fidelity_is_measured_and_saved(tmp_path: Path) -> None:
    mixwell("run", write_config(tmp_path), "--out", "run", "--no-report", cwd=tmp_path)
    out, _ = mixwell("fidelity", "run", "--steps", "3", cwd=tmp_path)
    assert "tangent cosine" in out
    (kept,) = json.loads((tmp_path / "run" / "fidelity.json").read_text())
    assert kept["horizon"] == 3
    assert "Is the hypergradient right?" in (tmp_path / "run" / "report.html").read_text()


def test_transformers_model(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    shape = transformers.GPT2Config(vocab_size=257, n_positions=32, n_embd=16, n_layer=1, n_head=2)
    transformers.GPT2LMHeadModel(shape).save_pretrained(tmp_path / "gpt2")
    config = write_config(tmp_path, steps=6)
    text = config.read_text()
    settings_of_model = "model: {kind: transformers, path: gpt2, context: 16}\n"
    config.write_text(re.sub(r"model:\n(  .*\n)+", settings_of_model, text))
    mixwell("run", config, "--out", "run", "--no-report", cwd=tmp_path)
    mixwell("run", config, "--out", "new", "--no-report", "--set", "model.pretrained=false", cwd=tmp_path)
    _, err = mixwell("run", config, "--out", "x", "--set", "model.context=64", cwd=tmp_path, status=2)
    assert "model.context is 64, but the model in" in err


def test_cnn_with_custom_data(tmp_path: Path) -> None:
    for name in ("a", "validation"):
        tensors = {"inputs": torch.randn(40, 1, 28, 28), "targets": torch.randint(10, (40,))}
        save_file(tensors, tmp_path / f"{name}.safetensors")
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "def images(rows):\n"
        "    return torch.utils.data.TensorDataset(torch.randn(rows, 1, 28, 28), torch.randint(10, (rows,)))\n"
        "def model(width):\n"
        "    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, width), torch.nn.ReLU(),\n"
        "                              torch.nn.Linear(width, 10))\n"
        "    return net, lambda m, batch: torch.nn.functional.cross_entropy(m(batch[0]), batch[1])\n"
    )
    (tmp_path / "c.yaml").write_text(
        "domains: {a: {tensors: a.safetensors}, b: {python: 'mine:images', arguments: {rows: 30}}}\n"
        "validation: {tensors: validation.safetensors}\n"
        "model: {kind: cnn, channels: 2}\nsteps: 6\nbatch: {rows: 6}\n"
    )
    mixwell("run", "c.yaml", "--out", "cnn", "--no-report", cwd=tmp_path)
    own = ["--set", "model={kind: python, entry: 'mine:model', arguments: {width: 8}}"]
    mixwell("run", "c.yaml", "--out", "own", "--no-report", *own, cwd=tmp_path)
    wrong = ["--set", "model={kind: python, entry: 'mine:images', arguments: {rows: 8}}"]
    _, err = mixwell("run", "c.yaml", "--out", "x", *wrong, cwd=tmp_path, status=2)
    assert "must return (model, loss)" in err
    _, err = mixwell("run", "c.yaml", "--out", "x", "--set", "domains.c=c.yaml", cwd=tmp_path, status=2)
    assert "this model takes no text" in err


def test_external_token_files(tmp_path: Path) -> None:
    np.save(tmp_path / "tokens.npy", np.random.default_rng(0).integers(0, 257, 4000).astype(np.uint16))
    config = write_config(tmp_path, steps=6, domains={"made": {"tokens": "tokens.npy"}})
    mixwell("run", config, "--out", "run", "--no-report", cwd=tmp_path)
    np.save(tmp_path / "tokens.npy", np.full(4000, 300, dtype=np.uint16))
    _, err = mixwell("run", config, "--out", "other", cwd=tmp_path, status=2)
    assert "300" in err
    assert "domains.made" in err


def test_compiled_model(tmp_path: Path) -> None:
    config = write_config(tmp_path, steps=5, output={"evaluate_every": 5})
    mixwell("run", config, "--out", "run", "--no-report", "--set", "compile=true", cwd=tmp_path)


def test_small_demo(tmp_path: Path) -> None:
    """Its text and its commands; what it shows at full size is in results/demo."""
    small = ["--steps", "12", "--workers", "2"]
    out, _ = mixwell("demo", *small, cwd=tmp_path)
    assert "has the lowest mean test loss of 2 methods" in out
    for name in ("demo.yaml", "report.html", "runs/mixwell-0/report.html", "runs/uniform-0/mixture.json"):
        assert (tmp_path / "runs" / "demo" / name).exists()
    fixed = json.loads((tmp_path / "runs/demo/runs/uniform-0/mixture.json").read_text())
    assert set(fixed["weights"]["last"].values()) == {0.25}
    again, _ = mixwell("demo", *small, cwd=tmp_path)
    assert again.splitlines()[-2:] == out.splitlines()[-2:]  # nothing was trained anew
