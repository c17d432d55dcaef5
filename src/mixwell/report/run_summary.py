"""What the directories of training runs tell."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from mixwell import methods
from mixwell.training import fidelity, metrics, mixture
from mixwell.training.run import CONFIG

Lines = list[dict[str, Any]]
HYPERGRADIENTS = ("mixwell", "truncated", "implicit-cg", "implicit-neumann", "single-loop")
"""The methods whose scores are estimates of the hypergradient."""


@final
@dataclass(frozen=True)
class RunSummary:
    """What a run's directory tells.

    Args:
        name: of the run.
        config: its file.
        mixture: the artifact.
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
        """Whether the weights were learned in the run itself, and not before it."""
        known = methods.every().get(self.mixture["method"])
        if known is not None and known.kind == "static":
            return False
        moved = len({tuple(point["weights"].values()) for point in self.mixture["history"]}) > 1
        return moved or (known is not None and known.stages is None)

    @property
    def hypergradient(self) -> bool:
        """Whether what moved the weights is an estimate of the hypergradient."""
        return self.mixture["method"] in HYPERGRADIENTS

    def loss(self, kind: str = "validation", *, at: int = -1) -> float | None:
        """A loss of an evaluation.

        Args:
            kind: ``"validation"`` or ``"test"``.
            at: which evaluation, by default the last.

        Returns:
            The loss; ``None`` where there is none, or it was not finite.
        """
        return self.evaluations[at]["losses"].get(kind) if self.evaluations else None


def read(folder: Path, *, name: str | None = None) -> RunSummary:
    """Read a run's directory.

    Args:
        folder: the directory.
        name: of the run, by default the folder's.

    Returns:
        What it tells.

    Raises:
        ValueError: the run has not come to its first checkpoint yet.
    """
    artifact = mixture.read(folder)
    by_kind: dict[str, Lines] = {"step": [], "round": [], "evaluation": []}
    for line in metrics.read(folder):
        by_kind.setdefault(line["kind"], []).append(line)
    return RunSummary(
        name=name or folder.resolve().name,
        config=(folder / CONFIG).read_text(encoding="utf-8"),
        mixture=artifact,
        steps=by_kind["step"],
        rounds=by_kind["round"],
        evaluations=by_kind["evaluation"],
        fidelity=fidelity.read(folder),
    )


def names(folders: Sequence[Path]) -> list[str]:
    """What runs are called: by their folders, with the parents in which they differ where they must be.

    Args:
        folders: the runs' directories.

    Returns:
        A name for each.
    """
    whole = [folder.resolve() for folder in folders]
    short = [folder.name for folder in whole]
    if len(set(short)) == len(short):
        return short
    common = os.path.commonpath(whole)
    return [os.path.relpath(folder, common) if str(folder) != common else folder.name for folder in whole]
