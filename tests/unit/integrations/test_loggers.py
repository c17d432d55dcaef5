"""Loggers: each tool for real, offline, and read back by its own reader."""

from __future__ import annotations

import json
import random
import re
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, final

import numpy as np
import pytest
import torch
import yaml
from hypothesis import example, given
from hypothesis import settings as trying
from hypothesis import strategies as st
from rich.console import Console

import mixwell as package
from helpers.commands import mixwell
from helpers.text_configs import lines, write_config
from mixwell.integrations.loggers import (
    JsonlLogger,
    Logger,
    MlflowLogger,
    TensorBoardLogger,
    WandbLogger,
    named,
    named_evaluation,
    named_step,
    portable,
)
from mixwell.integrations.loggers.wandb import WandbConfig
from mixwell.mixer.records import RoundRecord
from mixwell.training import config_io
from mixwell.training.logging.base import Outcome
from mixwell.training.run import Run

# MLflow's store in SQLite uses what SQLAlchemy 2.1 has deprecated.
pytestmark = pytest.mark.filterwarnings(
    "ignore:The ``noload`` loader strategy is deprecated:DeprecationWarning"
)

ODD = "C++/v1.5 [é]: .."
"""A domain whose name is a path, has letters beyond ASCII, and characters that MLflow refuses."""
RECORD = RoundRecord(
    index=1,
    first_step=10,
    steps=5,
    weights={"web": 0.5, ODD: 0.5},
    scores={"web": -0.25, ODD: 0.5},
    step_size=2.0,
    new_weights={"web": 0.75, ODD: 0.25},
    losses={"web": 3.0, ODD: 4.0, "validation": 3.5},
    skipped={ODD: 2},
    noise={"web": 0.125, ODD: 0.0625},
    measured={"curvature": 0.5},
)
VALUES = {
    "mixwell/weight/web": 0.75,
    f"mixwell/weight/{ODD}": 0.25,
    "mixwell/hypergradient/web": -0.25,
    f"mixwell/hypergradient/{ODD}": 0.5,
    "mixwell/noise/web": 0.125,
    f"mixwell/noise/{ODD}": 0.0625,
    "mixwell/loss/web": 3.0,
    f"mixwell/loss/{ODD}": 4.0,
    "mixwell/loss/validation": 3.5,
    f"mixwell/skipped/{ODD}": 2.0,
    "mixwell/step_size": 2.0,
    "mixwell/measured/curvature": 0.5,
}

Points = dict[str, list[tuple[int, float]]]
"""By name, steps and values in the order in which a tool has them."""


# ------------------------------------------------------------------------------------------- readers


def points(rows: Iterator[tuple[int, Mapping[str, float]]]) -> Points:
    found: Points = {}
    for step, values in rows:
        for name, value in values.items():
            found.setdefault(name, []).append((step, value))
    return found


def of_jsonl(path: Path) -> Points:
    read = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return points((line.pop("step"), line) for line in read)


def of_tensorboard(folder: Path) -> Points:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read: Any = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    read.Reload()
    return {name: [(e.step, e.value) for e in read.Scalars(name)] for name in read.Tags()["scalars"]}


def records(path: Path) -> Iterator[Any]:
    # What W&B has written: protocol buffers in the format of LevelDB's log, after seven bytes of its own.
    from wandb.proto.wandb_internal_pb2 import Record

    content, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(content):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        size, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        whole += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(whole)
            whole = b""


def wandb_files(folder: Path) -> list[Path]:
    import wandb

    wandb.teardown()  # its service has written everything when it has ended
    return sorted((folder / "wandb").glob("offline-run-*/run-*.wandb"))


def of_wandb(folder: Path) -> Points:
    rows: list[tuple[int, dict[str, float]]] = []
    for path in wandb_files(folder):
        for record in records(path):
            if record.WhichOneof("record_type") == "history":
                read = {
                    item.key or "/".join(item.nested_key): item.value_json for item in record.history.item
                }
                values = {name: json.loads(text) for name, text in read.items()}
                rows.append((values["_step"], {k: v for k, v in values.items() if not k.startswith("_")}))
    return points(iter(rows))


