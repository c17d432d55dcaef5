"""The default compared with uniform weights at equal compute, on all embedded problems, with intervals.

Settings were chosen on some of the problems (demo, mnist, drama, synthetic; the limit on repetition on drama and
repetition) and are shown on the others (fashion, manuals, finetune). Every comparison is one of `mixwell compare`,
which continues where it was stopped, so this can be stopped and called again; finished comparisons are only read.

    python bench/defaults.py --steps 300,own --seeds 5 --out results/problems

Printed for every problem and number of steps: the mean test loss of uniform weights and of each other variant,
the mean difference by seed with its 95% interval (Student's t), and in how many seeds it was lower. `own` are
the steps of the problem's config. The same is written to `defaults.csv` and drawn in `defaults.png`. With
--set other settings of the mixer can be tried, and --against compares with the folder of another call, by seed:

    python bench/defaults.py --set mixer.options.epochs_ahead=null --out results/unpaced
    python bench/defaults.py --only-show --steps 300,own --out results/problems --against results/unpaced
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from measure import plain_parser

from mixwell.lab import tables
from mixwell.lab.compare.results import RUNS
from mixwell.report import style
from mixwell.utils.intervals import interval

DEVELOPMENT = ("synthetic", "mnist", "demo", "drama", "repetition")
SHOWN = ("fashion", "finetune", "manuals")


def compare(problem: str, steps: str, methods: str, given: argparse.Namespace) -> Path:
    out = given.out / (problem if steps == "own" else f"{problem}-{steps}")
    words = [sys.executable, "-m", "mixwell", "compare", problem, "--methods", methods, "--out", str(out)]
    words += ["--seeds", str(given.seeds), "--no-figures"]
    words += [] if given.workers is None else ["--workers", str(given.workers)]
    words += [] if steps == "own" else ["--set", f"steps={steps}"]
    for one in given.set:
        words += ["--set", one]
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL if given.quiet else None)
    return out


def read(out: Path) -> dict[str, dict[int, float]]:
    """Test losses by variant and seed."""
    losses: dict[str, dict[int, float]] = {}
    for row in tables.read(out / RUNS):
        losses.setdefault(str(row["variant"]), {})[int(row["seed"])] = float(row["test_loss"])
    return losses


def show_against(label: str, one: Path, other: Path) -> None:
    """The mean difference of the default to that in another folder, by seed."""
    if not ((one / RUNS).exists() and (other / RUNS).exists()):
        return
    own, others = read(one)["mixwell"], read(other)["mixwell"]
    seeds = sorted(own.keys() & others.keys())
    found = interval([own[seed] - others[seed] for seed in seeds])
    print(
        f"{label:24}{fmean(own[s] for s in seeds):9.4f}{fmean(others[s] for s in seeds):9.4f}  {found.mean:+.4f} "
        f"[{found.low:+.4f}, {found.high:+.4f}]  {len(seeds)} seeds"
    )


def summary(problem: str, steps: str, out: Path) -> list[tables.Row]:
    """One row for each variant but uniform weights: means, the mean difference by seed and its interval."""
    losses = read(out)
    uniform = losses.pop("uniform")
    rows: list[tables.Row] = []
    for variant, own in losses.items():
        seeds = sorted(own.keys() & uniform.keys())
        differences = [own[seed] - uniform[seed] for seed in seeds]
        found = interval(differences)
        rows.append(
            {
                "problem": problem,
                "half": "developed" if problem in DEVELOPMENT else "shown",
                "steps": steps,
                "variant": variant,
                "seeds": len(seeds),
                "lower": sum(difference < 0 for difference in differences),
                "uniform": round(fmean(uniform[seed] for seed in seeds), 4),
                "loss": round(fmean(own[seed] for seed in seeds), 4),
                "difference": round(found.mean, 4),
                "low": round(found.low, 4),
                "high": round(found.high, 4),
                "verdict": "better" if found.high < 0 else "worse" if found.low > 0 else "within the noise",
            }
        )
    return rows


def show(row: tables.Row) -> None:
    print(
        f"{row['problem']:12}{row['half']:11}{row['steps']:>6}  {row['variant']:18}{row['uniform']:9.4f}"
        f"{row['loss']:9.4f}  {row['difference']:+.4f} [{row['low']:+.4f}, {row['high']:+.4f}]  "
        f"{row['lower']} of {row['seeds']}  {row['verdict']}"
    )


def draw(rows: Sequence[tables.Row], path: Path) -> None:
    """Draw a line for each difference and its interval, in per cent of the loss of uniform weights."""
    names = [f"{row['problem']}, {'config' if row['steps'] == 'own' else row['steps']} steps" for row in rows]
    figure, axes = style.new_figure(1, 1, width=6.4, height=0.6 + 0.28 * len(rows))
    axis = axes[0, 0]
    for place, row in enumerate(reversed(rows)):
        mean, low, high = (
            100 * float(row[key]) / float(row["uniform"]) for key in ("difference", "low", "high")
        )
        color = {"better": style.COLORS[0], "worse": style.COLORS[1]}.get(str(row["verdict"]), style.GRAY)
        axis.plot([low, high], [place, place], color=color, lw=2)
        axis.plot(mean, place, "o" if row["half"] == "shown" else "s", color=color, ms=5)
    axis.axvline(0, color="#333333", lw=0.8)
    axis.set_yticks(range(len(rows)), names[::-1], fontsize=8)
    axis.set_xlabel("test loss against uniform weights, per cent (95% interval)", fontsize=9)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = plain_parser(__doc__)
    parser.add_argument("--problems", default=",".join((*DEVELOPMENT, *SHOWN)))
    parser.add_argument("--steps", default="own", help="with commas; own: those of the problem")
    parser.add_argument("--methods", default="mixwell", help="in addition to uniform")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=None)
    parser.add_argument("--set", action="append", default=[], help="key=value")
    parser.add_argument("--out", type=Path, default=Path("runs/defaults"))
    parser.add_argument("--quiet", action="store_true", help="print only the table")
    parser.add_argument("--only-show", action="store_true", help="read the finished comparisons, run nothing")
    parser.add_argument(
        "--against", type=Path, default=None, help="a folder of another call, to compare with"
    )
    given = parser.parse_args()
    if not given.only_show:
        for steps in given.steps.split(","):
            for problem in given.problems.split(","):
                compare(problem, steps, f"uniform,{given.methods}", given)
    found: list[tables.Row] = []
    for problem in given.problems.split(","):
        for steps in given.steps.split(","):
            out = given.out / (problem if steps == "own" else f"{problem}-{steps}")
            if (out / RUNS).exists():
                found += summary(problem, steps, out)
    head = f"{'problem':12}{'half':11}{'steps':>6}  {'variant':18}{'uniform':>9}{'loss':>9}"
    print(f"{head}  difference to uniform [95%]")
    for row in found:
        show(row)
    if given.against is not None:
        print(f"\nthe same, and in {given.against}: losses of mixwell, difference [95%]")
        for problem in given.problems.split(","):
            for steps in given.steps.split(","):
                name = problem if steps == "own" else f"{problem}-{steps}"
                show_against(name, given.out / name, given.against / name)
    tables.write(given.out / "defaults.csv", found)
    draw([row for row in found if row["variant"] == "mixwell"], given.out / "defaults.png")


if __name__ == "__main__":
    main()
