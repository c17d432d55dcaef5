"""How time and memory grow with the number of domains m, the horizon T and the size of the model, one at a time.

The MLP workload with SGD and 192 rows in every step, whatever m. Time is a round's over T plain steps; memory is
the growth of the peak above that of plain training.

    python bench/growth.py [--only domains horizon parameters] [--again]
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import workloads
from measure import MEGABYTE, PLAIN, Results, Seconds, least_ratio, parser, peak_growth, ratio, take_turns
from workloads import VARIANTS, WORKLOADS, Workload

ROWS = 192
COMPARED = (PLAIN, "dense", "projected 16")


def setting(*, domains: int = 4, horizon: int = 20, width: int = 1024, turns: int = 3) -> Workload:
    return replace(
        WORKLOADS["mlp"],
        model=partial(workloads.mlp, width),
        domains=domains,
        rows=ROWS // domains,
        horizon=horizon,
        turns=turns,
    )


AXES = {
    "domains": {f"m = {m}": setting(domains=m) for m in (2, 4, 8, 16, 32, 64)},
    "horizon": {
        "T = 5": setting(horizon=5, turns=7),
        "T = 50": setting(horizon=50),
        "T = 500": setting(horizon=500, turns=1),
    },
    # Widths that give 1, 4 and 16 times the parameters.
    "parameters": {
        f"x {factor}": setting(width=width, horizon=5) for factor, width in ((1, 1024), (4, 2176), (16, 4488))
    },
}


def seconds(label: str, workload: Workload) -> Seconds:
    data = workload.data()
    rounds = {name: VARIANTS[name](workload, data) for name in COMPARED}
    return take_turns(rounds, workload.turns, label=label)


def peak(workload: Workload, variant: str) -> int:
    build = partial(VARIANTS[variant], workload)
    return peak_growth(partial(workloads.prepare, workload), build, rounds=1)["peak"]


def main() -> None:
    options = parser(__doc__ or "", "growth.json", list(AXES)).parse_args()
    results = Results(options.out, "bench/growth.py", again=options.again)
    for axis in options.only:
        print(
            f"\n{axis}; m = 4, T = {5 if axis == 'parameters' else 20}, {ROWS} rows where nothing else is said"
        )
        print(
            f"  {'':9}{'M parameters':>13}   {'':14}{'time of a round':>20}{'fastest':>9}{'extra memory':>16}"
        )
        for label, workload in AXES[axis].items():
            times = results.get(f"{label}/time", partial(seconds, label, workload))
            peaks = {
                name: results.get(f"{label}/memory/{name}", partial(peak, workload, name))
                for name in COMPARED
            }
            size = workload.parameter_bytes
            for name in COMPARED[1:]:
                extra = peaks[name] - peaks[PLAIN]
                taken = f"{ratio(times, name)!s:>20}{least_ratio(times, name):8.2f}x"
                memory = f"{extra / MEGABYTE:+8.0f} MB, {extra / size:+.1f} buffers"
                print(f"  {label:9}{size / 4e6:13.2f}   {name:14}{taken}{memory}", flush=True)


if __name__ == "__main__":
    main()
