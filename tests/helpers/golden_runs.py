"""Short runs through the runner, for the record in ``tests/golden``.

Every function takes an empty folder and gives an outcome (:mod:`helpers.golden_outcomes`).
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console

import mixwell
from helpers import synthetic_images
from helpers.golden_outcomes import of_mixer, of_run
from helpers.method_runs import online, run_of
from helpers.text_configs import WORDS, write_config
from mixwell.lab.mnist import experiment
from mixwell.lab.problems import read_config
from mixwell.training import config_io
from mixwell.training.run import Run

Case = Callable[[Path], dict[str, Any]]

# What each method is called in the record, and today.
METHODS = {
    "ado": "ado",
    "aioli": "aioli",
    "doge": "doge",
    "doremi": "doremi",
    "dynamic-loading": "dynamic-loading",
    "fixed": "fixed",
    "group-dro": "group-dro",
    "implicit-cg": "implicit-cg",
    "implicit-neumann": "implicit-neumann",
    "learning-to-reweight": "learning-to-reweight",
    "mentornet": "mentornet",
    "mentornet-dd": "mentornet-dd",
    "meta-weight-net": "meta-weight-net",
    "mixing-laws": "mixing-laws",
    "mixwell": "mixwell",
    "odm": "odm",
    "pike": "pike",
    "pike-balanced": "pike-balanced",
    "proportional": "proportional",
    "regmix": "regmix",
    "single-loop": "single-loop",
    "skill-it": "skill-it",
    "tandem": "tandem",
    "temperature": "temperature",
    "tikmix-d": "tikmix-d",
    "tikmix-m": "tikmix-m",
    "truncated": "truncated",
    "uniform": "uniform",
    "unimax": "unimax",
}
# Those that learn in a proxy by default, and can learn in the run itself.
TRANSFERRED = ("doge", "doremi")
# Settings of a config that change how a small text model is trained.
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "rank above that of the gradients": {"mixer": {"projection_rank": 32}},
    "dense traces": {"mixer": {"traces": "dense"}},
    "bfloat16 traces": {"mixer": {"traces": "bfloat16"}},
    "sketched traces": {"mixer": {"traces": "sketched", "sketch_size": 256}},
    "equal counts, micro-batches": {
        "batch": {"rows": 12, "counts": "equal", "micro_rows": 2},
        "mixer": {"traces": "dense"},
    },
    "mixed batches, micro-batches": {"batch": {"rows": 12, "micro_rows": 4}},
    "sgd, linear schedule, no clipping": {
        "optimizer": {
            "kind": "sgd",
            "lr": 0.1,
            "momentum": 0.5,
            "weight_decay": 0.01,
            "schedule": "linear",
            "warmup": 3,
            "clip_norm": None,
        }
    },
    "floor, cap and prior": {
        "mixer": {
            "floor": {"marks": 0.1},
            "cap": 0.6,
            "prior": {"letters": 1.0, "numbers": 2.0, "marks": 1.0},
            "prior_strength": 0.01,
        }
    },
    "most epochs": {"mixer": {"max_epochs": {"letters": 0.1}}},
    "warm-up, step size, first weights": {
        "mixer": {
            "warmup": 4,
            "step_size": 3.0,
            "weights": {"letters": 1.0, "numbers": 2.0, "marks": 3.0},
            "curvature": 0.1,
        }
    },
    "dropout, bfloat16 autocast": {"model": {"dropout": 0.1}, "precision": "bfloat16"},
    "least rows, seed": {"batch": {"rows": 9, "min_rows_per_domain": 2}, "seed": 5},
}
QUIET = Console(quiet=True)
STEPS = 24
RANK = 8
STOP = 8
"""Steps after which a run is stopped, in the middle of a round."""


def write_demo_texts(folder: Path) -> None:
    """Texts with the names of the demo's files; the demo's own depend on the version of Python."""
    chance = random.Random(0)
    words = {**dict(zip(("code", "manual", "names"), WORDS.values(), strict=True)), "noise": list("xyzuvw")}
    words |= dict.fromkeys(("validation", "test"), WORDS["letters"])
    folder.mkdir()
    for name, some in words.items():
        (folder / f"{name}.txt").write_text(" ".join(chance.choice(some) for _ in range(4000)))


def demo_run(folder: Path, *, changes: tuple[str, ...] = ()) -> dict[str, Any]:
    """The demo's config for a few rounds."""
    write_demo_texts(folder / "data")
    path = folder / "demo.yaml"
    path.write_text(read_config("demo"))
    short = [f"steps={STEPS}", "output.evaluate_every=8", "output.evaluate_rows=16", "output.log_every=4"]
    config = config_io.read_config(path, [*short, *changes])
    return of_run(Run(config, folder / "run", console=QUIET).start(), folder / "run")


