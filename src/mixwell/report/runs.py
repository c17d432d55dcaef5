"""The pictures and the page of training runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np

from mixwell import environment
from mixwell.report import page, style
from mixwell.report.page import Page, Picture, Section, Sheet
from mixwell.training import fidelity, metrics, mixture
from mixwell.training.run import CONFIG

Lines = list[dict[str, Any]]
Colours = Mapping[str, str]


@final
@dataclass(frozen=True)
class Told:
    """What a run's directory tells.

    Args:
        name: of the run.
        config: its file.
        mixture: the artefact.
        steps: lines of metrics, of each kind.
        rounds: weight updates.
        evaluations: losses on validation and test sets.
        fidelity: measurements of the estimate, where they were made.
    """

    name: str
    config: str
    mixture: dict[str, Any]
    steps: Lines
    rounds: Lines
    evaluations: Lines
    fidelity: Lines

    @property
    def domains(self) -> list[str]:
        """Their names."""
        return self.mixture["domains"]

    @property
    def learned(self) -> bool:
        """Whether the weights were learned."""
        return self.mixture["method"] != "fixed"


def read(folder: Path, *, name: str | None = None) -> Told:
    """Read a run's directory.

    Args:
        folder: the directory.
        name: of the run, by default the folder's.

    Returns:
        What it tells.

    Raises:
        ValueError: the run has not come to its first checkpoint yet.
    """
    try:
        artefact = json.loads((folder / mixture.FILE).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{folder} has no {mixture.FILE}: the run has not saved anything yet") from error
    by_kind: dict[str, Lines] = {"step": [], "round": [], "evaluation": []}
    for line in metrics.read(folder):
        by_kind.setdefault(line["kind"], []).append(line)
    return Told(
        name=name or folder.resolve().name,
        config=(folder / CONFIG).read_text(encoding="utf-8"),
        mixture=artefact,
        steps=by_kind["step"],
        rounds=by_kind["round"],
        evaluations=by_kind["evaluation"],
        fidelity=fidelity.read(folder),
    )


def write(folders: Sequence[Path], out: Path) -> list[Path]:
    """Draw the figures and write the page of one or several runs.

    Args:
        folders: the runs' directories.
        out: where to.

    Returns:
        The files.
    """
    runs = [read(folder, name=name) for folder, name in zip(folders, _names(folders), strict=True)]
    out.mkdir(parents=True, exist_ok=True)
    figures = {
        "validation": _overlay(runs),
        "weights": _side_by_side(runs, _weights, "weight of each domain", height=3.4),
        "losses": _side_by_side(runs, _losses, "training loss by domain", height=3.2),
        "rows": _side_by_side(runs, _rows, "rows seen, in thousands", height=3.0),
    }
    learning = [run for run in runs if run.learned and run.rounds]
    if learning:
        figures["hypergradients"] = _side_by_side(learning, _hypergradients, "hypergradient", height=3.2)
    (out / "figures").mkdir(exist_ok=True)
    written = [
        path for name, figure in figures.items() for path in style.save(figure, out / "figures" / name)
    ]
    return [*written, page.write(_page(runs, figures, folders), out / "report.html")]


# ------------------------------------------------------------------------------------------------ figures


def _side_by_side(
    runs: Sequence[Told], draw: Callable[[Any, Told, Colours], None], label: str, *, height: float
) -> Any:
    """A panel for each run; a domain has the same colour in all of them."""
    names = list(dict.fromkeys(name for run in runs for name in run.domains))
    colours = dict(zip(names, style.colours(len(names)), strict=True))
    columns = min(len(runs), 3)
    rows = -(-len(runs) // columns)
    width = 7.0 if columns == 1 else 4.6 * columns
    figure, axes = style.new_figure(rows, columns, width=width, height=height)
    for axis, run in zip(axes.flat, runs, strict=False):
        draw(axis, run, colours)
        axis.set_xlabel("training step", fontsize=9)
        axis.set_ylabel(label, fontsize=9)
        axis.set_xlim(0, run.mixture["budget"])
        if len(runs) > 1:
            axis.set_title(style.plain(run.name), fontsize=10, color=style.INK)
    for axis in axes.flat[len(runs) :]:
        axis.set_visible(False)
    shown: dict[str, Any] = {}
    for axis in axes.flat:
        handles, labels = axis.get_legend_handles_labels()
        shown |= dict(zip(labels, handles, strict=True))
    told = [style.plain(name) for name in names if style.plain(name) in shown]
    handles = [shown[name] for name in told]
    figure.legend(
        handles, told, loc="outside lower center", ncols=min(len(told), 5), fontsize=8, frameon=False
    )
    return figure


def _own(colours: Colours, run: Told) -> list[tuple[str, str]]:
    return [(name, colours[name]) for name in run.domains]


def _overlay(runs: Sequence[Told]) -> Any:
    figure, axes = style.new_figure(1, 1, width=7.0, height=3.4)
    for run, colour in zip(runs, style.colours(len(runs)), strict=True):
        points = [(line["step"], line["losses"]["validation"]) for line in run.evaluations]
        steps, losses = zip(*points, strict=True) if points else ((), ())
        axes[0, 0].plot(
            steps, _numbers(losses), color=colour, marker="o", markersize=3, label=style.plain(run.name)
        )
    axes[0, 0].set_xlabel("training step", fontsize=9)
    axes[0, 0].set_ylabel("validation loss", fontsize=9)
    if len(runs) > 1:
        axes[0, 0].legend(fontsize=8, frameon=False)
    return figure


def _weights(axis: Any, run: Told, colours: Colours) -> None:
    history = run.mixture["history"]
    steps = [point["step"] for point in history]
    # The last weights are those of the last update; they are drawn to where training came.
    ends = [*steps, max(run.mixture["steps_done"], steps[-1])]
    for name, colour in _own(colours, run):
        values = [point["weights"][name] for point in history]
        axis.plot(
            ends, [*values, values[-1]], drawstyle="steps-post", color=colour, lw=1.8, label=style.plain(name)
        )
    axis.set_ylim(0, 1)


def _losses(axis: Any, run: Told, colours: Colours) -> None:
    for name, colour in _own(colours, run):
        points = [(line["step"], line["losses"][name]) for line in run.steps if name in line["losses"]]
        steps, losses = zip(*points, strict=True) if points else ((), ())
        axis.plot(steps, _numbers(losses), color=colour, lw=1.2, label=style.plain(name))


def _rows(axis: Any, run: Told, colours: Colours) -> None:
    steps = [0, *(line["step"] for line in run.steps)]
    for name, colour in _own(colours, run):
        seen = np.cumsum([0, *(line["counts"].get(name, 0) for line in run.steps)]) / 1000
        axis.plot(steps, seen, color=colour, lw=1.5, label=style.plain(name))
    axis.set_ylim(bottom=0)


def _hypergradients(axis: Any, run: Told, colours: Colours) -> None:
    rounds = [line for line in run.rounds if line["scores"]]
    steps = np.array([line["step"] for line in rounds], dtype=float)
    wide = run.mixture["budget"] / 250
    axis.axhline(0, color=style.FAINT, lw=1)
    for index, (name, colour) in enumerate(_own(colours, run)):
        scores = np.array([line["scores"][name] for line in rounds])
        errors = np.array([line["noise"].get(name, 0.0) or 0.0 for line in rounds])
        shifted = steps + (index - (len(run.domains) - 1) / 2) * wide / 2
        axis.errorbar(
            shifted, scores, yerr=errors, color=colour, lw=1.2, marker="o", ms=3, label=style.plain(name)
        )


# --------------------------------------------------------------------------------------------------- page


def _page(runs: Sequence[Told], figures: Mapping[str, Any], folders: Sequence[Path]) -> Page:
    one = runs[0] if len(runs) == 1 else None
    sections = [
        Section(
            "The mixture",
            _mixture_words(one) if one else ("Each run's weights; where a line is flat they were fixed.",),
            [Picture.of(figures["weights"], "Weight of each domain over training, from round to round.")],
            [_mixture_sheet(run) for run in runs],
            wide=True,
        ),
        Section(
            "Losses",
            (),
            [
                Picture.of(figures["validation"], "Mean loss on the validation set."),
                Picture.of(
                    figures["losses"], "Mean training loss of each domain between two lines of the log."
                ),
            ],
            [_evaluation_sheet(runs)],
            wide=len(runs) > 1,
        ),
    ]
    if "hypergradients" in figures:
        sections.append(
            Section(
                "What moved the weights",
                (
                    "The hypergradient tells how the validation loss at the end of a round would change with "
                    "the weight of each domain in it; the weights move against it, so a domain below the others "
                    "gains. Bars are standard errors over the parts of the validation batch; they leave out the "
                    "noise of the training batches.",
                ),
                [Picture.of(figures["hypergradients"], "Hypergradient of each domain, round by round.")],
                wide=True,
            )
        )
    measured = [(run, line) for run in runs for line in run.fidelity]
    if measured:
        sections.append(_fidelity_section(measured))
    sections.append(
        Section(
            "What was trained on",
            (),
            [Picture.of(figures["rows"], "Rows of each domain, added up.")],
            [_rows_sheet(run) for run in runs],
            wide=len(runs) > 1,
        )
    )
    sections.append(Section("Settings", blocks=[(f"config.yaml of {run.name}", run.config) for run in runs]))
    title = f"Run {one.name}" if one else f"{len(runs)} runs: {', '.join(run.name for run in runs)}"
    return Page(
        title, [_lead(run, alone=one is not None) for run in runs], sections, environment.facts(folders)
    )


def _lead(run: Told, *, alone: bool) -> str:
    artefact = run.mixture
    state = "" if artefact["finished"] else f", stopped after step {artefact['steps_done']}"
    losses = [line["losses"] for line in run.evaluations]
    change = ""
    if losses and losses[-1]["validation"] is not None:
        change = f" Validation loss {losses[-1]['validation']:.4f}"
        if len(losses) > 1 and losses[0]["validation"] is not None:
            change += f", from {losses[0]['validation']:.4f} before training"
        if losses[-1].get("test") is not None:
            change += f"; test loss {losses[-1]['test']:.4f}"
        change += "."
    how = f"weights learned every {artefact['horizon']} steps" if run.learned else "fixed weights"
    start = "" if alone else f"{run.name}: "
    return f"{start}{artefact['budget']} steps, {how}{state}.{change}"


def _mixture_words(run: Told) -> tuple[str, ...]:
    last = run.mixture["weights"]["last"]
    most = max(last, key=last.__getitem__)
    if not run.learned:
        return ("The weights were fixed.",)
    return (
        f"The greatest weight at the end is {last[most]:.3f}, of {most}. The average over the run is the mixture "
        "to take for another run; it is in mixture.json.",
    )


def _mixture_sheet(run: Told) -> Sheet:
    weights, first = run.mixture["weights"], run.mixture["history"][0]["weights"]
    return Sheet(
        ["domain", "at first", "average", "last"],
        [
            [name, f"{first[name]:.4f}", f"{weights['average'][name]:.4f}", f"{weights['last'][name]:.4f}"]
            for name in run.domains
        ],
        run.name,
    )


def _evaluation_sheet(runs: Sequence[Told]) -> Sheet:
    ends = [run.evaluations[-1]["losses"] if run.evaluations else {} for run in runs]
    kinds = [kind for kind in ("validation", "test") if any(kind in last for last in ends)]
    rows = [
        [run.name, *(_number(last.get(kind)) for kind in kinds), _seconds(run)]
        for run, last in zip(runs, ends, strict=True)
    ]
    return Sheet(["run", *(f"{kind} loss" for kind in kinds), "seconds of training"], rows)


def _rows_sheet(run: Told) -> Sheet:
    rows = run.mixture["rows"]
    return Sheet(
        ["domain", "rows", "seen", "epochs"],
        [
            [name, f"{n:,}", f"{rows['trained_on'][name]:,}", f"{rows['trained_on'][name] / n:.2f}"]
            for name, n in rows["available"].items()
        ],
        run.name,
    )


def _fidelity_section(measured: Sequence[tuple[Told, dict[str, Any]]]) -> Section:
    return Section(
        "Is the hypergradient right?",
        (
            "The same steps were trained again with every weight moved up and down a little, which gives the "
            "exact hypergradient. A tangent cosine of 1 means that the estimate moves the weights in the right "
            "direction.",
        ),
        sheets=[
            Sheet(
                ["run", "after step", "steps", "tangent cosine", "signs that agree", "relative error"],
                [
                    [
                        run.name,
                        str(line["step"]),
                        str(line["horizon"]),
                        _number(line["cosine"]),
                        f"{line['sign_agreement']:.0%}",
                        _number(line["relative_error"]),
                    ]
                    for run, line in measured
                ],
            )
        ],
    )


def _names(folders: Sequence[Path]) -> list[str]:
    """The folders' names, with those of their parents where they would be the same."""
    short = [folder.resolve().name for folder in folders]
    if len(set(short)) == len(short):
        return short
    return [str(folder) for folder in folders]


def _numbers(values: Sequence[float | None]) -> list[float]:
    return [float("nan") if value is None else value for value in values]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _seconds(run: Told) -> str:
    return f"{run.steps[-1]['seconds']:.0f}" if run.steps else ""
