"""``mixwell reproduce quadratic``: run the example, print it, check the theorem, and write the table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from mixwell.lab import tables
from mixwell.lab.quadratic import example
from mixwell.lab.quadratic.example import QuadraticSettings, Trajectory
from mixwell.utils import terminal

TABLE = "quadratic.csv"
AGREEMENT = 1e-9


def main(
    *,
    radii: Sequence[float],
    step_sizes: Sequence[float],
    learning_rate: float,
    budget: int,
    horizons: Sequence[int],
    margin: float,
    out: Path,
) -> bool:
    """Run the command and return whether the mixer agrees with the recursion and the theorem holds.

    Args:
        radii: R; the rows of the table are all pairs of R and alpha.
        step_sizes: alpha of the weights.
        learning_rate: eta of the model.
        budget: N.
        horizons: T of each column.
        margin: the theorem's c.
    """
    console = Console()
    settings = [QuadraticSettings(r, a, learning_rate, budget) for r in radii for a in step_sizes]
    pairs = example.pairs_to_run(settings, horizons)
    example.safe_horizon(settings[0], margin=margin)  # refuses a bad c before anything runs
    left_out = sorted({t for t in horizons if t > budget})
    if left_out:
        console.print(f"left out, beyond the budget of {budget} steps: T = {left_out}")
    out.mkdir(parents=True, exist_ok=True)
    runs = _run_all(pairs, console)
    shown = sorted({t for _, t in pairs})
    tables.show(
        console,
        ["R, α", *(f"T={t}" for t in shown)],
        [[f"{s.radius:g}, {s.step_size:g}", *(f"{runs[s, t].phi[-1]:.5g}" for t in shown)] for s in settings],
        title=f"final log-odds of the right domain, log(w/(1-w)); η={learning_rate:g}, N={budget}",
    )
    worst = max(example.deviation(path, example.recursion(setting, t)) for (setting, t), path in runs.items())
    agrees = worst <= AGREEMENT
    terminal.say(
        console,
        f"{_mark(agrees)} the mixer agrees with the paper's closed recursion: greatest relative deviation of "
        f"the log-odds {worst:.1e}",
    )
    terminal.say(console, "the theorem (appendix A):")
    holds = True
    for setting in settings:
        for claim in example.check_theorem(setting, margin=margin):
            instance = f"R={setting.radius:g}, α={setting.step_size:g}"
            terminal.say(console, f"{_mark(claim.holds)} {instance}, {claim.text}")
            holds = holds and claim.holds is not False
    _write_csv(runs, out / TABLE)
    terminal.say(console, f"{out}: {TABLE}")
    return agrees and holds


def _run_all(
    pairs: Sequence[tuple[QuadraticSettings, int]], console: Console
) -> dict[tuple[QuadraticSettings, int], Trajectory]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("training", total=len(pairs))
        runs: dict[tuple[QuadraticSettings, int], Trajectory] = {}
        for setting, horizon in pairs:
            progress.update(task, description=f"R={setting.radius:g} α={setting.step_size:g} T={horizon}")
            runs[setting, horizon] = example.run(setting, horizon)
            progress.advance(task)
    return runs


def _mark(holds: bool | None) -> str:
    return "  --  " if holds is None else ("  ok  " if holds else "FAILED")


def _write_csv(runs: dict[tuple[QuadraticSettings, int], Trajectory], path: Path) -> None:
    rows: list[tables.Row] = [
        {
            "radius": s.radius,
            "step_size": s.step_size,
            "learning_rate": s.learning_rate,
            "budget": s.budget,
            "horizon": horizon,
            "step": int(step),
            "theta": float(theta),
            "log_odds": float(phi),
            "weight": float(weight),
        }
        for (s, horizon), run in runs.items()
        for step, theta, phi, weight in zip(run.steps, run.theta, run.phi, run.weight, strict=True)
    ]
    tables.write(path, rows)
