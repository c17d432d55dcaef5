"""A process of a run is killed at a random moment, again and again: does the run end as if nothing had happened?

An undisturbed run of two processes is trained first. Then, each time, `torchrun --max-restarts` begins the same
run anew, one of its processes is killed with SIGKILL after a random time, and what is left is compared with
the undisturbed run, byte for byte: the model of the last checkpoint, the weights and the metrics (but seconds).

    python bench/kills.py [--times 10] [--way ddp]
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml
from measure import plain_parser

CONFIG: dict[str, Any] = {
    "domains": {name: f"{name}.txt" for name in ("letters", "numbers", "marks")},
    "validation": "validation.txt",
    "steps": 60,
    "model": {"layers": 2, "heads": 2, "width": 32, "context": 32},
    "batch": {"rows": 12},
    "mixer": {"horizon": 10},
    "output": {"log_every": 1, "checkpoint_every": 7},
}
WORDS = {
    "letters": ["alpha", "beta", "gamma", "delta", "epsilon", "zeta"],
    "numbers": ["one", "two", "three", "four", "five", "six", "seven"],
    "marks": ["+", "-", "*", "/", "(", ")", "=="],
}


def write_data(folder: Path, way: str) -> None:
    chance = random.Random(0)
    for name, words in [*WORDS.items(), ("validation", WORDS["letters"])]:
        (folder / f"{name}.txt").write_text(" ".join(chance.choice(words) for _ in range(20_000)))
    (folder / "config.yaml").write_text(yaml.safe_dump(CONFIG | {"parallel": {"strategy": way}}))


def launch(folder: Path, out: str) -> subprocess.Popen[str]:
    how = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "3", "-m", "mixwell"]
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            *how,
            "run",
            "config.yaml",
            "--out",
            out,
            "--no-report",
        ],
        cwd=folder,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def processes_of(parent: int) -> list[int]:
    found: list[int] = []
    for one in Path("/proc").glob("[0-9]*"):
        try:
            started_by = int((one / "stat").read_text().rsplit(")", 1)[1].split()[1])
            if started_by == parent and b"\0RANK=" in (one / "environ").read_bytes():
                found.append(int(one.name))
        except OSError:
            continue
    return found


def last_step(run: Path) -> int:
    """The last step that was logged, -1 before the training."""
    path = run / "metrics.jsonl"
    lines = [line for line in path.read_text().split("\n")[:-1] if line] if path.exists() else []
    return json.loads(lines[-1])["step"] if lines else -1


def wait_for_step(running: subprocess.Popen[str], run: Path, step: int) -> None:
    while running.poll() is None and last_step(run) < step:
        time.sleep(0.01)


def left(run: Path) -> tuple[bytes, object, object]:
    model = (run / "checkpoints" / f"step-{CONFIG['steps']:08d}" / "model.safetensors").read_bytes()
    weights = json.loads((run / "mixture.json").read_text())["weights"]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return model, weights, [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


def main() -> None:
    parser = plain_parser(__doc__)
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--way", choices=["ddp", "fsdp"], default="ddp")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    options = parser.parse_args()
    chance = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as where:
        folder = Path(where)
        write_data(folder, options.way)
        undisturbed = launch(folder, "undisturbed")
        said, _ = undisturbed.communicate()
        assert undisturbed.returncode == 0, said
        expected = left(folder / "undisturbed")
        same = 0
        for number in range(options.times):
            running = launch(folder, f"killed-{number}")
            wait_for_step(running, folder / f"killed-{number}", chance.randrange(0, CONFIG["steps"] - 5))
            time.sleep(chance.uniform(0, 0.3))
            after = last_step(folder / f"killed-{number}")
            killed = time.monotonic()
            os.kill(chance.choice(processes_of(running.pid)), signal.SIGKILL)
            noticed: float | None = None
            steps = "the beginning"
            assert running.stdout is not None
            for line in running.stdout:
                if "lost the others" in line and noticed is None:
                    noticed = time.monotonic() - killed
                if "continuing" in line:
                    steps = line.strip().split(" after ")[-1]
            running.wait()
            alike = running.returncode == 0 and left(folder / f"killed-{number}") == expected
            same += alike
            message = "no process noticed" if noticed is None else f"noticed after {noticed:.1f} s"
            print(
                f"{number}: killed after step {after}, {message}, resumed from {steps}, exit "
                f"{running.returncode}, {'the same' if alike else 'NOT the same'} as undisturbed",
                flush=True,
            )
        print(f"{same} of {options.times} ended as the undisturbed run, byte for byte")


if __name__ == "__main__":
    main()
