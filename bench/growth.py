"""How time and memory grow with the number of domains m, the horizon T and the size of the model, one at a time.

The MLP workload with SGD and 192 rows in every step, whatever m. Time is a round's over T plain steps; memory is
the growth of the peak above that of plain training.

    python bench/growth.py [--only domains horizon parameters] [--again]
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import workloads
from measure import PLAIN, Results, extra_memory, least_ratio, parser, ratio
from workloads import VARIANTS, WORKLOADS, Workload

ROWS = 192
COMPARED = (PLAIN, "dense", "mixed dense", "projected 16")


def setting(*, horizon: int, domains: int = 4, width: int = 1024, turns: int = 5) -> Workload:
    return replace(
        WORKLOADS["mlp"],
        model=partial(workloads.mlp, width=width),
        domains=domains,
        rows=ROWS // domains,
        horizon=horizon,
        turns=turns,
    )


AXES = {
    "domains": [setting(domains=m, horizon=10) for m in (2, 4, 8, 16, 32, 64)],
    "horizon": [setting(horizon=5), setting(horizon=50), setting(horizon=500, turns=1)],
    # Widths that give 1, 4 and 16 times the parameters.
    "parameters": [setting(width=width, horizon=5) for width in (1024, 2176, 4488)],
}


def peak(workload: Workload, variant: str) -> int:
    return workloads.memory(workload, VARIANTS[variant])["peak"]


def main() -> None:
    options = parser(__doc__, "growth.json", list(AXES)).parse_args()
    results = Results(options.out, "bench/growth.py", again=options.again)
    builds = {name: VARIANTS[name] for name in COMPARED}
    for axis in options.only:
        print(f"\nby {axis}; {ROWS} rows in a step")
        print(f"  {'':35}{'':14}{'time of a round':>20}{'fastest':>9}   extra memory")
        for workload in AXES[axis]:
            size = workload.parameter_bytes
            label = f"m = {workload.domains}, T = {workload.horizon}, {size / 4e6:.2f} M parameters"
            times = results.get(f"{label}/time", partial(workloads.seconds, workload, builds, label=label))
            peaks = {
                name: results.get(f"{label}/memory/{name}", partial(peak, workload, name))
                for name in COMPARED
            }
            for name in COMPARED[1:]:
                taken = f"{ratio(times, name)!s:>20}{least_ratio(times, name):8.2f}x"
                print(f"  {label:35}{name:14}{taken}   {extra_memory(peaks, name, size)}", flush=True)


if __name__ == "__main__":
    main()
