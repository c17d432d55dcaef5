"""The price of mixing: a whole round with its validation gradients and update, over plain training on the rows.

Settings are the defaults: projected traces of rank 32, one of every s steps traced, 8 validation gradients in
the round with their default number of rows. Plain and mixed training run in turns of a few steps, in one
process on one thread, so that both see the machine at its changing speed; CPU time is taken. Where a step takes
more than a second, one plain step is taken for four mixed ones. The first round of a run, in which layers are
verified, is left out where several are measured. The C library is told to keep freed memory: whether it returns
a megabyte to the system and asks for it again in every step changes with the order of a loop's allocations, and
costs a small model more than mixing does.

Printed by workload: the ratio of every round, those of traced steps and of the others to plain steps, and the
share of the validation gradients.

    python bench/price.py [--only mlp mlp-adamw cnn] [--again]
"""

from __future__ import annotations

import ctypes
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from domains import TARGET, Batch
from measure import Results, parser, say
from workloads import WORKLOADS, Workload, mean_loss, row_losses

import mixwell
from mixwell.simplex import rounds

CHUNK = 0.2  # seconds of plain training in a turn
LONG = 1.0  # seconds of a step


@dataclass(frozen=True)
class Priced:
    """A workload as people run it.

    Args:
        workload: the model, its optimizer and its data.
        rounds: how often a round is measured.
        compiled: whether both are compiled.
        part: the steps that are measured, if not all of the round. The round is composed of its numbers of traced
            and other steps and of validation gradients, which are then spread over all of it (``span=1``).
    """

    workload: Workload
    rounds: int
    compiled: bool = False
    part: int | None = None

    def signal(self) -> mixwell.Hypergradient:
        span = rounds.SPAN if self.part is None else 1.0
        return mixwell.Hypergradient(traces=mixwell.ProjectedTraces(), span=span)


def of(name: str, horizon: int, rounds: int, *, compiled: bool = False, part: int | None = None) -> Priced:
    return Priced(replace(WORKLOADS[name], horizon=horizon), rounds, compiled, part)


PRICED = {
    "mlp": of("mlp", 100, 7),
    "mlp-adamw": of("mlp-adamw", 100, 7),
    "cnn": of("cnn", 100, 3),
    "gpt": of("gpt", 304, 1, part=114),
    "gpt-m64": of("gpt-m64", 304, 1, part=114),
    "gpt-compiled": of("gpt", 304, 1, compiled=True, part=114),
}


@dataclass
class Times:
    """CPU seconds of one round."""

    plain: list[float] = field(default_factory=list[float])
    traced: list[float] = field(default_factory=list[float])
    untraced: list[float] = field(default_factory=list[float])
    validation: list[float] = field(default_factory=list[float])

    def to_json(self) -> dict[str, list[float]]:
        return vars(self)


class Trained:
    """A model that is trained plainly, or with a mixer."""

    def __init__(self, priced: Priced, *, mixed: bool) -> None:
        workload = priced.workload
        self.model = self.called = workload.model()
        if priced.compiled:
            self.called = torch.compile(self.model)
        self.optimizer = workload.optimizer(self.model.parameters())
        self.mixer: mixwell.Mixer | None = None
        if mixed:
            self.mixer = mixwell.Mixer(
                self.called,
                self.optimizer,
                workload.names,
                horizon=workload.horizon,
                signal=priced.signal(),
                update=1e-9,
            )
        self.drawn = torch.Generator().manual_seed(2)
        self.rows = workload.domains * workload.rows

    def plain_step(self, batch: Batch) -> None:
        self.optimizer.zero_grad()
        mean_loss(self.called, batch).backward()
        self.optimizer.step()

    def mixed_step(self, batch: Batch, labels: torch.Tensor) -> None:
        assert self.mixer is not None
        with self.mixer.batch(labels) as scope:
            scope.weighted_loss(row_losses(self.called, batch)).backward()
        self.mixer.step()

    def validate(self, batch: Batch) -> None:
        assert self.mixer is not None
        with self.mixer.validation():
            mean_loss(self.model, batch).backward()