def of_mlflow(uri: str, run: str, names: Iterable[str] | None = None) -> Points:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    names = client.get_run(run).data.metrics if names is None else names
    return {name: [(m.step, m.value) for m in client.get_metric_history(run, name)] for name in names}


# ------------------------------------------------------------------------------------------- tools


@pytest.fixture
def wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    # Everything that it writes is in `tmp_path`, and a test fails where it tries to reach anyone.
    module = pytest.importorskip("wandb")
    module.teardown()  # its service of another test has another environment
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(home / name))
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_DIR", "WANDB_PROJECT", "NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_CONSOLE", "off")
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.getsockname()[1]}")
        yield module
        module.teardown()
        proxy.setblocking(False)
        with pytest.raises(BlockingIOError):
            proxy.accept()


@pytest.fixture(params=["file", "sqlite"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of a local store of MLflow."""
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    if request.param == "file":
        return (tmp_path / "mlruns").as_uri()
    pytest.importorskip("sqlalchemy")
    pytest.importorskip("alembic")
    return f"sqlite:///{tmp_path / 'mlflow.db'}"


# ------------------------------------------------------------------------------------------- names


def test_names_are_stable() -> None:
    assert named(RECORD) == VALUES
    assert named_step(losses={"web": 3}, rows={"web": 64}, loss=2.0, learning_rate=0.1) == {
        "mixwell/step_loss/web": 3.0,
        "mixwell/rows/web": 64.0,
        "mixwell/training_loss": 2.0,
        "mixwell/learning_rate": 0.1,
    }
    assert named_evaluation({"validation": 1.0, "test": 2.0}) == {
        "mixwell/evaluation/validation": 1.0,
        "mixwell/evaluation/test": 2.0,
    }


def test_metric_names_of_a_step_are_unique() -> None:
    """A step, a round and an evaluation at once, with a domain that is called like a set of rows."""
    domains = {"web": 1, "test": 1, "learning_rate": 1}
    record = RoundRecord(
        0, 0, 5, domains, domains, 1.0, domains, {**domains, "validation": 1}, domains, domains
    )  # type: ignore[arg-type]
    apart = [
        named(record),
        named_step(losses=domains, rows=domains, loss=1, learning_rate=1),
        named_evaluation({"validation": 1, "test": 1}),
    ]
    together = {name for values in apart for name in values}
    assert len(together) == sum(map(len, apart))
    assert len({portable(name) for name in together}) == len(together)
    assert not {name.rpartition("/")[0] for name in together} & together


def original(portable_name: str) -> str:
    return re.sub(r"_x([0-9a-f]*)_", lambda m: chr(int(m[1], 16)) if m[1] else "", portable_name)


@trying(deadline=None)
@given(st.text())
@example("_x41_")
@example("_x_")
@example("_x+")
@example("_x4" + "/")
@example("..")
@example("")
@example("a" * 300)
@example("é" * 200)
def test_portable_names_are_valid_in_mlflow(domain: str) -> None:
    validation = pytest.importorskip("mlflow.utils.validation")
    name = portable(f"mixwell/weight/{domain}")
    validation._validate_metric_name(name)
    assert len(name) <= validation.MAX_ENTITY_KEY_LENGTH
    assert all(len(part.encode()) <= 255 for part in name.split("/"))
    prefix, kind, safe = name.split("/")
    assert (prefix, kind) == ("mixwell", "weight")
    if len(name.encode()) < 250:
        assert original(safe) == domain


def test_plain_names_are_unchanged_and_long_ones_unique() -> None:
    for name in [*VALUES, "train/accuracy", "mixwell/rows/wiki_xl v2-en"]:
        assert ODD in name or portable(name) == name
    long = ["mixwell/weight/" + "a" * 400 + end for end in ("b", "c")]
    assert portable(long[0]) != portable(long[1])


# ------------------------------------------------------------------------------------------- one by one


def test_logger_in_custom_loop(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mixer = package.Mixer(model, optimizer, ["web", "code"], horizon=2)
    with JsonlLogger(tmp_path / "deep" / "log.jsonl") as logger:
        for _ in range(4):
            for domain in ("web", "code"):
                with mixer.domain(domain):
                    model(torch.randn(4, 3)).square().mean().backward()
            mixer.step()
            logger.step(mixer.steps_done, rows={"web": 4 * mixer.steps_done}, learning_rate=0.1)
            if mixer.validation_due:
                with mixer.validation():
                    model(torch.randn(4, 3)).square().mean().backward()
                logger.round(mixer.rounds[-1])
    read = of_jsonl(tmp_path / "deep" / "log.jsonl")
    assert [step for step, _ in read["mixwell/weight/web"]] == [2, 4]
    assert read["mixwell/weight/code"][-1] == (4, mixer.weights.last["code"])
    assert read["mixwell/hypergradient/web"][0] == (2, mixer.rounds[0].scores["web"])
    assert read["mixwell/rows/web"] == [(1, 4), (2, 8), (3, 12), (4, 16)]
    with pytest.raises(RuntimeError, match="this logger is closed"):
        logger.log(5, {"a": 1.0})
    logger.close()


def test_jsonl_continues_from_step(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with JsonlLogger(path) as logger:
        for step in range(5):
            logger.log(step, {"a": float(step) if step else float("nan")})
        logger.flush()
    with path.open("a") as file:
        file.write('{"step": 5, "a"')  # a process died here
    with JsonlLogger(path, after=2) as logger:
        logger.log(2, {"a": 20.0})  # is there already
        logger.log(3, {"a": 30.0})
    assert of_jsonl(path) == {"a": [(0, None), (1, 1.0), (2, 2.0), (3, 30.0)]}
    with JsonlLogger(path) as logger:
        logger.log(4, {"a": 40.0})
    assert of_jsonl(path)["a"][-1] == (4, 40.0)


def test_jsonl_does_not_change_other_files(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text('{"text": "precious"}\n')
    with pytest.raises(ValueError, match=r"mine.jsonl:1 is not a line of this logger"):
        JsonlLogger(path, after=3)
    assert path.read_text() == '{"text": "precious"}\n'


def test_tensorboard_round_trip(tmp_path: Path) -> None:
    with TensorBoardLogger(tmp_path) as logger:
        logger.round(RECORD)
    assert of_tensorboard(tmp_path) == {name: [(15, value)] for name, value in VALUES.items()}


def test_tensorboard_drops_events_after_checkpoint(tmp_path: Path) -> None:
    killed = TensorBoardLogger(tmp_path)
    for step in range(6):
        killed.log(step, {"a": float(step)})
    killed.flush()  # and it is not closed
    with TensorBoardLogger(tmp_path, after=3) as logger:
        for step in range(3, 6):
            logger.log(step, {"a": 10.0 * step})
    assert of_tensorboard(tmp_path) == {"a": [(0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0), (5, 50.0)]}
    killed.close()


def test_wandb_offline_round_trip(wandb: Any, tmp_path: Path) -> None:
    before = set(tmp_path.iterdir())
    options: dict[str, Any] = {"project": "mixtures", "mode": "offline", "folder": tmp_path}
    with WandbLogger(**options, name="first", settings={"steps": 20}) as logger:
        logger.round(RECORD)
        identity = logger.identity
    with WandbLogger(**options, **identity, after=15) as logger:
        logger.round(RECORD)  # is there already
        logger.log(20, {"mixwell/weight/web": 0.5})
    assert set(tmp_path.iterdir()) - before == {tmp_path / "wandb"}
    first, second = (list(records(path)) for path in wandb_files(tmp_path))
    runs = [next(r.run for r in session if r.HasField("run")) for session in (first, second)]
    assert [(run.run_id, run.project) for run in runs] == [(identity["id"], "mixtures")] * 2
    assert runs[0].display_name == "first"
    assert {update.key: update.value_json for update in runs[0].config.update}["steps"] == "20"
    axes = {r.metric.glob_name: r.metric.step_metric for r in first if r.HasField("metric")}
    assert axes["mixwell/*"] == "mixwell/step"
    assert [r.exit.exit_code for r in first if r.HasField("exit")] == [0]
    expected: Points = {name: [(15, value)] for name, value in VALUES.items()}
    expected["mixwell/weight/web"].append((20, 0.5))
    assert of_wandb(tmp_path) == {**expected, "mixwell/step": [(15, 15), (20, 20)]}


@pytest.mark.parametrize(("error", "code"), [(InterruptedError, 255), (ZeroDivisionError, 1)])
def test_wandb_records_outcome(error: type[Exception], code: int, wandb: Any, tmp_path: Path) -> None:
    with pytest.raises(error):
        with WandbLogger(mode="offline", folder=tmp_path):
            raise error
    (path,) = wandb_files(tmp_path)
    assert [r.exit.exit_code for r in records(path) if r.HasField("exit")] == [code]


def test_open_wandb_run_stays_open(wandb: Any, tmp_path: Path) -> None:
    run = wandb.init(mode="offline", dir=str(tmp_path), reinit="create_new")
    with pytest.raises(ValueError, match="which has its own project; give only the run"):
        WandbLogger(run=run, project="other")
    for number in range(30):
        run.log({"mine": number})
    with WandbLogger(run=run) as logger:
        logger.log(15, {"mixwell/weight/web": 0.5})
    run.log({"mine": 30})
    run.finish()
    read = of_wandb(tmp_path)
    assert read["mine"] == [*((n, n) for n in range(30)), (31, 30)]
    assert read["mixwell/weight/web"] == [(30, 0.5)]
    assert read["mixwell/step"] == [(30, 15)]


def test_wandb_start_failure_explains_fix(wandb: Any, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="Weights & Biases cannot begin a run .*`wandb login`, or mode: offline"
    ):
        WandbLogger(mode="online", folder=tmp_path)  # nobody is logged in


def test_mlflow_round_trip(store: str) -> None:
    with MlflowLogger(
        uri=store, experiment="mixtures", name="first", settings={"a": {ODD: 1, "b": None}}
    ) as logger:
        logger.round(RECORD)
        logger.log(16, {f"mixwell/rows/{n}": float(n) for n in range(1001)})  # more than MLflow takes at once
        identity = logger.identity
    assert identity["uri"] == store
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=store)
    run = client.get_run(identity["id"])
    assert (run.info.run_name, run.info.status) == ("first", "FINISHED")
    assert client.get_experiment(run.info.experiment_id).name == "mixtures"
    assert sorted(run.data.params.values()) == ["1", "None"]
    assert len(run.data.metrics) == len(VALUES) + 1001
    read = of_mlflow(store, identity["id"], map(portable, VALUES))
    assert {name: read[portable(name)] for name in VALUES} == {
        name: [(15, value)] for name, value in VALUES.items()
    }
    with pytest.raises(InterruptedError), MlflowLogger(uri=store, id=identity["id"], after=15) as logger:
        assert client.get_run(identity["id"]).info.status == "RUNNING"
        logger.round(RECORD)  # is there already
        logger.log(20, {"mixwell/weight/web": 0.5})
        raise InterruptedError
    assert client.get_run(identity["id"]).info.status == "KILLED"
    name = "mixwell/weight/web"
    assert of_mlflow(store, identity["id"], [name]) == {name: [(15, 0.75), (20, 0.5)]}


def test_open_mlflow_run_stays_open(store: str) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=store)
    run = client.create_run(client.create_experiment("mine")).info.run_id
    with pytest.raises(ValueError, match="give only the run"):
        MlflowLogger(uri=store, run=run, experiment="other")
    with MlflowLogger(uri=store, run=run) as logger:
        logger.log(3, {"mixwell/weight/web": float("nan")})
    assert client.get_run(run).info.status == "RUNNING"
    ((step, value),) = of_mlflow(store, run)["mixwell/weight/web"]
    assert step == 3
    assert np.isnan(value)


# ------------------------------------------------------------------------------------------- missing tools


@pytest.mark.parametrize(
    ("module", "logger", "extra"),
    [
        ("tensorboard", "TensorBoardLogger('runs')", "tensorboard"),
        ("wandb", "WandbLogger(mode='offline')", "wandb"),
        ("mlflow", "MlflowLogger()", "mlflow"),
    ],
)
def test_missing_package_names_install_command(module: str, logger: str, extra: str, tmp_path: Path) -> None:
    code = f"import sys; sys.modules[{module!r}] = None\nfrom mixwell.integrations.loggers import *\n{logger}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ValueError: logging to ")
    assert last.endswith(f"pip install 'mixwell[{extra}]'")
    assert not any(tmp_path.iterdir())


def test_run_with_missing_package_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    config = write_config(tmp_path, loggers={"tensorboard": True, "wandb": True})
    _, err = mixwell("run", config, "--out", "run", cwd=tmp_path, status=2)
    assert len(err.splitlines()) == 1
    assert "logging to Weights & Biases needs its package" in err
    assert "pip install 'mixwell[wandb]'" in err
    assert not (tmp_path / "run").exists()


def test_loggers_import_packages_lazily() -> None:
    code = "import mixwell.integrations.loggers, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "numpy", "tensorboard", "wandb", "mlflow"} & set(done.stdout.split())


# ------------------------------------------------------------------------------------------- runs


def settled(folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    return lines(folder), json.loads((folder / "mixture.json").read_text())


@pytest.fixture
def config(tmp_path: Path, wandb: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny run, one domain of which has an odd name, with every logger."""
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MIXWELL_CACHE", str(tmp_path / "cache"))
    loggers = {
        "tensorboard": True,
        "wandb": {"mode": "offline", "project": "mixtures"},
        "mlflow": {"uri": (tmp_path / "mlruns").as_uri(), "experiment": "mixtures"},
        "jsonl": True,
    }
    return write_config(tmp_path, domains={ODD: "letters.txt"}, loggers=loggers)


def everywhere(run: Path, tmp_path: Path) -> dict[str, Points]:
    """What each tool has of a run."""
    noted = json.loads((run / "loggers.json").read_text())
    found = {
        "jsonl": of_jsonl(run / "logged.jsonl"),
        "tensorboard": of_tensorboard(run / "tensorboard"),
        "wandb": of_wandb(run),
        "mlflow": of_mlflow(noted["mlflow"]["uri"], noted["mlflow"]["id"]),
    }
    del found["wandb"]["mixwell/step"]
    return found


def expect_the_same_everywhere(run: Path, tmp_path: Path) -> None:
    """All tools have what metrics.jsonl says, each number once, under the same names."""
    found = everywhere(run, tmp_path)
    reference = found["jsonl"]
    for steps in reference.values():
        assert len({step for step, _ in steps}) == len(steps)
    assert found["wandb"] == reference
    assert found["mlflow"] == {portable(name): steps for name, steps in reference.items()}
    assert found["tensorboard"].keys() == reference.keys()
    for name, steps in reference.items():  # TensorBoard's numbers are float32
        assert found["tensorboard"][name] == [(step, float(np.float32(value))) for step, value in steps]
    written = lines(run)
    rounds = [line for line in written if line["kind"] == "round"]
    for record in rounds:
        for domain, weight in record["new_weights"].items():
            assert (record["step"], weight) in reference[f"mixwell/weight/{domain}"]
            assert (record["step"], record["scores"][domain]) in reference[f"mixwell/hypergradient/{domain}"]
    assert len(reference["mixwell/step_size"]) == len(rounds)
    steps = [line for line in written if line["kind"] == "step"]
    rows = dict.fromkeys(rounds[0]["weights"], 0)
    for line in steps:
        assert (line["step"], line["lr"]) in reference["mixwell/learning_rate"]
        for domain, loss in line["losses"].items():
            rows[domain] += line["counts"][domain]
            assert (line["step"], loss) in reference[f"mixwell/step_loss/{domain}"]
            assert (line["step"], rows[domain]) in reference[f"mixwell/rows/{domain}"]
    evaluations = [
        (line["step"], line["losses"]["validation"]) for line in written if line["kind"] == "evaluation"
    ]
    assert reference["mixwell/evaluation/validation"] == evaluations


def test_loggers_do_not_change_run(config: Path, tmp_path: Path) -> None:
    out, _ = mixwell("run", config, "--out", "logged", "--no-report", cwd=tmp_path)
    assert "logging to tensorboard --logdir logged/tensorboard" in out
    expect_the_same_everywhere(tmp_path / "logged", tmp_path)
    off = [
        word
        for tool in ("tensorboard", "wandb", "mlflow", "jsonl")
        for word in ("--set", f"loggers.{tool}=false")
    ]
    mixwell("run", config, "--out", "plain", "--no-report", *off, cwd=tmp_path)
    assert settled(tmp_path / "logged") == settled(tmp_path / "plain")
    made = {path.name for path in (tmp_path / "logged").iterdir()}
    assert made - {path.name for path in (tmp_path / "plain").iterdir()} == {
        "loggers.json",
        "logged.jsonl",
        "tensorboard",
        "wandb",
    }
    # The name of a run is free only if nothing of another one is there.
    (tmp_path / "logged" / "config.yaml").unlink()
    (tmp_path / "taken" / "tensorboard").mkdir(parents=True)
    _, err = mixwell("run", config, "--out", "taken", cwd=tmp_path, status=2)
    assert "tensorboard already exists" in err


def test_resumed_run_continues_same_logs(config: Path, tmp_path: Path) -> None:
    """Stopped in the middle; then its last checkpoint is lost, as where a process is killed; then to the end."""
    folder = tmp_path / "run"
    asked = iter([False] * 17 + [True])
    options: dict[str, Any] = {"console": Console(quiet=True)}
    with pytest.raises(InterruptedError):
        Run(config_io.read_config(config), folder, **options, stopping=lambda: next(asked)).start()
    noted = json.loads((folder / "loggers.json").read_text())
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=noted["mlflow"]["uri"])
    assert client.get_run(noted["mlflow"]["id"]).info.status == "KILLED"
    (last,) = (folder / "checkpoints").glob("step-*17")
    for file in last.iterdir():
        file.unlink()
    last.rmdir()
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-00000014"]
    mixwell("resume", "run", "--no-report", cwd=tmp_path)
    assert json.loads((folder / "loggers.json").read_text()) == noted
    assert client.get_run(noted["mlflow"]["id"]).info.status == "FINISHED"
    assert len(wandb_files(folder)) == 2
    expect_the_same_everywhere(folder, tmp_path)


def test_loggers_can_be_added_on_resume(config: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    plain = yaml.safe_load(config.read_text())
    chosen = plain.pop("loggers")
    config.write_text(yaml.safe_dump(plain))
    asked = iter([False] * 10 + [True])
    with pytest.raises(InterruptedError):
        Run(
            config_io.read_config(config), folder, console=Console(quiet=True), stopping=lambda: next(asked)
        ).start()
    kept = yaml.safe_load((folder / "config.yaml").read_text())
    (folder / "config.yaml").write_text(yaml.safe_dump({**kept, "loggers": chosen}))
    mixwell("resume", "run", "--no-report", cwd=tmp_path)
    for found in everywhere(folder, tmp_path).values():
        assert [step for step, _ in found["mixwell/learning_rate"]] == [12, 16, 20, 24]


def test_logger_start_failure_stops_run_before_training(config: Path, tmp_path: Path) -> None:
    bad = ("--set", "loggers.mlflow.uri=nonsense://nowhere")
    _, err = mixwell("run", config, "--out", "run", *bad, cwd=tmp_path, status=2)
    assert len(err.splitlines()) == 1
    assert "loggers.mlflow: MLflow cannot begin a run in nonsense://nowhere" in err
    assert list((tmp_path / "run").iterdir()) == []
    (tmp_path / "file").write_text("")
    bad = ("--set", "loggers.tensorboard.folder=file")
    _, err = mixwell("run", config, "--out", "run", *bad, cwd=tmp_path, status=2)
    assert "loggers.tensorboard: " in err.splitlines()[-1]
    assert list((tmp_path / "run").iterdir()) == []
    mixwell("run", config, "--out", "run", "--no-report", cwd=tmp_path)


def test_local_mlflow_store_is_independent_of_cwd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("mlflow", "sqlalchemy", "alembic"):
        pytest.importorskip(name)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    config = write_config(tmp_path, steps=6, loggers={"mlflow": {"uri": "sqlite:///mine.db"}})
    (tmp_path / "elsewhere").mkdir()
    asked = iter([False] * 3 + [True])
    monkeypatch.setenv("MIXWELL_CACHE", str(tmp_path / "cache"))
    with pytest.raises(InterruptedError):
        Run(
            config_io.read_config(config),
            tmp_path / "run",
            console=Console(quiet=True),
            stopping=lambda: next(asked),
        ).start()
    mixwell("resume", "../run", "--no-report", cwd=tmp_path / "elsewhere")
    noted = json.loads((tmp_path / "run" / "loggers.json").read_text())["mlflow"]
    assert noted["uri"] == f"sqlite:///{tmp_path}/mine.db"
    assert [step for step, _ in of_mlflow(noted["uri"], noted["id"])["mixwell/learning_rate"]] == [4, 6]
    assert list((tmp_path / "elsewhere").glob("*.db")) == []


# ------------------------------------------------------------------------------------------- from Python


@final
class Awkward(Logger):
    """Draws from every generator, and fails at a step."""

    forgets: ClassVar[bool] = False

    def __init__(self, *, fails_at: int) -> None:
        super().__init__()
        self.steps: list[int] = []
        self.ended = False
        self._fails_at = fails_at

    @property
    def place(self) -> str:
        return "here"

    def _write(self, step: int, values: Mapping[str, float]) -> None:
        drawn = random.random() + np.random.rand() + float(torch.rand(1))
        if drawn >= 0 and step >= self._fails_at:
            raise OSError("the wire is cut")
        self.steps.append(step)

    def _end(self, outcome: Outcome) -> None:
        self.ended = True


def train(out: Path, loggers: Any = ()) -> Any:
    """A run whose model and data draw from all generators."""
    torch.manual_seed(0)
    rows = {name: (torch.randn(64, 3), torch.randint(2, (64,))) for name in ("a", "b", "validation")}
    validation = rows.pop("validation")
    model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 2))

    def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        noise = random.random() + np.random.rand()
        return torch.nn.functional.cross_entropy(model(batch[0] + noise), batch[1])

    output = {"log_every": 2, "checkpoint_every": 5}
    options: dict[str, Any] = {"steps": 20, "output": output, "quiet": True, "mixer": {"horizon": 5}}
    return package.train(rows, validation, model=model, loss=loss, out=out, loggers=loggers, **options)


