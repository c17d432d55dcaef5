"""What the benchmarks share: time in turns, memory in fresh processes, results that can be continued, options.

Time: the variants take turns in one process on one thread; CPU time is taken. Each round of a variant is divided
by a plain one just before it, as the speed of a shared machine changes within seconds. The first turn warms up.

Memory: each variant runs in a process of its own. There the data are made, the plain loop takes a step and the
variant runs with a small model, so that the libraries have loaded what they load; then the peak is reset, the
variant is built and runs. Reported is how far the peak of the resident set rose above its value before the variant
was built.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import hashlib
import json
import multiprocessing
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import mixwell
from mixwell.utils import environment, files

PLAIN = "plain"
MEGABYTE = 1e6


def nothing() -> None:
    """What a plain round does at its end."""


@dataclass
class Round:
    """T training steps of one variant, to be run again and again.

    Args:
        train: the steps.
        finish: what a round ends with: the validation gradient and the update of the weights.
        scores: the hypergradient of every round so far, where the variant has one.
        held: the bytes that the variant says it holds beyond plain training.
        trained: the model and its optimizer, where somebody wants to set them back.
    """

    train: Callable[[], None]
    finish: Callable[[], None] = nothing
    scores: list[list[float]] = field(default_factory=list[list[float]])
    held: int = 0
    trained: tuple[nn.Module, Optimizer] | None = None

    def run(self) -> None:
        """The whole round."""
        self.train()
        self.finish()


# ------------------------------------------------------------------------------------------------- time


@dataclass(frozen=True)
class Ratios:
    """Ratios of the turns; printed are their median and range."""

    values: Sequence[float]

    def __str__(self) -> str:
        return f"{statistics.median(self.values):.2f}x ({min(self.values):.2f}-{max(self.values):.2f})"


# By variant, a number per turn of "train" and "finish", and of the "plain" round before them.
Seconds = dict[str, dict[str, list[float]]]


def take_turns(rounds: Mapping[str, Round], turns: int, *, label: str = "") -> Seconds:
    """CPU seconds of every variant in every turn; every second turn goes through them backwards."""
    torch.set_num_threads(1)
    names = [name for name in rounds if name != PLAIN]
    taken: Seconds = {name: {"plain": [], "train": [], "finish": []} for name in names}
    for turn in range(turns + 1):
        for name in names if turn % 2 else reversed(names):
            parts = {"plain": rounds[PLAIN].train, "train": rounds[name].train, "finish": rounds[name].finish}
            for part, work in parts.items():
                begun = time.process_time()
                work()
                if turn:
                    taken[name][part].append(time.process_time() - begun)
        say(f"{label}: turn {turn} of {turns}" + (" (warm-up)" if not turn else ""))
    return taken


def ratio(seconds: Seconds, name: str, *, finish: bool = True) -> Ratios:
    """The time of a variant over that of the plain one, with or without what ends the round."""
    own = seconds[name]
    totals = [a + b for a, b in zip(own["train"], own["finish"], strict=True)] if finish else own["train"]
    return Ratios([mine / base for mine, base in zip(totals, own["plain"], strict=True)])


def least_ratio(seconds: Seconds, name: str) -> float:
    """The fastest round of a variant over the fastest plain one: the ratio on a quiet machine."""
    own = seconds[name]
    return (min(own["train"]) + min(own["finish"])) / fastest_plain(seconds)


def fastest_plain(seconds: Seconds) -> float:
    """CPU seconds of the fastest plain round."""
    return min(min(own["plain"]) for own in seconds.values())


# ----------------------------------------------------------------------------------------------- memory


def peak_growth(
    prepare: Callable[[], Any], build: Callable[[Any], Round], *, rounds: int = 2
) -> dict[str, int]:
    """The growth of the ``peak`` in a fresh process where a variant runs, and the bytes it says are ``held``.

    Args:
        prepare: makes what the variants share and warms the libraries up; its result is given to ``build``.
        build: makes the variant. Both are called in the other process, so they must be picklable.
        rounds: how many are run; two, because what ends the first is held at the beginning of the second.
    """
    # Freed memory goes back to the system at once, so that the peak is of what was live and not of what the
    # allocator kept; otherwise it differs by megabytes from run to run.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = os.environ["MALLOC_TRIM_THRESHOLD_"] = str(1 << 16)
    try:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
            return process.submit(_grow, prepare, build, rounds).result()
    finally:
        del os.environ["MALLOC_MMAP_THRESHOLD_"], os.environ["MALLOC_TRIM_THRESHOLD_"]


def _grow(prepare: Callable[[], Any], build: Callable[[Any], Round], rounds: int) -> dict[str, int]:
    torch.set_num_threads(1)
    prepared = prepare()
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
    before = _reset_peak()
    variant = build(prepared)
    for _ in range(rounds):
        variant.run()
    return {"peak": _peak() - before, "held": variant.held}


def _reset_peak() -> int:
    """Reset the peak to the resident size, if the system can, and return it; else return the current peak."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
        return _status("VmRSS")
    except OSError:
        return _peak()