def timed(into: list[float], work: Callable[[], object]) -> None:
    begun = time.process_time()
    work()
    into.append(time.process_time() - begun)


def run_round(priced: Priced, data: Any, plain: Trained, mixed: Trained, label: str) -> Times:
    """Train a round of both in turns, or its part."""
    times, chunk, done, workload = Times(), 1, 0, priced.workload
    length = priced.part or workload.horizon
    mixer = mixed.mixer
    assert mixer is not None
    rows = mixer.validation_rows(mixed.rows)
    while done < length:
        steps = data.steps[done : done + chunk]
        # Steps that take long are trained plainly now and then.
        if not times.plain or times.plain[0] < LONG or done % 4 == 0:
            for batch in steps:
                timed(times.plain, partial(plain.plain_step, batch))
        for batch in steps:
            into = times.traced if mixer.trace_due else times.untraced
            timed(into, partial(mixed.mixed_step, batch, data.labels))
            if mixer.validation_due:
                drawn = workload.draw(TARGET, rows, mixed.drawn)
                timed(times.validation, partial(mixed.validate, drawn))
        done += len(steps)
        chunk = max(1, round(CHUNK / statistics.median(times.plain)))
        if times.plain[0] > LONG and not done % 10:
            say(f"{label}: step {done} of {length}")
    return times


def measure(name: str, priced: Priced) -> list[dict[str, list[float]]]:
    torch.set_num_threads(1)
    libc = ctypes.CDLL("libc.so.6")
    for option in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
        libc.mallopt(option, 1 << 30)
    workload = priced.workload
    data = workload.data()
    plain, mixed = (Trained(priced, mixed=one) for one in (False, True))
    for one in (plain, mixed):  # what is compiled or loaded once
        mean_loss(one.called, data.steps[0]).backward()
        one.optimizer.zero_grad()
    if priced.rounds > 1:
        run_round(priced, data, plain, mixed, name)
    found: list[dict[str, list[float]]] = []
    for number in range(priced.rounds):
        found.append(run_round(priced, data, plain, mixed, name).to_json())
        say(f"{name}: round {number + 1} of {priced.rounds}")
    return found


def show(name: str, priced: Priced, found: list[dict[str, list[float]]]) -> None:
    workload, signal = priced.workload, priced.signal()
    traced = len(signal.observed_steps(0, workload.horizon))
    counts = {
        "traced": traced,
        "untraced": workload.horizon - traced,
        "validation": len(signal.validation_points(workload.horizon)),
    }
    plain = statistics.median(t for r in found for t in r["plain"])
    ratios: list[float] = []
    shares: list[float] = []
    for r in found:
        whole = workload.horizon * statistics.mean(r["plain"])
        parts = {kind: count * statistics.mean(r[kind]) for kind, count in counts.items() if count}
        ratios.append(sum(parts.values()) / whole)
        shares.append(parts["validation"] / whole)
    step = {k: statistics.median(t for r in found for t in r[k]) / plain for k in counts if found[0][k]}
    print(
        f"{name}: {workload.parameter_bytes / 4e6:.2f} M parameters, m = {workload.domains}, "
        f"T = {workload.horizon}, {plain * 1e3:.0f} ms a plain step\n"
        f"  a round takes {statistics.median(ratios):.3f} ({min(ratios):.3f}-{max(ratios):.3f}) of plain "
        f"training: {traced} traced steps at {step['traced']:.3f}, the others at {step.get('untraced', 1):.3f}, "
        f"validation {statistics.median(shares):.1%}",
        flush=True,
    )


def main() -> None:
    options = parser(__doc__, "price.json", list(PRICED)).parse_args()
    results = Results(options.out, "bench/price.py", again=options.again)
    warnings.simplefilter("ignore")
    for name in options.only:
        priced = PRICED[name]
        show(name, priced, results.get(name, partial(measure, name, priced)))


if __name__ == "__main__":
    main()
