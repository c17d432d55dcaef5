"""The page of training runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mixwell.report import page, run_figures, run_summary, style
from mixwell.report.page import DataTable, Page, PageSection, Picture
from mixwell.report.run_comparison import NO_LOSS, compare_runs
from mixwell.report.run_figures import PANEL_KINDS, Figures
from mixwell.report.run_summary import RunSummary
from mixwell.utils import environment
from mixwell.utils.bidi import isolate

HYPERGRADIENT = (
    "The hypergradient is the derivative of the validation loss with respect to the weight of a domain during the "
    "round; the weights move against it. Bars are standard errors over the points of the round at which it was "
    "measured."
)
SCORES = (
    "The weights move against the score of a domain, which its method defines; see the page of the method."
)
MIXTURE = "The verdict at the top says which of these to use; average and last weights are in mixture.json."
FIDELITY = (
    "The same steps were trained again with every weight perturbed, which gives the exact hypergradient. A "
    "tangent cosine of 1 means that the estimate moves the weights in the right direction. Replicates are "
    "estimates of the same steps with other rows; the true effect is that of the weights on the loss on held-out "
    "rows at the end of the steps."
)


def write_report(folders: Sequence[Path], out: Path) -> list[Path]:
    """Draw the figures of one or several runs, write the page, and return the files, the page last."""
    runs = [
        run_summary.read(folder, name=name)
        for folder, name in zip(folders, run_summary.names(folders), strict=True)
    ]
    styles = run_figures.domain_styles(runs)
    learning = [run for run in runs if run.learned and run.rounds]
    figures = {
        name: run_figures.draw(kind, learning if name == "hypergradients" else runs, styles)
        for name, kind in PANEL_KINDS.items()
        if learning or name != "hypergradients"
    }
    if any(run.loss() is not None for run in runs):
        overlay = run_figures.overlay(runs)
        figures["validation"] = Figures(overlay, [overlay])
    (out / "figures").mkdir(parents=True, exist_ok=True)
    written = [
        path for name, one in figures.items() for path in style.save(one.together, out / "figures" / name)
    ]
    return [*written, page.write_page(_page(runs, figures, folders), out / "report.html")]


def _page(runs: Sequence[RunSummary], figures: Mapping[str, Figures], folders: Sequence[Path]) -> Page:
    learning = [run for run in runs if run.learned and run.rounds]
    columns = 2 if len(runs) == 1 else 3
    losses = _pictures(figures["losses"], runs, "Mean training loss of each domain")
    if "validation" in figures:
        ends = ", ".join(f"{isolate(run.name)} {_number(run.loss())}" for run in runs)
        text = "Mean loss on the validation set."
        alt = f"{text} At the end: {ends}."
        losses.insert(0, Picture.from_figure(figures["validation"].together, text, alt=alt))
    weights = _pictures(figures["weights"], runs, "Weight of each domain over training")
    sections = [
        PageSection("Runs", tables=[_runs_table(runs)], columns=1),
        PageSection(
            "Mixture",
            [MIXTURE] if learning and len(runs) == 1 else (),
            weights,
            _mixture_tables(runs),
            columns,
        ),
        PageSection("Losses", (), losses, columns=columns),
    ]
    if learning:
        exact = all(run.hypergradient for run in learning)
        what = "Hypergradient" if exact else "Score"
        scores = _pictures(figures["hypergradients"], learning, f"{what} of each domain by round")
        text = HYPERGRADIENT if exact else SCORES
        sections.append(PageSection(f"{what}s", [text], scores, columns=columns))
    measured = [(run, line) for run in runs for line in run.fidelity]
    if measured:
        sections.append(_fidelity_section(measured))
    rows = _pictures(figures["rows"], runs, "Rows of each domain, cumulative")
    sections.append(PageSection("Training data", (), rows, [_rows_table(runs)], columns))
    blocks = [(f"config.yaml of {isolate(run.name)}", run.config) for run in runs]
    sections.append(PageSection("Settings", blocks=blocks))
    title = f"Run {isolate(runs[0].name)}" if len(runs) == 1 else f"{len(runs)} runs"
    lead = (
        [_losses_sentence(runs[0]), *runs[0].verdict.paragraphs()] if len(runs) == 1 else compare_runs(runs)
    )
    return Page(title, lead, sections, environment.facts(folders))


def _losses_sentence(run: RunSummary) -> str:
    loss, test, first = run.loss(), run.loss("test"), run.loss(at=0)
    if loss is None:
        return NO_LOSS
    text = f"Validation loss {loss:.4f}"
    text += f" (before training {first:.4f})" if first is not None and len(run.evaluations) > 1 else ""
    return f"{text}, test loss {test:.4f}." if test is not None else f"{text}."


def _pictures(figures: Figures, runs: Sequence[RunSummary], text: str) -> list[Picture]:
    if len(runs) == 1:
        return [Picture.from_figure(figures.apart[0], f"{text}.")]
    # The title of each figure names the run.
    return [
        Picture.from_figure(figure, f"{text}." if place == 0 else "", alt=f"{text}, {isolate(run.name)}.")
        for place, (figure, run) in enumerate(zip(figures.apart, runs, strict=True))
    ]


def _runs_table(runs: Sequence[RunSummary]) -> DataTable:
    kinds = [kind for kind in ("validation", "test") if any(run.loss(kind) is not None for run in runs)]
    rows = [
        [
            run.name,
            *(_number(run.loss(kind)) for kind in kinds),
            f"every {run.mixture['horizon']} steps" if run.learned else "fixed",
            f"{run.mixture['steps_done']:,} of {run.mixture['budget']:,}",
            _time(run),
        ]
        for run in runs
    ]
    return DataTable(["run", *(f"{kind} loss" for kind in kinds), "weights learned", "steps", "time"], rows)


def _mixture_tables(runs: Sequence[RunSummary]) -> list[DataTable]:
    if len(runs) == 1:
        weights = runs[0].mixture["weights"]
        first = runs[0].mixture["history"][0]["weights"]
        columns = {"initial": first, "average": weights["average"], "last": weights["last"]}
        return [_weights_table(columns, "Weights")]
    return [
        _weights_table({run.name: run.mixture["weights"][when] for run in runs}, text)
        for when, text in (("average", "Average weight over the run"), ("last", "Weight at the end"))
    ]


def _weights_table(columns: Mapping[str, Mapping[str, float]], text: str) -> DataTable:
    """Return a table of the weights by domain, the largest first; the shades are relative to the largest."""
    sums: dict[str, float] = {}
    for weights in columns.values():
        for name, weight in weights.items():
            sums[name] = sums.get(name, 0.0) + weight
    order = sorted(sums, key=sums.__getitem__, reverse=True)
    found = [[weights.get(name) for weights in columns.values()] for name in order]
    largest = max(weight or 0.0 for row in found for weight in row)
    rows = [[name, *map(_number, row)] for name, row in zip(order, found, strict=True)]
    shades = [[(weight or 0.0) / largest for weight in row] for row in found]
    return DataTable(["domain", *columns], rows, text, shades)


def _rows_table(runs: Sequence[RunSummary]) -> DataTable:
    """Return a table of rows and epochs by domain, the most seen first."""
    seen = [run.mixture["rows"]["trained_on"] for run in runs]
    available = {name: n for run in runs for name, n in run.mixture["rows"]["available"].items()}
    names = sorted(available, key=lambda name: sum(taken.get(name, 0) for taken in seen), reverse=True)
    rows = [
        [
            name,
            f"{available[name]:,}",
            *(f"{taken[name] / available[name]:.2f}" if name in taken else "" for taken in seen),
        ]
        for name in names
    ]
    columns = ["domain", "rows", *(["epochs"] if len(runs) == 1 else [run.name for run in runs])]
    return DataTable(columns, rows, "Rows of each domain, and epochs in each run")


def _fidelity_section(measured: Sequence[tuple[RunSummary, dict[str, Any]]]) -> PageSection:
    columns = ["run", "after step", "steps", "exact, same rows", "relative error", "replicates agree"]
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
    verdicts = [
        f"{isolate(run.name)}, after step {line['step']}: {one.rstrip('.')}."
        for run, line in measured
        for one in line.get("verdict", [])
    ]
    table = DataTable([*columns, "true effect"], rows)
    return PageSection("Is the hypergradient right?", [FIDELITY, *verdicts], tables=[table])


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _time(run: RunSummary) -> str:
    seconds = float(run.steps[-1]["seconds"]) if run.steps else 0.0
    if seconds < 120:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
