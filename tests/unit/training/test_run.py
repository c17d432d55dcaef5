"""Runs in their directories, as a user has them: from the command line, stopped, killed, resumed."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import time
from pathlib import Path

import jsonschema
import pytest
import torch
from safetensors.torch import load_file

from helpers.commands import PATIENCE, command, mixwell
from helpers.text_configs import WORDS, lines, write_config
from mixwell.training import mixture_file


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a config and a run that came to its end undisturbed."""
    folder = tmp_path_factory.mktemp("whole")
    out, _ = mixwell("run", write_config(folder), "--out", "whole", "--no-report", cwd=folder)
    assert "validation loss" in out
    return folder


def same_run(one: Path, other: Path) -> None:
    """Metrics, mixture, model, optimizer, mixer, sampler and random numbers, bit for bit."""
    assert lines(one) == lines(other)
    assert json.loads((one / "mixture.json").read_text()) == json.loads((other / "mixture.json").read_text())
    last = "checkpoints/step-00000024"
    for name in ("model.safetensors", "training.safetensors"):
        mine, theirs = load_file(one / last / name), load_file(other / last / name)
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[key], theirs[key]) for key in mine)
    states = [json.loads((folder / last / "state.json").read_text()) for folder in (one, other)]
    for state in states:
        for key in ("seconds", "metrics_length"):  # a time has more or fewer digits
            del state[key]
        del state["config"]["base"]  # where it is
    assert states[0] == states[1]


def test_run_directory_contents(done: Path) -> None:
    run = done / "whole"
    assert sorted(os.listdir(run)) == [
        "checkpoints",
        "config.yaml",
        "environment.json",
        "metrics.jsonl",
        "mixture.json",
    ]
    assert sorted(os.listdir(run / "checkpoints")) == ["step-00000021", "step-00000024"]
    artifact = json.loads((run / "mixture.json").read_text())
    jsonschema.validate(artifact, mixture_file.schema())
    assert artifact["finished"]
    assert artifact["domains"] == list(WORDS)
    assert sum(artifact["weights"]["last"].values()) == pytest.approx(1)
    assert sum(artifact["rows"]["trained_on"].values()) == 24 * 8
    assert artifact["weights"]["last"]["letters"] > 0.4  # the validation set is made of letters
    kinds = [line["kind"] for line in lines(run)]
    assert (kinds.count("step"), kinds.count("round"), kinds.count("evaluation")) == (6, 5, 5)
    evaluations = [line for line in lines(run) if line["kind"] == "evaluation"]
    assert set(evaluations[-1]["losses"]) == {"validation", "test"}
    assert evaluations[-1]["losses"]["validation"] < evaluations[0]["losses"]["validation"]
    rounds = [line for line in lines(run) if line["kind"] == "round"]
    assert all(set(line["noise"]) == set(WORDS) for line in rounds)


def test_kill_at_any_time_and_resume(tmp_path: Path) -> None:
    """kill -9 at random moments of training and of writing checkpoints, then to the end."""
    config = write_config(tmp_path, output={"checkpoint_every": 1})
    reference, run = tmp_path / "reference", tmp_path / "run"
    mixwell("run", config, "--out", reference, "--no-report", cwd=tmp_path)
    chance = random.Random(time.time_ns())
    words: list[str | Path] = ["run", config, "--out", run, "--no-report"]
    for _ in range(6):
        process = command(*words, cwd=tmp_path)
        before = set(run.glob("checkpoints/*"))
        while process.poll() is None and set(run.glob("checkpoints/*")) == before:
            time.sleep(0.001)
        time.sleep(chance.random() * 0.05)
        process.kill()
        _, err = process.communicate()
        assert process.returncode in (0, -signal.SIGKILL), err
        words = ["resume", run, "--no-report"]
    mixwell(*words, cwd=tmp_path)
    same_run(run, reference)


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_saves_and_resumes(kind: signal.Signals, done: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path)
    run = tmp_path / "run"
    process = command("run", config, "--out", run, "--no-report", cwd=tmp_path)
    while process.poll() is None and not (run / "metrics.jsonl").exists():
        time.sleep(0.01)
    process.send_signal(kind)
    out, err = process.communicate(timeout=PATIENCE)
    if process.returncode != 0:  # else it was quicker than the signal
        assert process.returncode == 130, (out, err)
        assert "and saved; `mixwell resume" in err
        assert len(err.splitlines()) == 1
        assert not json.loads((run / "mixture.json").read_text())["finished"]
        out, _ = mixwell("resume", run, "--no-report", cwd=tmp_path)
        assert "continuing" in out
    same_run(run, done / "whole")


