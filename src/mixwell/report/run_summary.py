"""The contents of a run's directory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from mixwell.training import fidelity, metrics, mixture_file
from mixwell.training.run import CONFIG
from mixwell.training.verdict import HYPERGRADIENTS, Verdict, learned_in_run, read_verdict
from mixwell.utils.regular_files import read_regular

Lines = list[dict[str, Any]]


@final
@dataclass(frozen=True)
class RunSummary:
    """The contents of a run's directory.

    Args:
        config: text of the config file.
        mixture: contents of ``mixture.json``.
        steps: lines of the metrics of this kind, as the next two.
        rounds: weight updates.
        evaluations: losses on validation and test sets.
        fidelity: measurements of the estimate, if there are any.
        verdict: on the run, in words.
    """

    name: str
    folder: Path
    config: str
    mixture: dict[str, Any]
    steps: Lines
    rounds: Lines
    evaluations: Lines
    fidelity: Lines
    verdict: Verdict

    @property
    def domains(self) -> list[str]:
        """Names of the domains."""
        return self.mixture["domains"]

    @property
    def seed(self) -> int:
        """The seed of the run."""
        return int(self.mixture["seed"])

    @property
    def learned(self) -> bool:
        """Whether the weights were learned in the run itself, and not before it."""
        return learned_in_run(self.mixture)

    @property
    def hypergradient(self) -> bool:
        """Whether the scores are estimates of the hypergradient."""
        return self.mixture["method"] in HYPERGRADIENTS

    def loss(self, kind: str = "validation", *, at: int = -1) -> float | None:
        """Return the ``"validation"`` or ``"test"`` loss of an evaluation, if there is one and it was finite."""
        return self.evaluations[at]["losses"].get(kind) if self.evaluations else None


def read(folder: Path, *, name: str | None = None) -> RunSummary:
    """Read a run's directory; the run's name is by default that of the folder.

    Raises:
        ValueError: The run has no checkpoint yet.
    """
    artifact = mixture_file.read_mixture(folder)
    by_kind: dict[str, Lines] = {"step": [], "round": [], "evaluation": []}
    for line in metrics.read_metrics(folder):
        by_kind.setdefault(line["kind"], []).append(line)
    return RunSummary(
        name=name or folder.resolve().name,
        folder=folder,
        config=read_regular(folder / CONFIG).decode("utf-8", "replace"),
        mixture=artifact,
        steps=by_kind["step"],
        rounds=by_kind["round"],
        evaluations=by_kind["evaluation"],
        fidelity=fidelity.read_measurements(folder),
        verdict=read_verdict(folder),
    )


def names(folders: Sequence[Path]) -> list[str]:
    """Return names of runs: those of their folders, with the parents if these are not unique."""
    paths = [folder.resolve() for folder in folders]
    short = [folder.name for folder in paths]
    if len(set(short)) == len(short):
        return short
    common = os.path.commonpath(paths)
    return [os.path.relpath(folder, common) if str(folder) != common else folder.name for folder in paths]
