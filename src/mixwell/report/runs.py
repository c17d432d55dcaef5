"""The page of training runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mixwell.report import page, run_figures, run_summary, style
from mixwell.report.page import Page, Picture, Section, Sheet
from mixwell.report.run_figures import KINDS, Drawn
from mixwell.report.run_summary import RunSummary
from mixwell.utils import environment

MANY = 12
"""A table with more rows is folded up, and its first rows are shown."""
TOP = 8
HYPERGRADIENT = (
    "The hypergradient tells how the validation loss in the later part of a round would change with the weight of "
    "each domain in it; the weights move against it, so a domain below the others gains. Bars (where there are "
    "few rounds) are standard errors over the points of the round at which it was measured; what noise explains "
    "moves the weights less, or not at all."
)
SCORES = (
    "The weights move against the score of a domain, which its method defines; see the page of the method."
)


def write(folders: Sequence[Path], out: Path) -> list[Path]:
    """Draw the figures and write the page of one or several runs.

    Args:
        folders: the runs' directories.
        out: where to.

    Returns:
        The files.
    """
    runs = [
        run_summary.read(folder, name=name)
        for folder, name in zip(folders, run_summary.names(folders), strict=True)
    ]
    looks = run_figures.domains(runs)
    learning = [run for run in runs if run.learned and run.rounds]
    drawn = {
        name: run_figures.draw(kind, learning if name == "hypergradients" else runs, looks)
        for name, kind in KINDS.items()
        if learning or name != "hypergradients"
    }
    if any(run.loss() is not None for run in runs):
        overlay = run_figures.overlay(runs)
        drawn["validation"] = Drawn(overlay, [overlay])
    (out / "figures").mkdir(parents=True, exist_ok=True)
    written = [
        path for name, one in drawn.items() for path in style.save(one.together, out / "figures" / name)
    ]
    return [*written, page.write(_page(runs, drawn, folders), out / "report.html")]


def _page(runs: Sequence[RunSummary], drawn: Mapping[str, Drawn], folders: Sequence[Path]) -> Page:
    one = runs[0] if len(runs) == 1 else None
    learning = [run for run in runs if run.learned and run.rounds]
    columns = 2 if one else 3
    losses = _pictures(drawn["losses"], runs, "Mean training loss of each domain")
    if "validation" in drawn:
        shown = drawn["validation"].together
        losses = [_picture(shown, "Mean loss on the validation set.", _losses_told(runs)), *losses]
    trained_on = _pictures(drawn["rows"], runs, "Rows of each domain, added up")
    weights = _pictures(drawn["weights"], runs, "Weight of each domain over training", _weights_told)
    sections = [
        Section("The mixture", _mixture_words(runs), weights, _mixture_sheets(runs), columns),
        Section("DomainLosses", _losses_words(runs), losses, columns=columns),
    ]
    if one is None:
        sections.insert(0, Section("The runs", sheets=[_runs_sheet(runs)], columns=1))
    if learning:
        exact = all(run.hypergradient for run in learning)
        what = "Hypergradient" if exact else "Score"
        pictures = _pictures(drawn["hypergradients"], learning, f"{what} of each domain by round")
        words = [HYPERGRADIENT if exact else SCORES]
        sections.append(Section("What moved the weights", words, pictures, columns=columns))
    measured = [(run, line) for run in runs for line in run.fidelity]
    if measured:
        sections.append(_fidelity_section(measured))
    sections.append(Section("What was trained on", (), trained_on, [_rows_sheet(runs)], columns))
    sections.append(Section("Settings", blocks=[(f"config.yaml of {run.name}", run.config) for run in runs]))
    title = f"Run {one.name}" if one else f"{len(runs)} runs"
    return Page(title, [_lead(one)] if one else _leads(runs), sections, environment.facts(folders))


# ------------------------------------------------------------------------------------------------ pictures


def _pictures(drawn: Drawn, runs: Sequence[RunSummary], text: str, describe: Any = None) -> list[Picture]:
    """The pictures of runs; in words, for those who do not see them, what `describe` tells of each."""
    made: list[Picture] = []
    for figure, run in zip(drawn.apart, runs, strict=True):
        more = describe(run) if describe else ""
        if len(runs) == 1:
            made.append(_picture(figure, f"{text}.", more))
        else:  # the run is named in the picture, and the section says what all of them show
            made.append(Picture.of(figure, "", alt=f"{text}, {run.name}. {more}".strip()))
    return made


def _picture(figure: Any, text: str, more: str) -> Picture:
    return Picture.of(figure, text, alt=f"{text} {more}".strip())


def _weights_told(run: RunSummary) -> str:
    last = run.mixture["weights"]["last"]
    greatest = sorted(last, key=last.__getitem__, reverse=True)[:TOP]
    return f"At the end: {', '.join(f'{name} {last[name]:.3f}' for name in greatest)}."


def _losses_told(runs: Sequence[RunSummary]) -> str:
    ends = [f"{run.name} {_number(run.loss())}" for run in runs if run.loss() is not None]
    return f"At the end: {', '.join(ends)}." if ends else ""


# --------------------------------------------------------------------------------------------------- words


def _lead(run: RunSummary) -> str:
    last, first, test = run.loss(), run.loss(at=0), run.loss("test")
    change = ""
    if last is not None:
        change = f" Validation loss {last:.4f}"
        change += (
            f", from {first:.4f} before training" if first is not None and len(run.evaluations) > 1 else ""
        )
        change += f"; test loss {test:.4f}" if test is not None else ""
        change += "."
    return f"{run.mixture['budget']} steps in {_time(run)}, {_how(run)}{_unfinished(run)}.{change}"


def _leads(runs: Sequence[RunSummary]) -> list[str]:
    ends = {run.name: loss for run in runs if (loss := run.loss()) is not None}
    if not ends:
        return ["No run has a finite validation loss."]
    least, most = min(ends, key=ends.__getitem__), max(ends, key=ends.__getitem__)
    lead = [
        f"The least validation loss at the end is {ends[least]:.4f}, of {least}; the greatest is "
        f"{ends[most]:.4f}, of {most}."
    ]
    stopped = [f"{run.name}{_unfinished(run)}" for run in runs if not run.mixture["finished"]]
    return [*lead, f"Not finished: {'; '.join(stopped)}."] if stopped else lead


def _how(run: RunSummary) -> str:
    return f"weights learned every {run.mixture['horizon']} steps" if run.learned else "fixed weights"


def _unfinished(run: RunSummary) -> str:
    return "" if run.mixture["finished"] else f", stopped after step {run.mixture['steps_done']}"


def _mixture_words(runs: Sequence[RunSummary]) -> tuple[str, ...]:
    if not any(run.learned for run in runs):
        return ("The weights were fixed.",)
    words = "The average over the run is the mixture to take for another run; it is in mixture.json."
    if len(runs) > 1:
        return (f"Weight of each domain over training; where all lines are flat it was fixed. {words}",)
    last = runs[0].mixture["weights"]["last"]
    most = max(last, key=last.__getitem__)
    return (f"The greatest weight at the end is {last[most]:.3f}, of {most}. {words}",)


def _losses_words(runs: Sequence[RunSummary]) -> tuple[str, ...]:
    what = (
        "The validation loss of all runs, and each run's training loss by domain. " if len(runs) > 1 else ""
    )
    return (f"{what}Where a loss begins far above the rest, its first fall is out of the picture.",)


# -------------------------------------------------------------------------------------------------- tables


def _runs_sheet(runs: Sequence[RunSummary]) -> Sheet:
    kinds = [kind for kind in ("validation", "test") if any(run.loss(kind) is not None for run in runs)]
    rows = [
        [
            run.name,
            *(_number(run.loss(kind)) for kind in kinds),
            f"every {run.mixture['horizon']} steps" if run.learned else "fixed",
            f"{run.mixture['steps_done']:,}",
            _time(run),
        ]
        for run in runs
    ]
    return Sheet(["run", *(f"{kind} loss" for kind in kinds), "weights learned", "steps", "time"], rows)


def _mixture_sheets(runs: Sequence[RunSummary]) -> list[Sheet]:
    if len(runs) == 1:
        weights = runs[0].mixture["weights"]
        first = runs[0].mixture["history"][0]["weights"]
        columns = {"at first": first, "average": weights["average"], "last": weights["last"]}
        return [_weights_sheet(columns, "Weights")]
    averages, ends = (
        {run.name: run.mixture["weights"][when] for run in runs} for when in ("average", "last")
    )
    return [
        _weights_sheet(averages, "Average weight over the run"),
        _weights_sheet(ends, "Weight at the end"),
    ]


def _weights_sheet(columns: Mapping[str, Mapping[str, float]], text: str) -> Sheet:
    """A row for each domain, the greatest first; the shades are the weights over the greatest of all."""
    sums: dict[str, float] = {}
    for weights in columns.values():
        for name, weight in weights.items():
            sums[name] = sums.get(name, 0.0) + weight
    order = sorted(sums, key=sums.__getitem__, reverse=True)
    found = [[weights.get(name) for weights in columns.values()] for name in order]
    greatest = max(weight or 0.0 for row in found for weight in row)
    rows = [[name, *map(_number, row)] for name, row in zip(order, found, strict=True)]
    shades = [[(weight or 0.0) / greatest for weight in row] for row in found]
    return Sheet(["domain", *columns], rows, text, shades, _top(rows))


def _rows_sheet(runs: Sequence[RunSummary]) -> Sheet:
    """A row for each domain, that of which most was seen first."""
    seen = [run.mixture["rows"]["trained_on"] for run in runs]
    available = {name: n for run in runs for name, n in run.mixture["rows"]["available"].items()}
    names = sorted(available, key=lambda name: sum(taken.get(name, 0) for taken in seen), reverse=True)
    epochs = [
        [f"{taken[name] / available[name]:.2f}" if name in taken else "" for taken in seen] for name in names
    ]
    counts = [f"{available[name]:,}" for name in names]
    if len(runs) == 1:
        rows = [[n, c, f"{seen[0][n]:,}", *e] for n, c, e in zip(names, counts, epochs, strict=True)]
        return Sheet(["domain", "rows", "seen", "epochs"], rows, "Rows of each domain", top=_top(rows))
    rows = [[n, c, *e] for n, c, e in zip(names, counts, epochs, strict=True)]
    text = "Rows of each domain, and epochs in each run"
    return Sheet(["domain", "rows", *(run.name for run in runs)], rows, text, top=_top(rows))


def _top(rows: Sequence[Any]) -> int:
    """How many rows of a table are shown before it is unfolded."""
    return TOP if len(rows) > MANY else 0


def _fidelity_section(measured: Sequence[tuple[RunSummary, dict[str, Any]]]) -> Section:
    text = (
        "The same steps were trained again with every weight moved up and down a little, which gives the exact "
        "hypergradient. A tangent cosine of 1 means that the estimate moves the weights in the right direction. "
        "Replicates are estimates of the same steps with other rows; the true effect is what the weights do to "
        "the loss on held-out rows at the end of the steps."
    )
    columns = [
        "run",
        "after step",
        "steps",
        "exact, same rows",
        "relative error",
        "replicates agree",
        "true effect",
    ]
    rows = [
        [
            run.name,
            str(line["step"]),
            str(line["horizon"]),
            _number(line["cosine"]),
            _number(line["relative_error"]),
            _number(line.get("replication", {}).get("agreement")),
            _number(line.get("replication", {}).get("effect_cosine")),
        ]
        for run, line in measured
    ]
    words = [
        f"{run.name}, after step {line['step']}: {one}."
        for run, line in measured
        for one in line.get("verdict", [])
    ]
    return Section("Is the hypergradient right?", [text, *words], sheets=[Sheet(columns, rows)])


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _time(run: RunSummary) -> str:
    seconds = float(run.steps[-1]["seconds"]) if run.steps else 0.0
    if seconds < 120:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