def _peak() -> int:
    try:
        return _status("VmHWM")
    except OSError:
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {name}")


def extra_memory(peaks: Mapping[str, int], name: str, parameters: int) -> str:
    """What a variant's peak is above the plain one's: MB, per cent of it, and in buffers of all parameters."""
    extra = peaks[name] - peaks[PLAIN]
    percent = 100 * extra / peaks[PLAIN]
    return f"{extra / MEGABYTE:+7.0f} MB ({percent:+5.0f} %, {extra / parameters:+5.1f} buffers)"


# ---------------------------------------------------------------------------------------------- results


class Results:
    """Measurements by name in a JSON file, which grows with every one, so that a stopped benchmark continues.

    Measurements of another machine or other versions are not continued, but replaced. Those of other code are
    kept, and a line says so.

    Args:
        path: the file.
        script: that measures.
        again: whether to repeat measurements that are in the file.
    """

    def __init__(self, path: Path, script: str, *, again: bool = False) -> None:
        self._path, self._again = path, again
        self._environment = environment.describe(["python", script])
        self._found: dict[str, Any] = {}
        if path.exists():
            before = json.loads(path.read_text(encoding="utf-8"))
            if before["environment"] == self._environment:
                self._found = before["results"]
            else:
                say(f"{path} is of another machine or other versions, so all is measured anew")
        self._code = _fingerprint()
        self._fresh: set[str] = set()

    def get(self, name: str, make: Callable[[], Any], *, fits: Callable[[Any], bool] = lambda _: True) -> Any:
        """Return a measurement from the file, if it is there and fits, or else the result of ``make``."""
        known = name in self._found and (name in self._fresh or not self._again)
        if not (known and fits(self._found[name]["value"])):
            self._found[name] = {"code": self._code, "value": make()}
            self._fresh.add(name)
            content = {"environment": self._environment, "results": self._found}
            files.write_atomically(self._path, json.dumps(content, indent=1) + "\n")
        elif self._found[name]["code"] != self._code:
            say(f"{name} was measured before the code of mixwell changed; --again measures it anew")
        return self._found[name]["value"]


def _fingerprint() -> str:
    """Return a checksum of the package's sources, which are what is measured."""
    whole = hashlib.sha256()
    for path in sorted(Path(mixwell.__file__).parent.rglob("*.py")):
        whole.update(path.read_bytes())
    return whole.hexdigest()[:12]


def summarize(values: Sequence[float]) -> dict[str, float]:
    """Return the median and the range."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def write_results(path: Path, script: str, **content: object) -> None:
    """Write a result with the environment it was measured in."""
    made_with = environment.describe(["python", script])
    files.write_atomically(path, json.dumps({"environment": made_with, **content}, indent=1) + "\n")


def plain_parser(description: str | None, *, out: str | None = None) -> argparse.ArgumentParser:
    """Return a parser that shows the description as it is written, with ``--out`` for a file in ``results``."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if out is not None:
        made.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / out)
    return made


def parser(description: str | None, out: str, choices: Sequence[str]) -> argparse.ArgumentParser:
    """Return a parser for a benchmark that can be continued: which measurements, and whether to repeat them."""
    made = plain_parser(description, out=out)
    made.add_argument("--only", nargs="+", choices=choices, default=list(choices), metavar="NAME")
    made.add_argument("--again", action="store_true", help="measure also what is in the results already")
    made.epilog = f"names: {', '.join(choices)}"
    return made


def say(line: str) -> None:
    """Print a line about progress to stderr, so that stdout has the results only."""
    print(line, file=sys.stderr, flush=True)
