"""The verdict on a run in words: the mixture to use, whether it has settled, what it gains, and what to do next.

``mixwell run`` prints it and the report begins with it.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from mixwell import methods
from mixwell.training import builder, config_io, metrics, mixture_file
from mixwell.training.agreement import MINIMUM_ROUNDS, Agreement, State, measure_agreement, sign_flip_limit
from mixwell.training.run import CONFIG
from mixwell.utils.bidi import isolate
from mixwell.utils.intervals import Interval, interval

HYPERGRADIENTS = ("mixwell", "truncated", "implicit-cg", "implicit-neumann", "single-loop")
"""The methods with scores that are estimates of the hypergradient."""
LARGEST = 4
"""Number of weights that are named."""
STILL = 0.02
"""Weights that changed by less over the last rounds (total variation) count as unchanged."""
NOISY = 0.25
"""Scores with a smaller fraction that their standard errors do not explain need more validation rows."""
SEEDS = 5


@final
@dataclass(frozen=True)
class Effect:
    """The predicted effect of the weights on the validation loss.

    Args:
        interval: of the mean over the rounds.
        sign: -1 where the loss falls by more than noise alone reaches in 5% of runs, 1 where it rises by as much,
            0 where neither is shown.
    """

    interval: Interval
    sign: int


@final
@dataclass(frozen=True)
class Verdict:
    """Answers to what a user asks after a run, a paragraph each.

    Args:
        mixture: which mixture to use, and why that one.
        settled: whether the weights have settled, still move, or show no direction.
        effect: the predicted effect of the weights on the validation loss, or why there is none.
        next: what to do next, with the command.
        state: what ``settled`` is about; ``None`` where no weights were learned in the run.
        predicted: the prediction, where there is one.
        command: the command of ``next``; empty where the run cannot be repeated from the command line.
    """

    mixture: str
    settled: str
    effect: str
    next: str
    state: State | None
    predicted: Effect | None
    command: str

    def paragraphs(self) -> list[str]:
        """Return the paragraphs in reading order."""
        return [self.mixture, self.settled, self.effect, self.next]


def read_verdict(folder: Path) -> Verdict:
    """Return the verdict on the run in a directory.

    Raises:
        ValueError: the run has no checkpoint yet, or its files are of other domains.
    """
    found, config = mixture_file.read_mixture(folder), config_io.read_config(folder / CONFIG)
    horizon = int(found["horizon"])
    points = max((int(line.get("points") or 1) for line in found.get("signal") or ()), default=1)
    rounds, domains = list(metrics.read_metrics(folder, "round")), set(found["domains"])
    for line in rounds:
        for key in ("weights", "new_weights"):
            if set(line[key]) != domains or None in line[key].values():
                raise ValueError(
                    f"{folder / metrics.FILE}: the {key} of round {line['index']} are not those of the domains in "
                    f"{mixture_file.FILE}; was the file edited?"
                )
    return judge(
        found,
        rounds,
        config.model_dump(mode="json"),
        folder,
        validation_rows=builder.validation_rows(config, horizon, points=points),
    )


def judge(
    mixture: Mapping[str, Any],
    rounds: Sequence[Mapping[str, Any]],
    config: Mapping[str, Any],
    folder: Path,
    *,
    validation_rows: int | None = None,
) -> Verdict:
    """Return the verdict on a run.

    Args:
        mixture: contents of ``mixture.json``.
        rounds: lines of the metrics of this kind.
        config: contents of ``config.yaml``.
        folder: the run's directory, for the commands.
        validation_rows: rows of one validation gradient, where known.
    """
    method = str(mixture["method"])
    domains: list[str] = list(mixture["domains"])
    known = [line for line in rounds if _complete(line, domains)]
    learned = learned_in_run(mixture)
    found = measure_agreement(*_scores(known, domains)) if learned and len(domains) > 1 else None
    predicted = _predict(known, domains, mixture) if learned and method in HYPERGRADIENTS else None
    state = None if found is None else found.state
    moved = _late_change(known, domains, found)
    edge = state is State.MOVING and moved < STILL
    early = state is State.NOISE and predicted is not None and predicted.sign < 0
    if edge or early:
        state = State.SETTLED
    noisy = state is State.NOISE and found is not None and found.trust is not None and found.trust < NOISY
    harmful = predicted is not None and predicted.sign > 0
    command, why = _next(mixture, config, folder, state, validation_rows if noisy else None, harmful=harmful)
    return Verdict(
        mixture=_mixture_text(mixture, state, predicted, learned=learned),
        settled=_settled_text(method, found, learned=learned, moved=moved, edge=edge, early=early),
        effect=_effect_text(mixture, predicted, len(known), learned=learned),
        next=f"Next: {why}" + (f": `{command}`" if command else "."),
        state=state,
        predicted=predicted,
        command=command,
    )


def learned_in_run(mixture: Mapping[str, Any]) -> bool:
    """Return whether the weights were learned in the run itself, and not before it."""
    known = methods.every().get(str(mixture["method"]))
    if known is not None and known.kind == "static":
        return False
    moved = len({tuple(point["weights"].values()) for point in mixture["history"]}) > 1
    return moved or (known is not None and known.stages is None)


def _complete(line: Mapping[str, Any], domains: Sequence[str]) -> bool:
    scores = line.get("scores") or {}
    return all(isinstance(scores.get(name), int | float) for name in domains)


def _scores(
    rounds: Sequence[Mapping[str, Any]], domains: Sequence[str]
) -> tuple[NDArray[np.float64], NDArray[np.float64] | None]:
    scores = np.array([[line["scores"][name] for name in domains] for line in rounds], dtype=np.float64)
    noise = [[(line.get("noise") or {}).get(name) for name in domains] for line in rounds]
    shape = (len(rounds), len(domains))
    if not rounds or any(value is None for row in noise for value in row):
        return scores.reshape(shape), None
    return scores.reshape(shape), np.array(noise, dtype=np.float64)


def _late_change(
    rounds: Sequence[Mapping[str, Any]], domains: Sequence[str], found: Agreement | None
) -> float:
    """Return how far the weights went in the last rounds, half the sum of the absolute changes."""
    if found is None or not found.late_rounds:
        return math.nan
    late = rounds[-found.late_rounds :]
    before, after = late[0]["weights"], late[-1]["new_weights"]
    return 0.5 * sum(abs(after[name] - before[name]) for name in domains)


def _predict(
    rounds: Sequence[Mapping[str, Any]], domains: Sequence[str], mixture: Mapping[str, Any]
) -> Effect | None:
    r"""Return the first-order effect of a round's weights on the validation loss at its end.

    ``e_k = sum_j h_kj (w_kj - w_0j)``: the change of the loss that round k had from its weights ``w_k`` instead
    of the initial ones. ``w_k`` was chosen before ``h_k`` was measured, so noise in the scores does not favor
    the learned weights: the ``e_k`` of pure noise is symmetric about 0. The interval is Student's over the rounds
    that had other weights than the initial ones, which contains every noise that differs between rounds; the
    sign is that of a sign-flip test, since effects of the first rounds are often much larger than later ones.
    """
    first: Mapping[str, float] = mixture["history"][0]["weights"]
    effects = [
        sum(line["scores"][name] * (line["weights"][name] - first[name]) for name in domains)
        for line in rounds
        if any(abs(line["weights"][name] - first[name]) > 1e-12 for name in domains)
    ]
    found = interval(effects)
    if found.count < 2 or not math.isfinite(found.mean):
        return None
    beyond = abs(found.mean) >= sign_flip_limit(np.array(effects))
    return Effect(found, int(np.sign(found.mean)) if beyond else 0)


def _mixture_text(
    mixture: Mapping[str, Any], state: State | None, predicted: Effect | None, *, learned: bool
) -> str:
    first, average = mixture["history"][0]["weights"], mixture["weights"]["average"]
    last = mixture["weights"]["last"]
    if not learned:
        known = methods.every().get(str(mixture["method"]))
        source = "found before it" if known is not None and known.kind == "offline" else "that it was given"
        return f"Mixture: {_weights(first)}; the run kept the weights {source}."
    if not mixture["finished"]:
        return (
            f"Mixture after {mixture['steps_done']:,} of {mixture['budget']:,} steps: {_weights(last)}; "
            f"{_weights(average)} on average. Which to use is for the finished run to tell."
        )
    if predicted is not None and predicted.sign > 0:
        return (
            f"Mixture to use: the initial weights, {_weights(first)}, since the loss is predicted to have risen "
            f"with the learned ones, {_weights(average)} on average. They went too far, or had been right before."
        )
    shown = state not in (State.NOISE, State.TOO_FEW) if predicted is None else predicted.sign < 0
    if not shown:
        return (
            f"Mixture to use: this run does not decide between the initial weights, {_weights(first)}, and the "
            f"learned ones, {_weights(average)} on average (`weights.average` in mixture.json)."
        )
    text = (
        f"Mixture to use: the average over the run, {_weights(average)} (`weights.average` in mixture.json, which "
        "`mixwell export` writes). A run with these fixed weights sees each domain as often as this one did, and "
        "the average has less noise than the last weights"
    )
    if state is State.MOVING:
        text += f", {_weights(last)}, toward which the weights still move"
    return text + "."


def _settled_text(
    method: str, found: Agreement | None, *, learned: bool, moved: float, edge: bool, early: bool
) -> str:
    if not learned or found is None:
        return "Settled: no weights were learned in this run."
    if found.state is State.TOO_FEW:
        return (
            f"Settled: not known. Rounds with scores: {found.rounds}; at least {MINIMUM_ROUNDS} are needed to "
            "tell a direction from chance."
        )
    numbers = (
        f"successive rounds agree by {found.agreement:.3f} (cosine; pure noise stays below {found.chance:.3f} in "
        f"95% of runs), the last {found.late_rounds} by {found.late_agreement:.3f} (below {found.late_chance:.3f})"
    )
    text = {
        State.NOISE: f"No common direction is seen: {numbers}. The weights follow noise, or were near their best "
        "after few rounds.",
        State.SETTLED: f"The weights have settled: {numbers}, so no direction is left in the last rounds.",
        State.MOVING: f"The weights have not settled: {numbers}, so they are still on their way.",
        State.UNCLEAR: f"It is not clear whether the weights have settled: {numbers}.",
    }[found.state]
    if edge:
        text = (
            f"The weights have settled at an edge or a limit: {numbers}, yet the weights changed by only "
            f"{100 * moved:.1f} points in the last rounds."
        )
    if early:
        text = (
            f"The weights settled after few rounds: {numbers}, so no direction is left, and the loss is predicted "
            "to be lower than with the initial weights."
        )
    if found.trust is None:
        text += " The scores have no standard errors, so the noise within a round is not known."
    else:
        text += f" Of a round's scores, {100 * found.trust:.0f}% is more than their standard errors explain."
    if method not in HYPERGRADIENTS:
        text += (
            f" The scores of {method} are not derivatives of the validation loss, so that they agree does "
        )
        text += "not show that the loss falls."
    return text


def _effect_text(mixture: Mapping[str, Any], predicted: Effect | None, rounds: int, *, learned: bool) -> str:
    if not learned:
        return "Predicted effect: none, since no weights were learned."
    if mixture["method"] not in HYPERGRADIENTS:
        return (
            f"Predicted effect: no prediction; the scores of {mixture['method']} are not derivatives of the "
            "validation loss."
        )
    if predicted is None:
        return f"Predicted effect: no prediction from {rounds} round{'s'[: rounds != 1]} with scores."
    found = predicted.interval
    if not predicted.sign:
        sure = "Noise alone has an effect of this size in more than 5% of runs."
    else:
        sure = "Noise alone has an effect of this size in less than 5% of runs"
        sure += ", though the interval has zero in it: the rounds differ in size." if 0.0 in found else "."
    return (
        f"Predicted effect: {found.mean:+.4f} [{found.low:+.4f}, {found.high:+.4f}] of validation loss per round "
        f"of {mixture['horizon']} steps, compared with the initial weights (95% over {found.count} rounds; first "
        f"order, from hypergradients measured after the weights were chosen). {sure} What a whole run gains is "
        "not predicted: effects of rounds can add up or fade."
    )


def _next(
    mixture: Mapping[str, Any],
    config: Mapping[str, Any],
    folder: Path,
    state: State | None,
    more_than: int | None,
    *,
    harmful: bool,
) -> tuple[str, str]:
    """Return the next command and what it is for.

    Args:
        more_than: the rows of one validation gradient, where more would help.
        harmful: whether the loss is predicted to rise with the learned weights.
    """
    run, file = shlex.quote(str(folder)), shlex.quote(str(folder / CONFIG))
    method, budget = str(mixture["method"]), int(mixture["budget"] or mixture["steps_done"])
    settings: Mapping[str, Any] = config.get("mixer") or {}
    parts = [*(config.get("domains") or {}).values(), config.get("model"), config.get("validation")]
    given = any(isinstance(one, Mapping) and ("given" in one or one.get("kind") == "given") for one in parts)

    def again(change: str, name: str) -> str:
        return f"mixwell run {file} --set {change} --out {shlex.quote(f'{folder}-{name}')}"

    if not mixture["finished"]:
        why, command = "the run is not finished; continue it", f"mixwell resume {run}"
    elif more_than is not None:
        why = "measure with less noise, by more validation rows"
        command = again(f"mixer.validation_rows={4 * more_than}", "more-validation")
    elif state in (State.MOVING, State.TOO_FEW, State.UNCLEAR) and not harmful:
        why, command = "train longer", again(f"steps={2 * budget}", f"{2 * budget}-steps")
    else:
        baseline = "proportional" if settings.get("weights") == "proportional" else "uniform"
        other = "mixwell" if method in ("fixed", "uniform", "proportional") else method
        why = f"one run does not show that a mixture is better; compare with {baseline} weights over {SEEDS} seeds"
        command = f"mixwell compare {file} --methods {other},{baseline} --seeds {SEEDS}"
    if given:
        return "", f"{why} (from Python, since data or model were passed to mixwell.train)"
    return command, why


def _weights(weights: Mapping[str, float]) -> str:
    if len(weights) > 1 and max(weights.values()) - min(weights.values()) < 1e-6:
        return f"uniform ({next(iter(weights.values())):.1%} each)"
    names = sorted(weights, key=weights.__getitem__, reverse=True)
    shown = ", ".join(f"{isolate(name)} {weights[name]:.1%}" for name in names[:LARGEST])
    others = names[LARGEST:]
    return shown + (f", {len(others)} others {sum(weights[n] for n in others):.1%}" if others else "")