def test_interrupt_leaves_last_weights_on_screen(tmp_path: Path) -> None:
    process = command(
        "run", write_config(tmp_path, steps=1_000_000), "--out", "run", "--no-report", cwd=tmp_path
    )
    run = tmp_path / "run"
    while process.poll() is None and not list(run.glob("checkpoints/step-*")):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130, (out, err)
    mixture = json.loads((run / "mixture.json").read_text())
    shown = {line.split()[0]: line.split()[1:3] for line in out.splitlines() if line.strip()}
    for name in mixture["domains"]:
        assert shown[name] == [f"{mixture['weights'][kind][name]:.4f}" for kind in ("last", "average")]
    assert "run: mixture.json, metrics.jsonl, checkpoints/" in out
    assert f"stopped after step {mixture['steps_done']} of 1000000 and saved" in err
    assert "`mixwell resume run` continues" in err


def test_corrupt_checkpoint_falls_back_to_previous(done: Path, tmp_path: Path) -> None:
    shutil.copytree(done / "whole", tmp_path / "run")
    path = tmp_path / "run" / "checkpoints" / "step-00000024" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    out, _ = mixwell("resume", "run", "--no-report", cwd=tmp_path)
    assert "model.safetensors is damaged" in out
    assert "continuing run after step 21 of 24" in out
    same_run(tmp_path / "run", done / "whole")


def test_copies_of_checkpoints_are_not_removed(done: Path, tmp_path: Path) -> None:
    shutil.copytree(done / "whole", tmp_path / "run")
    kept = tmp_path / "run" / "checkpoints"
    for name in ("step-best", "step-00000021-good"):
        shutil.copytree(kept / "step-00000021", kept / name)
    mixwell("resume", "run", "--no-report", cwd=tmp_path)
    assert sorted(os.listdir(kept)) == ["step-00000021", "step-00000021-good", "step-00000024", "step-best"]
    same_run(tmp_path / "run", done / "whole")


def test_resume_with_changed_settings_fails(done: Path, tmp_path: Path) -> None:
    shutil.copytree(done / "whole", tmp_path / "run")
    config = tmp_path / "run" / "config.yaml"
    config.write_text(config.read_text().replace("lr: 0.001", "lr: 0.5").replace("keep: 2", "keep: 3"))
    _, err = mixwell("resume", "run", cwd=tmp_path, status=2)
    assert "optimizer.lr is 0.5 here and 0.001 there (in the checkpoint)" in err
    assert "keep" not in err  # what is written may change


def test_folder_with_other_results_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "metrics.jsonl").write_text("precious\n")
    _, err = mixwell("run", write_config(tmp_path), "--out", "mine", cwd=tmp_path, status=2)
    assert "metrics.jsonl already exists and would be overwritten" in err
    assert (tmp_path / "mine" / "metrics.jsonl").read_text() == "precious\n"


def test_diverging_run_prints_one_line(tmp_path: Path) -> None:
    wild = ["optimizer.kind=sgd", "optimizer.lr=1e30", "optimizer.clip_norm=null", "mixer.horizon=5"]
    words = [word for one in wild for word in ("--set", one)]
    _, err = mixwell("run", write_config(tmp_path), "--out", "run", *words, cwd=tmp_path, status=2)
    assert len(err.splitlines()) == 1
    assert "mixer.on_nonfinite" in err


def test_invalid_model_leaves_no_run_directory(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "def model(width):\n"
        "    net = torch.nn.Linear(width, 257)\n"
        "    return net, lambda m, rows: torch.nn.functional.cross_entropy(m(rows[:, :-1].float()), rows[:, -1])\n"
    )
    config = write_config(tmp_path, steps=5)
    model = "model={{kind: python, entry: 'mine:model', context: 16, arguments: {{width: {}}}}}"
    mixwell("run", config, "--out", "run", "--set", model.format(4), cwd=tmp_path, status=1)
    mixwell("run", config, "--out", "run", "--set", model.format(16), "--no-report", cwd=tmp_path)


def test_finished_run_is_not_trained_further(done: Path, tmp_path: Path) -> None:
    shutil.copytree(done / "whole", tmp_path / "run")
    mixwell("resume", "run", "--no-report", cwd=tmp_path)
    same_run(tmp_path / "run", done / "whole")


def _small_files() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))


