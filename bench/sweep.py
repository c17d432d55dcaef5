"""How much faster a sweep is with two workers than with one: python bench/sweep.py"""

import argparse
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from mixwell.lab.mnist.experiment import MnistSettings
from mixwell.lab.mnist.sweep import sweep
from mixwell.utils import environment


def seconds(settings: list[MnistSettings], workers: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        begun = time.perf_counter()
        sweep(settings, Path(folder), workers=workers, console=Console(quiet=True), say=lambda _: None)
        return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=8)
    parser.add_argument("--budget", type=int, default=300)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("bench/results/sweep.json"))
    options = parser.parse_args()
    first = MnistSettings(options.budget, 20, 0, channels=8, batch_size=32)
    settings = [replace(first, seed=seed) for seed in range(options.runs)]
    times: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(options.repeats):
        for workers, taken in times.items():
            taken.append(seconds(settings, workers))
            print(f"{workers} worker(s): {taken[-1]:.1f} s for {options.runs} runs of {options.budget} steps")
    ratios = [one / two for one, two in zip(times[1], times[2], strict=True)]
    print("throughput of 2 workers / 1 worker:", ", ".join(f"{ratio:.2f}" for ratio in ratios))
    result = {
        "environment": environment.describe(["python", "bench/sweep.py"]),
        "seconds": times,
        "ratios": ratios,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
