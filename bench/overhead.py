"""The kinds of traces side by side, in short rounds in which every step is traced: time and memory.

price.py has the default, in rounds of a usual length. Here time is of a whole round of T steps with its
validation gradient and weight update, over T plain steps: the median of the turns and their range, the fastest
over the fastest plain one, and that of the steps only. Memory is the growth of the peak above that of plain
training, in two rounds of one step (growth.py shows what T does): it includes the first step, in which layers are
verified. "Not mixed, split" is plain training in a batch per domain.

    python bench/overhead.py [--only mlp cnn] [--again]
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import workloads
from measure import (
    MEGABYTE,
    PLAIN,
    Results,
    extra_memory,
    fastest_plain,
    least_ratio,
    parser,
    ratio,
)
from workloads import VARIANTS, WORKLOADS, Workload


def report(name: str, workload: Workload, results: Results) -> None:
    variants = [PLAIN, *workload.variants]
    times = results.get(
        f"{name}/time",
        partial(workloads.seconds, workload, {v: VARIANTS[v] for v in variants}, label=name),
        fits=lambda found: all(PLAIN in found.get(variant, {}) for variant in variants[1:]),
    )
    short = replace(workload, horizon=1)
    found = {
        v: results.get(f"{name}/memory/{v}", partial(workloads.memory, short, VARIANTS[v], rounds=2))
        for v in variants
    }
    peaks = {v: one["peak"] for v, one in found.items()}
    size = workload.parameter_bytes
    step = fastest_plain(times) / workload.horizon
    print(
        f"\n{name}: {size / 4e6:.2f} M parameters, m = {workload.domains}, {workload.rows} rows per domain, "
        f"T = {workload.horizon}, {workload.turns} turns; plain: {step:.3f} s per step, "
        f"peak {peaks[PLAIN] / MEGABYTE:.0f} MB"
    )
    print(f"  {'variant':17}{'time of a round':>20}{'fastest':>9}{'its steps only':>20}   extra memory")
    for variant in variants[1:]:
        print(
            f"  {variant:17}{ratio(times, variant)!s:>20}{least_ratio(times, variant):8.2f}x"
            f"{ratio(times, variant, finish=False)!s:>20}   {extra_memory(peaks, variant, size)}"
            f", of which the mixer holds {found[variant]['held'] / size:.2f}",
            flush=True,
        )


def main() -> None:
    options = parser(__doc__, "overhead.json", list(WORKLOADS)).parse_args()
    results = Results(options.out, "bench/overhead.py", again=options.again)
    for name in options.only:
        report(name, WORKLOADS[name], results)


if __name__ == "__main__":
    main()