def images_run(folder: Path, **changes: Any) -> dict[str, Any]:
    """The config of the embedded problem ``mnist`` for a few rounds, with other images and a narrower network."""
    plain = yaml.safe_load(read_config("mnist"))
    sizes = {"vanilla": 60, "rotated": 50, "noisy": 40, "validation": 30, "test": 20}
    for name, size in sizes.items():
        described = (plain["domains"] if name in plain["domains"] else plain)[name]
        described["python"] = "helpers.synthetic_images:digits"
        described["arguments"]["rows"] = size
    plain |= {"steps": 12, "model": {"kind": "cnn", "channels": 4}, "batch": {"rows": 24}}
    plain |= {"output": {"evaluate_rows": 20, "evaluate_every": 6, "log_every": 3}, **changes}
    run = Run(config_io.validate_config(plain), folder / "run", console=QUIET)
    return of_run(run.start(), folder / "run")


def paper_experiment(folder: Path) -> dict[str, Any]:
    """The paper's experiment on images with a loop of its own."""
    settings = experiment.MnistSettings(
        budget=7, horizon=3, seed=0, channels=2, batch_size=8, train_size=50, validation_size=40
    )
    network, mixer = experiment.build(settings)
    domains = experiment.Domains(synthetic_images.in_place_of_mnist(), settings)
    done = experiment.train(network, mixer, domains, budget=settings.budget)
    return {
        **of_mixer(mixer, network),
        "evaluations": [
            done.validation_loss,
            done.validation_accuracy,
            done.test_loss,
            done.test_accuracy,
        ],
        "steps of the weights": [step for step, _ in done.history],
    }


def python_run(folder: Path) -> dict[str, Any]:
    """``mixwell.train`` with a model and rows in memory."""
    generator = torch.Generator().manual_seed(0)

    def rows(count: int, slope: float) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(count, 3, generator=generator)
        return x, slope * x.sum(dim=1, keepdim=True) + 0.1 * torch.randn(count, 1, generator=generator)

    def row_losses(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        return (model(batch[0]) - batch[1]).square().mean(dim=1)

    torch.manual_seed(0)
    done = mixwell.train(
        {"right": rows(50, 1.0), "wrong": rows(40, -1.0)},
        rows(30, 1.0),
        test=rows(20, 1.0),
        out=folder / "run",
        model=torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)),
        loss=lambda model, batch: row_losses(model, batch).mean(),
        row_losses=row_losses,
        steps=STEPS,
        mixer={"horizon": 6},
        batch={"rows": 12},
        quiet=True,
    )
    return of_run(done, folder / "run")


def method_run(folder: Path, *, name: str, in_the_run: bool = False) -> dict[str, Any]:
    """A method for three rounds, with its proxies, or with its weights learned in the run itself."""
    options = online(name) if in_the_run else None
    return of_run(run_of(folder / "run", name, horizon=4, options=options).start(), folder / "run")


def method_run_resumed(folder: Path, *, name: str) -> dict[str, Any]:
    """The same, stopped in the middle of the second round and resumed."""
    asked = itertools.count()
    stopped = run_of(folder / "run", name, horizon=4, stopping=lambda: next(asked) >= 5)
    _expect_stop(stopped)
    return of_run(run_of(folder / "run", name, horizon=4).resume(), folder / "run")


def text_config(folder: Path, changes: dict[str, Any]) -> Path:
    """Texts, and the config of a small model of them.

    The gradients of so few words are of low rank. Directions beyond it are made of rounding alone and so are
    others on another machine, hence few of them.
    """
    return write_config(folder, **{**changes, "mixer": {"projection_rank": RANK, **changes.get("mixer", {})}})


def text_run(folder: Path, *, changes: dict[str, Any]) -> dict[str, Any]:
    """A small text model, with settings."""
    config = config_io.read_config(text_config(folder, changes))
    return of_run(Run(config, folder / "run", console=QUIET).start(), folder / "run")


def text_run_resumed(folder: Path, *, changes: dict[str, Any]) -> dict[str, Any]:
    """The same, stopped in the middle of the second round and resumed."""
    config = config_io.read_config(text_config(folder, changes))
    asked = itertools.count()
    _expect_stop(Run(config, folder / "run", console=QUIET, stopping=lambda: next(asked) >= STOP))
    return of_run(Run(config, folder / "run", console=QUIET).resume(), folder / "run")


def _expect_stop(run: Run) -> None:
    try:
        run.start()
    except InterruptedError:
        return
    raise AssertionError("the run came to its end")


CASES: dict[str, Case] = {
    "demo": demo_run,
    "demo, uniform": partial(demo_run, changes=("mixer.method=uniform",)),
    "images": images_run,
    "images, dense traces": partial(images_run, mixer={"traces": "dense"}),
    "paper's experiment on images": paper_experiment,
    "run from Python": python_run,
    **{f"method: {name}": partial(method_run, name=now) for name, now in METHODS.items()},
    **{
        f"method: {name}, learned in the run itself": partial(method_run, name=METHODS[name], in_the_run=True)
        for name in TRANSFERRED
    },
    **{f"text: {name}": partial(text_run, changes=changes) for name, changes in SETTINGS.items()},
}
RESUMED: dict[str, Case] = {
    **{
        f"method: {name}": partial(method_run_resumed, name=METHODS[name])
        for name in ("mixwell", "doremi", "pike", "meta-weight-net", "regmix")
    },
    **{f"text: {name}": partial(text_run_resumed, changes=changes) for name, changes in SETTINGS.items()},
}
"""Those that are stopped and resumed, by the case that they must equal to the last bit."""
