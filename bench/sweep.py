"""How much faster a sweep is with two workers than with one: python bench/sweep.py"""

import tempfile
import time
from dataclasses import replace
from pathlib import Path

from measure import plain_parser, write_results
from rich.console import Console

from mixwell.lab.mnist.experiment import MnistSettings
from mixwell.lab.mnist.sweep import sweep


def seconds(settings: list[MnistSettings], workers: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        begun = time.perf_counter()
        sweep(settings, Path(folder), workers=workers, console=Console(quiet=True), say=lambda _: None)
        return time.perf_counter() - begun


def main() -> None:
    parser = plain_parser(__doc__, out="sweep.json")
    parser.add_argument("--runs", type=int, default=8)
    parser.add_argument("--budget", type=int, default=300)
    parser.add_argument("--repeats", type=int, default=2)
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
    write_results(options.out, "bench/sweep.py", seconds=times, ratios=ratios)


if __name__ == "__main__":
    main()