def test_full_disk_keeps_last_checkpoint(done: Path, tmp_path: Path) -> None:
    """A limit on the size of files stands for a disk that is full in the middle of a checkpoint."""
    shutil.copytree(done / "whole", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000024")
    shutil.copytree(done / "cache", tmp_path / "cache")
    before = sorted(os.listdir(tmp_path / "run" / "checkpoints"))
    process = command("resume", "run", "--no-report", cwd=tmp_path, preexec_fn=_small_files)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 2
    assert "cannot write a checkpoint" in err
    assert "File too large" in err
    assert "the checkpoints before it are untouched" in err
    assert sorted(os.listdir(tmp_path / "run" / "checkpoints")) == before == ["step-00000021"]
    mixwell("resume", "run", "--no-report", cwd=tmp_path)
    same_run(tmp_path / "run", done / "whole")


def test_two_runs_cannot_share_directory(done: Path) -> None:
    config = done / "tiny.yaml"
    _, err = mixwell("run", config, "--out", "whole", cwd=done, status=2)
    assert "there is a run in whole already: `mixwell resume whole` continues it" in err


def test_unwritable_folder_fails(done: Path) -> None:
    _, err = mixwell("run", "tiny.yaml", "--out", "tiny.yaml/inside", cwd=done, status=2)
    assert "tiny.yaml" in err
    assert len(err.splitlines()) == 1


def test_resume_without_run_fails(tmp_path: Path) -> None:
    _, err = mixwell("resume", "nowhere", cwd=tmp_path, status=2)
    assert "there is no run in nowhere" in err


def test_resume_with_changed_data_fails(done: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path)
    mixwell("run", config, "--out", "run", "--no-report", cwd=tmp_path)
    (tmp_path / "letters.txt").write_text("something else " * 500)
    _, err = mixwell("resume", "run", cwd=tmp_path, status=2)
    assert "the data of letters have changed since the checkpoint" in err


def test_failed_start_leaves_no_files(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    (tmp_path / "letters.txt").unlink()
    _, err = mixwell("run", config, "--out", "run", cwd=tmp_path, status=2)
    assert "domains.letters: " in err
    assert not (tmp_path / "run").exists()


BAD = {
    "missing file": ({"files": "nothing/*.txt"}, None, "nothing/*.txt"),
    "empty folder": ({"files": "folder"}, None, "folder"),
    "no text": ({"files": "bad.txt"}, b"", "empty"),
    "wrong field": ({"jsonl": "bad.txt", "field": "body"}, b'{"text": "a"}\n', "text"),
    "broken line": ({"jsonl": "bad.txt"}, b'{"text": "a"}\n{"text": \n', "bad.txt:2"),
    "field that is not text": ({"jsonl": "bad.txt"}, b'{"text": 3}\n', "bad.txt:1"),
    "not UTF-8": ({"files": "bad.txt"}, b"good\n\xff\xfe bad\n", "bad.txt"),
    "too short": ({"files": "bad.txt"}, b"short", "fewer than one row of 17"),
    "no such encoding": ({"files": "bad.txt", "encoding": "utf-9"}, b"abc", "utf-9"),
    "no such module": ({"python": "nowhere:function"}, None, "cannot import 'nowhere'"),
    "no such function": ({"python": "json:nothing"}, None, "has no function 'nothing'"),
    "wrong arguments": ({"python": "json:dumps"}, None, "cannot be called with {}"),
    "no such tensors": ({"tensors": "bad.txt"}, b"abc", "is not a safetensors file"),
    "no such tokens": ({"tokens": "none.npy"}, None, "none.npy"),
}


@pytest.mark.parametrize("what", BAD)
def test_invalid_data_give_one_message(what: str, tmp_path: Path) -> None:
    data, content, message = BAD[what]
    config = write_config(tmp_path, domains={"bad": data})
    (tmp_path / "folder").mkdir()
    if content is not None:
        (tmp_path / "bad.txt").write_bytes(content)
    _, err = mixwell("run", config, "--out", "run", cwd=tmp_path, status=2)
    told = [line for line in err.splitlines() if line.startswith("mixwell: ")]
    assert len(told) == 1, err
    assert told[0].startswith("mixwell: domains.bad: ")
    assert message in told[0]
    assert not (tmp_path / "run").exists()


def test_validation_overlap_warns(tmp_path: Path) -> None:
    config = write_config(tmp_path, steps=5)
    text = "\n".join(f"line {number} of a text that is in both places" for number in range(200))
    for name in ("letters", "validation"):
        (tmp_path / f"{name}.txt").write_text(text)
    out, _ = mixwell("run", config, "--out", "run", "--no-report", cwd=tmp_path)
    assert "warning: 100% of validation is also in domains.letters" in out


def test_domain_smaller_than_batch_warns(tmp_path: Path) -> None:
    config = write_config(tmp_path, steps=5)
    (tmp_path / "letters.txt").write_text("alpha beta gamma delta epsilon zeta eta")
    out, _ = mixwell("run", config, "--out", "run", "--no-report", cwd=tmp_path)
    assert "warning: domains.letters has 2 rows, fewer than a batch of 8" in out
