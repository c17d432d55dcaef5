"""Concurrent runs, and runs from Python."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import mixwell
from helpers.text_configs import TINY, WORDS, lines, write_config
from mixwell.training import concurrent, config_io, metrics, mixture_file
from mixwell.training.concurrent import Planned
from mixwell.training.engines import Engine
from mixwell.training.run import Run
from mixwell.training.trainer import Trainer

SETTINGS: dict[str, dict[str, Any]] = {
    "learned": {},
    "proportional": {"mixer": {"method": "fixed", "weights": "proportional"}},
    "letters": {"mixer": {"method": "fixed"}, "domains": {"letters": "letters.txt"}},
}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with three kinds of tiny runs, two seeds each."""
    folder = tmp_path_factory.mktemp("runs")
    run_all(folder)
    return folder


def run_all(folder: Path, **changes: Any) -> None:
    planned: list[Planned] = []
    for name, settings in SETTINGS.items():
        plain = config_io.read_config(write_config(folder)).model_dump(mode="json")
        plain["mixer"] |= settings.get("mixer", {})
        kept = settings.get("domains", plain["domains"])
        plain["domains"] = {one: plain["domains"][one] for one in kept}
        for seed in (0, 1):
            config = config_io.validate_config({**plain, **changes, "seed": seed})
            planned.append(Planned(config, folder / "out" / f"{name}-{seed}"))
    concurrent.run_all(
        planned, workers=2, unfinished=folder / "out" / "unfinished", console=Console(quiet=True)
    )


def test_concurrent_runs_match_single_runs(done: Path) -> None:
    for name in SETTINGS:
        for seed in (0, 1):
            last = list(metrics.read_metrics(done / "out" / f"{name}-{seed}", "evaluation"))[-1]
            assert last["step"] == 24
            assert 0 < last["losses"]["test"] < 6
    sizes = {name: (done / f"{name}.txt").stat().st_size for name in WORDS}
    for name, weight in mixture_file.read_mixture(done / "out" / "proportional-0")["weights"]["last"].items():
        assert weight == pytest.approx(sizes[name] / sum(sizes.values()), abs=0.01)  # rows are whole
    assert mixture_file.read_mixture(done / "out" / "letters-1")["domains"] == ["letters"]
    own = mixwell.train(
        {name: str(done / f"{name}.txt") for name in WORDS},
        str(done / "validation.txt"),
        test=str(done / "test.txt"),
        out=done / "own",
        quiet=True,
        **TINY,
    )
    assert own.finished
    assert lines(done / "own") == lines(done / "out" / "learned-0")


def test_runs_of_other_settings_are_not_reused(done: Path) -> None:
    optimizer = config_io.read_config(done / "tiny.yaml").model_dump(mode="json")["optimizer"]
    with pytest.raises(
        ValueError, match=r"learned-0 is a run with other settings \(optimizer.lr is 0.\d+ here"
    ):
        run_all(done, optimizer={**optimizer, "lr": 0.5})


def test_train_with_custom_model(tmp_path: Path) -> None:
    """A target made by the first domain's rule: its weight grows, and a second call continues the run."""
    torch.manual_seed(0)

    def rows(sign: float) -> TensorDataset:
        inputs = torch.randn(256, 4)
        return TensorDataset(inputs, (sign * inputs[:, 0] > 0).long())

    domains, validation = {"right": rows(1), "wrong": rows(-1)}, rows(1)

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1])

    def go(steps: int, folder: str, *, resume: bool = False) -> Trainer:
        torch.manual_seed(1)
        return mixwell.train(
            domains,
            validation,
            model=nn.Linear(4, 2),
            loss=loss,
            out=tmp_path / folder,
            steps=steps,
            batch={"rows": 16},
            optimizer={"kind": "sgd", "lr": 0.1},
            resume=resume,
            quiet=True,
        )

    done = go(60, "run")
    assert done.mixer.weights.last["right"] > 0.7
    assert json.loads((tmp_path / "run" / "mixture.json").read_text())["finished"]
    with pytest.raises(OSError, match="there is a run in .* already"):
        go(60, "run")
    with pytest.raises(ValueError, match="steps is 50 here and 60 there"):
        go(50, "run", resume=True)
    again = go(60, "run", resume=True)
    assert all(
        torch.equal(a, b) for a, b in zip(done.model.parameters(), again.model.parameters(), strict=True)
    )


def test_constant_weights_without_signal() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = {"a": 0.7, "b": 0.3}
    mixer = mixwell.Mixer(
        model, optimizer, list(given), horizon=2, weights=given, signal=mixwell.ConstantWeights()
    )
    for _ in range(6):
        for name in given:
            with mixer.domain(name):
                model(torch.randn(3, 2)).square().mean().backward()
        mixer.step()
        if mixer.validation_due:
            with mixer.validation():
                model(torch.randn(3, 2)).square().mean().backward()
    assert mixer.weights.last == pytest.approx(given)


def test_the_engine_is_checked_where_trials_need_it(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    engine, quiet = Engine("ray", "127.0.0.1:1"), Console(quiet=True)
    config = config_io.read_config(write_config(tmp_path, mixer={"method": "doremi"}))
    with pytest.raises(OSError, match="no Ray cluster answers at 127.0.0.1:1"):
        Run(config, tmp_path / "run", console=quiet, workers=None, engine=engine).start()
    assert not (tmp_path / "run").exists()
    config = config_io.read_config(write_config(tmp_path))
    assert Run(config, tmp_path / "run", console=quiet, workers=None, engine=engine).start().finished
