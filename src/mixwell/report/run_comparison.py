"""The sentences at the top of a page of several runs: which is better, and whether that means anything."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

import yaml

from mixwell.lab.compare.summary import format_difference
from mixwell.report.run_summary import RunSummary
from mixwell.training.run import CONFIG
from mixwell.training.verdict import SEEDS
from mixwell.utils.bidi import isolate
from mixwell.utils.intervals import interval

NO_LOSS = "No run has a finite validation loss."
NOT_SETTINGS = ("seed", "output", "loggers", "compare", "device", "base")
"""Settings in which runs of the same kind may differ."""


def compare_runs(runs: Sequence[RunSummary]) -> list[str]:
    """Return which settings have the lowest mean loss, the paired difference from the next, and its interval.

    Runs that differ only in the seed count as one kind. Losses are on the test set if all runs have one.
    """
    kind = "test" if all(run.loss("test") is not None for run in runs) else "validation"
    known = [run for run in runs if run.loss(kind) is not None]
    if not known:
        return [NO_LOSS]
    kinds: dict[str, list[RunSummary]] = {}
    for run in known:
        kinds.setdefault(_settings(run), []).append(run)
    means = {key: sum(_loss(run, kind) for run in own) / len(own) for key, own in kinds.items()}
    order = sorted(kinds, key=means.__getitem__)
    best = kinds[order[0]]
    lead = [f"{_lowest(best, kind)}, {means[order[0]]:.4f}{_seeds(best)}."]
    if len(order) == 1:
        return [*lead, "These runs have the same settings apart from the seed, so none of them is better."]
    other = kinds[order[1]]
    by_seed = {run.seed: _loss(run, kind) for run in other}
    found = interval([_loss(run, kind) - by_seed[run.seed] for run in best if run.seed in by_seed])
    if found.count > 1:
        text = f"Compared with {_names(other)}: {format_difference(found)}"
        text += f" (95%, paired by seed, {found.count} seeds)"
        if 0.0 in found:
            text += f". The interval includes zero: {found.count} seeds do not show a difference"
            return [*lead, f"{text}.", _next(best[0], other[0])]
        return [*lead, f"{text}."]
    difference = means[order[0]] - means[order[1]]
    text = (
        f"Compared with {_names(other)} {difference:+.4f}, but a difference of one seed each means nothing: runs "
        "that differ only in the seed differ too, and by how much is not known from these runs."
    )
    return [*lead, text, _next(best[0], other[0])]


def _next(one: RunSummary, other: RunSummary) -> str:
    methods = list(dict.fromkeys(str(run.mixture["method"]) for run in (one, other)))
    if len(methods) == 1:  # the same method with other settings, which `compare` would not tell apart
        seed = max(one.seed, other.seed) + 1
        commands = [
            f"`mixwell run {shlex.quote(str(run.folder / CONFIG))} --set seed={seed} "
            f"--out {shlex.quote(f'{run.folder}-seed-{seed}')}`"
            for run in (one, other)
        ]
        return f"Next: repeat both with other seeds: {' and '.join(commands)}"
    learned = one if one.learned or not other.learned else other  # a fixed run has no settings of the mixer
    names = ",".join("uniform" if name == "fixed" else name for name in methods)
    file = shlex.quote(str(learned.folder / CONFIG))
    return f"Next: compare over several seeds: `mixwell compare {file} --methods {names} --seeds {SEEDS}`"


def _settings(run: RunSummary) -> str:
    plain: dict[str, Any] = yaml.safe_load(run.config) or {}
    return yaml.safe_dump({key: value for key, value in plain.items() if key not in NOT_SETTINGS})


def _loss(run: RunSummary, kind: str) -> float:
    found = run.loss(kind)
    assert found is not None
    return found


def _names(runs: Sequence[RunSummary]) -> str:
    return ("the settings of " if len(runs) > 1 else "") + isolate(runs[0].name)


def _lowest(runs: Sequence[RunSummary], kind: str) -> str:
    if len(runs) > 1:
        return f"The settings of {isolate(runs[0].name)} have the lowest mean {kind} loss"
    return f"{isolate(runs[0].name)} has the lowest {kind} loss"


def _seeds(runs: Sequence[RunSummary]) -> str:
    return f" over {len(runs)} seeds" if len(runs) > 1 else ""
