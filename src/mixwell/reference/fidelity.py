"""The quality of an estimated hypergradient on the user's own model.

It is compared with the exact one, with estimates from other batches, and with the true effect on the loss.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from mixwell.hypergradient.parameters import Parameters, cuda_devices
from mixwell.mixer.mixer import Mixer
from mixwell.mixer.row_counts import ROWS_IGNORE_WEIGHTS
from mixwell.reference.comparison import (
    rank_agreement,
    relative_error,
    sign_agreement,
    tangent,
    tangent_cosine,
)
from mixwell.reference.grades import (
    CHANCE,
    ENOUGH,
    FAIR,
    GOOD,
    NO_DIRECTION,
    SIZE,
    Grade,
    chance_of_agreement,
    chance_of_cosine,
    graded,
)
from mixwell.signals import Hypergradient, Signal
from mixwell.simplex.weights import Weights
from mixwell.typing import LossFn, Vector

Batches = Sequence[Mapping[str, Any]]
"""For each step the batch of every domain, by name."""


@final
@dataclass(frozen=True)
class Replication:
    """Whether a round's scores are reproducible with other batches, and whether they predict the loss.

    Args:
        estimates: the signal's scores from the same start with other batches, shape ``(replicates, m)``.
        agreement: their mean pairwise tangent cosine. Low: one round's direction is mostly noise.
        worst: the least of these cosines.
        effect: the true effect of the weights of these T steps on the validation loss at their end, by central
            differences with large differences on held-out rows, the mean over the replicates, shape ``(m,)``.
        effect_cosine: the mean tangent cosine of the estimates with it.
    """

    estimates: NDArray[np.float64]
    agreement: float
    worst: float
    effect: Vector
    effect_cosine: float


@final
@dataclass(frozen=True)
class Fidelity:
    """An estimated hypergradient compared with the exact one of the same T steps.

    Args:
        horizon: T.
        estimate: the signal's scores, shape ``(m,)``.
        exact: central differences of the real training run, shape ``(m,)``.
        cosine: of the two in the tangent space of the simplex, which is what the weights follow.
        sign_agreement: the fraction of domains that both would move in the same direction.
        rank_agreement: Kendall's tau of the two.
        relative_error: ``|estimate - exact| / |exact|``.
        replication: the comparison with other batches, where they were given.
    """

    domains: tuple[str, ...]
    horizon: int
    estimate: Vector
    exact: Vector
    cosine: float
    sign_agreement: float
    rank_agreement: float
    relative_error: float
    replication: Replication | None = None

    @property
    def grade(self) -> Grade:
        """The worst grade of the comparisons."""
        return max((grade for grade, _ in self._comparisons()), key=list(Grade).index)

    def verdict(self) -> list[str]:
        """Return the grade, then a sentence each for the exact one, other batches and the true effect."""
        found = [text for _, text in self._comparisons()]
        if self.replication is None:
            found.append(
                "Other batches: not measured; replicates show how much of a round's direction is noise."
            )
        heads = {
            Grade.GOOD: "Good: the weights can follow this hypergradient."
            if self.replication is not None
            else "Good on these batches.",
            Grade.USABLE: "Usable: follow it over several rounds, not one.",
            Grade.DO_NOT_TRUST: "Do not trust it: change what is named below, and measure again.",
            Grade.NOT_MEASURED: "Not measured: a comparison has no direction to compare with.",
        }
        return [heads[self.grade], *found]

    def _comparisons(self) -> list[tuple[Grade, str]]:
        count = len(self.domains)
        # With few domains the direction alone is often right by chance; then the size must agree as well.
        chance = chance_of_cosine(self.cosine, count)
        if chance > CHANCE and relative_error(tangent(self.estimate), tangent(self.exact)) <= SIZE:
            chance = 0.0
        texts = {
            Grade.GOOD: "the estimate is right",
            Grade.USABLE: "the estimate is roughly right",
            Grade.DO_NOT_TRUST: "the estimate is wrong: raise the curvature or shorten the horizon",
            Grade.NOT_MEASURED: NO_DIRECTION,
        }
        grade = graded(self.cosine, chance)
        line = f"Same batches: cosine {self.cosine:.2f} with the exact hypergradient of these steps; "
        comparisons = [(grade, line + texts[grade] + _by_chance(self.cosine, chance))]
        found = self.replication
        if found is None:
            return comparisons
        number = len(found.estimates)
        more = f"; measure with {max(ENOUGH, 2 * number)} replicates"
        chance = chance_of_agreement(found.agreement, count, number)
        texts = {
            Grade.GOOD: "one round's direction can be trusted",
            Grade.USABLE: "one round's direction is partly noise, so that it takes several rounds",
            Grade.DO_NOT_TRUST: "one round's direction is mostly noise: take more validation points or rows, or a "
            "longer horizon",
            Grade.NOT_MEASURED: NO_DIRECTION,
        }
        grade = graded(found.agreement, chance)
        if grade is Grade.USABLE and found.agreement >= GOOD:
            texts[grade] = "they may agree by chance"
        line = (
            f"Other batches: {number} replicates agree by {found.agreement:.2f} (worst {found.worst:.2f}); "
        )
        remark = _by_chance(found.agreement, chance)
        comparisons.append((grade, line + texts[grade] + remark + (more if remark else "")))
        chance = chance_of_cosine(found.effect_cosine, count, number)
        texts = {
            Grade.GOOD: "the weights move where the loss falls",
            Grade.USABLE: "the weights move roughly where the loss falls",
            Grade.DO_NOT_TRUST: "the weights do not move where the loss falls: take a longer horizon or more "
            "validation rows",
            Grade.NOT_MEASURED: NO_DIRECTION,
        }
        grade = graded(found.effect_cosine, chance)
        line = (
            f"True effect: cosine {found.effect_cosine:.2f} with the measured change of the held-out loss; "
        )
        remark = _by_chance(found.effect_cosine, chance)
        comparisons.append((grade, line + texts[grade] + remark + (more if remark else "")))
        return comparisons

    def __str__(self) -> str:
        wide = max(len(name) for name in self.domains)
        columns = {"estimate": self.estimate, "exact": self.exact}
        if self.replication is not None:
            columns["true effect"] = self.replication.effect
        head = "".join(f"  {name:<11}" for name in columns).rstrip()
        rows = "\n".join(
            f"  {name:<{wide}}" + "".join(f"  {column[j]:+.4e}" for column in columns.values())
            for j, name in enumerate(self.domains)
        )
        return (
            f"hypergradient over {self.horizon} steps: tangent cosine {self.cosine:.4f}, signs agree for "
            f"{self.sign_agreement:.0%} of the domains, rank agreement {self.rank_agreement:+.2f}, "
            f"relative error {self.relative_error:.3f}\n  {'':<{wide}}{head}\n{rows}\n"
            + "\n".join(self.verdict())
        )


def _by_chance(cosine: float, chance: float) -> str:
    """Return a remark on a cosine that looks good and is not, or nothing."""
    return (
        f" (chance alone gives this in {chance:.0%} of cases)" if cosine >= FAIR and chance > CHANCE else ""
    )


def measure_fidelity(
    model: nn.Module,
    optimizer: Optimizer,
    loss: LossFn,
    batches: Batches,
    validation: Any,
    *,
    signal: Callable[[], Signal] | None = None,
    weights: Mapping[str, float] | Sequence[float] | None = None,
    clip_norm: float | None = None,
    difference: float = 1e-2,
    double: bool = False,
    replicates: Sequence[tuple[Batches, Any]] = (),
    held_out: Sequence[Any] | None = None,
    effect_difference: float = 0.1,
    estimate_loss: LossFn | None = None,
) -> Fidelity:
    """Compare an estimate with the exact T-step hypergradient, where T is the number of ``batches``.

    The exact one is measured, not derived: every weight is moved up and down by ``difference``, the T steps
    are run again from the same start with the same batches and random numbers, and the validation losses (the mean
    over the points at which the signal takes a validation gradient) are subtracted. So it is exact for any
    optimizer, clipping and dropout. It costs ``2 m`` runs of T steps; give small batches.

    An estimate that is exact for its own batches need not hold for others. With ``replicates`` the same T steps
    are also estimated with other batches, and compared with each other and with the true effect: the change of the
    loss on ``held_out`` at the end of the T steps when a weight is moved by ``effect_difference``, the mean over
    the replicates. Each costs ``2 m + 1`` more runs of T steps.

    Model and optimizer are copied and not changed.

    Args:
        model: at any point of its training, with its optimizer.
        loss: ``loss(model, batch)`` returns the mean loss of a batch.
        batches: for each of the T steps the batch of every domain, by name.
        signal: a factory of the estimator; by default :class:`mixwell.Hypergradient` with its defaults.
        weights: uniform by default (``mixer.weights.last`` in mid-run).
        clip_norm: as in :class:`mixwell.Mixer`.
        difference: smaller is more exact until rounding dominates.
        double: run on a copy in float64 (inputs must fit), to allow small differences.
        replicates: at least two other pairs of ``batches`` and ``validation``.
        held_out: validation batches for the true effect, with as many rows as possible; by default all that were
            given.
        effect_difference: large, because the true effect is not the derivative along one trajectory.
        estimate_loss: the loss of the estimate, where training computes it otherwise, such as under autocast; the
            exact one is measured with ``loss``, in full precision.

    Returns:
        Both hypergradients and measures of their agreement; ``print`` it for a verdict in words.

    Raises:
        ValueError: there are no batches, not every step has the same domains, or there is only one replicate.
    """
    if len(replicates) == 1:
        raise ValueError("a single replicate has no other to agree with; give at least 2, or none")
    names = _domains_of(batches)
    for other, _ in replicates:
        if _domains_of(other) != names or len(other) != len(batches):
            raise ValueError(
                f"a replicate has {len(other)} steps of {_domains_of(other)}, the batches have {len(batches)} of "
                f"{names}; they must agree"
            )
    experiment = _Experiment(
        getattr(model, "_orig_mod", model), optimizer, loss, estimate_loss or loss, clip_norm, double=double
    )
    point = Weights(names, weights)
    made = signal or Hypergradient
    due = made().validation_points(len(batches)) or (len(batches),)
    estimate = experiment.estimate(batches, validation, point, made())
    exact = _differences(
        lambda moved: experiment.train(batches, [validation], moved, due=due), point.values, difference
    )
    replication = None
    if replicates:
        estimates = np.stack([experiment.estimate(*one, point, made()) for one in replicates])
        pairs = [tangent_cosine(a, b) for k, a in enumerate(estimates) for b in estimates[:k]]
        wanted = held_out or [validation, *(one for _, one in replicates)]
        effects = [
            _differences(
                lambda moved, steps=steps: experiment.train(steps, wanted, moved, due=(len(batches),)),
                point.values,
                effect_difference,
            )
            for steps, _ in replicates
        ]
        effect = np.mean(effects, axis=0)
        replication = Replication(
            estimates,
            agreement=float(np.mean(pairs)),
            worst=float(np.min(pairs)),
            effect=effect,
            effect_cosine=float(np.mean([tangent_cosine(one, effect) for one in estimates])),
        )
    return Fidelity(
        domains=names,
        horizon=len(batches),
        estimate=estimate,
        exact=exact,
        cosine=tangent_cosine(estimate, exact),
        sign_agreement=sign_agreement(estimate, exact),
        rank_agreement=rank_agreement(estimate, exact),
        relative_error=relative_error(estimate, exact),
        replication=replication,
    )


def _domains_of(batches: Batches) -> tuple[str, ...]:
    if not batches:
        raise ValueError("batches must hold one mapping of domain to batch for every step; got none")
    names = tuple(batches[0])
    for t, step in enumerate(batches):
        if tuple(step) != names:
            raise ValueError(f"step {t} has the domains {tuple(step)}, step 0 has {names}; they must agree")
    return names


def _differences(value: Callable[[Vector], float], weights: Vector, difference: float) -> Vector:
    """Return central differences of a function of the weights."""
    found = np.zeros(len(weights))
    for index in range(len(weights)):
        for sign in (1.0, -1.0):
            moved = weights.copy()
            moved[index] += sign * difference
            found[index] += sign * value(moved) / (2 * difference)
    return found


@final
class _Experiment:
    """Runs of the same T steps from one moment of a training, each on a copy of the model and the optimizer."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss: LossFn,
        estimate_loss: LossFn,
        clip_norm: float | None,
        *,
        double: bool,
    ) -> None:
        # Copied together, so that the copied optimizer trains the copied parameters.
        self._model, self._optimizer = copy.deepcopy((model, optimizer))
        self._loss, self._estimate_loss, self._clip_norm = loss, estimate_loss, clip_norm
        if double:
            self._model.double()
            for state in self._optimizer.state.values():
                for key, value in state.items():
                    if isinstance(value, Tensor) and value.is_floating_point():
                        state[key] = value.double()

    def estimate(self, batches: Batches, validation: Any, weights: Weights, signal: Signal) -> Vector:
        """Return the scores of a signal."""
        model, optimizer = copy.deepcopy((self._model, self._optimizer))
        mixer = Mixer(
            model,
            optimizer,
            weights.names,
            horizon=len(batches),
            signal=signal,
            update=1.0,
            weights=weights.last,
            clip_norm=self._clip_norm,
        )
        with torch.random.fork_rng(cuda_devices(model.parameters())), warnings.catch_warnings():
            # The batches are given, whatever the weights are.
            warnings.filterwarnings("ignore", ROWS_IGNORE_WEIGHTS)
            torch.manual_seed(0)
            for step in batches:
                for name, batch in step.items():
                    with mixer.domain(name):
                        self._estimate_loss(model, batch).backward(
                            create_graph=mixer.signal.requirements.graph
                        )
                mixer.step()
                if mixer.validation_due:
                    with mixer.validation():
                        self._estimate_loss(model, validation).backward()
        return np.array(list(mixer.rounds[-1].scores.values()))

    def train(
        self, batches: Batches, validation: Sequence[Any], weights: Vector, *, due: Sequence[int]
    ) -> float:
        """Return the mean validation loss after the due ones of T plain training steps with fixed weights."""
        model, optimizer = copy.deepcopy((self._model, self._optimizer))
        parameters = Parameters.of(model, optimizer)
        found: list[float] = []
        with torch.random.fork_rng(cuda_devices(model.parameters())):
            # The same dropout in all runs, so that their difference is due to the weights.
            torch.manual_seed(0)
            for done, step in enumerate(batches, start=1):
                optimizer.zero_grad()
                for weight, batch in zip(weights, step.values(), strict=True):
                    (float(weight) * self._loss(model, batch)).backward()
                if self._clip_norm is not None:
                    torch.nn.utils.clip_grad_norm_(parameters.tensors, self._clip_norm)
                optimizer.step()
                if done in due:
                    # As in mixer.validation(): running statistics remain those of training.
                    with torch.no_grad(), parameters.buffers_kept():
                        found += [float(self._loss(model, batch).double()) for batch in validation]
        return float(np.mean(found))
