"""Test loss against the horizon T, for validation at the last iterate of a round and for the averaged default.

`end` takes one validation gradient at the end of a round, with equal steps of the self-tuned size (factor 2, as
before averaging); `averaged` is the default. Both at equal compute.

    python bench/valley.py fashion --horizons 5,10,21,42,84,168,336 --seeds 5 --out results/valley/fashion

Writes the tables of `mixwell compare`, `valley.csv` (means and standard errors) and `valley.png`.
"""

from __future__ import annotations

import statistics
from pathlib import Path

from measure import plain_parser
from rich.console import Console

from mixwell.lab import problems, tables
from mixwell.lab.compare import command
from mixwell.lab.compare.results import RUNS
from mixwell.report import style

VARIANTS = """
compare:
  averaged: {method: mixwell}
  end: {method: mixwell, options: {points: 1, shrink: false, factor: 2}}
"""


def main() -> None:
    parser = plain_parser(__doc__)
    parser.add_argument("problem", choices=list(problems.PROBLEMS))
    parser.add_argument("--horizons", default="5,10,21,42,84,168,336")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=None)
    parser.add_argument("--set", action="append", default=[], help="key=value")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    path = given.out / "valley.yaml"
    if not path.exists():
        text = problems.find(given.problem, given.out, Console()).read_text(encoding="utf-8")
        path.write_text(text.split("\n# Other ways to run")[0] + VARIANTS, encoding="utf-8")
    command.main(
        str(path),
        names=["uniform", "averaged", "end"],
        seeds=given.seeds,
        horizons=given.horizons,
        equal="compute",
        out=given.out,
        workers=given.workers,
        overrides=given.set,
    ).raise_error()
    found: dict[tuple[str, int], list[float]] = {}
    for row in tables.read(given.out / RUNS):
        found.setdefault((str(row["entry"]), int(row["horizon"] or 0)), []).append(float(row["test_loss"]))
    rows: list[tables.Row] = [
        {
            "variant": variant,
            "horizon": horizon,
            "mean": statistics.fmean(losses),
            "error": statistics.stdev(losses) / len(losses) ** 0.5,
            "seeds": len(losses),
        }
        for (variant, horizon), losses in sorted(found.items())
    ]
    tables.write(given.out / "valley.csv", rows)
    for row in rows:
        mean = f"{row['mean']:.4f} +- {row['error']:.4f}"
        print(f"{row['variant']:10} T = {row['horizon']:4}  {mean}, n = {row['seeds']}")
    draw(rows, given.problem, given.out / "valley.png")


def draw(rows: list[tables.Row], problem: str, path: Path) -> None:
    figure, axes = style.new_figure(1, 1, width=5, height=3.2)
    axis = axes[0, 0]
    for variant, color, label in (
        ("end", style.COLORS[1], "one validation gradient, at the end of a round"),
        ("averaged", style.COLORS[0], "eight, in its later half (default)"),
    ):
        own = [row for row in rows if row["variant"] == variant]
        axis.errorbar(
            [row["horizon"] for row in own],
            [row["mean"] for row in own],
            yerr=[row["error"] for row in own],
            fmt="o-",
            color=color,
            label=label,
            ms=4,
            lw=1.5,
        )
    uniform = next(row["mean"] for row in rows if row["variant"] == "uniform")
    axis.axhline(uniform, color=style.GRAY, lw=1, ls="--", label="uniform weights")
    axis.set(xscale="log", xlabel="horizon T", ylabel="test loss", title=problem)
    axis.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