def test_failing_logger_does_not_change_run(tmp_path: Path) -> None:
    without = train(tmp_path / "without")
    awkward, steady = Awkward(fails_at=9), Awkward(fails_at=99)
    with pytest.warns(UserWarning, match=r"the logger Awkward 1 failed \(the wire is cut\) and is dropped"):
        done = train(tmp_path / "with", [awkward, steady])
    assert awkward.steps == [step for step in steady.steps if step < 9]
    assert steady.steps[-1] == 20
    assert not awkward.ended
    assert not steady.ended  # whoever has opened it closes it
    assert settled(tmp_path / "with") == settled(tmp_path / "without")
    assert done.mixer.weights.last == without.mixer.weights.last
    for mine, theirs in zip(done.model.parameters(), without.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_train_accepts_logger_config(tmp_path: Path) -> None:
    done = train(tmp_path / "run", {"tensorboard": True, "jsonl": {"path": str(tmp_path / "log.jsonl")}})
    read = of_tensorboard(tmp_path / "run" / "tensorboard")
    assert read["mixwell/weight/a"][-1] == (20, float(np.float32(done.mixer.weights.last["a"])))
    assert of_jsonl(tmp_path / "log.jsonl").keys() == read.keys()
    assert not (tmp_path / "run" / "loggers.json").exists()


# ------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("loggers.wandb.projct=x", "loggers.wandb.projct is not a setting; did you mean project?"),
        (
            "loggers.tensorbord=true",
            "loggers.tensorbord: unknown logger 'tensorbord'; did you mean tensorboard?",
        ),
        ("loggers.mlflow=3", "loggers.mlflow: give true, false, or settings by name, got 3"),
        (
            "loggers.wandb.mode=silent",
            "loggers.wandb.mode must be 'online', 'offline' or 'disabled', got 'silent'",
        ),
    ],
)
def test_error_messages_of_settings(change: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        config_io.read_config(write_config(tmp_path), [change])


def test_settings_enable_and_disable_loggers(tmp_path: Path) -> None:
    path = write_config(tmp_path, loggers={"tensorboard": True, "wandb": True, "mlflow": {"uri": "http://x"}})
    read = config_io.read_config(
        path, ["loggers.wandb.mode=offline", "loggers.mlflow=false", "loggers.jsonl=true"]
    ).loggers
    assert set(read) == {"tensorboard", "wandb", "jsonl"}
    assert read["wandb"] == WandbConfig(mode="offline")
    assert config_io.read_config(write_config(tmp_path)).loggers == {}
