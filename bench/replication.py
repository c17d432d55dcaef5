"""Does one round's hypergradient replicate, and is it right about the loss?

From one start (after --begin steps with uniform weights) a round of T steps is trained several times with
other batches. Printed for several ways to take the validation gradient: the tangent cosine between replicates
(mean and worst pair), that with the true effect (central differences of real runs: each weight moved by +-.1
for the round, loss on 4096 rows of the validation set at its end), and the standard error estimated from the
points of a round, relative to the standard deviation of the replicates. With --persistence also how much of the
true effect is left after further training with uniform weights.

    python bench/replication.py demo
    python bench/replication.py drama --set steps=1000 --replicates 6 --persistence 84,252,748
    python bench/replication.py my.yaml

About 3 minutes for small text on one core; --persistence takes 2 m times the further steps for each number.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import plain_parser
from numpy.typing import NDArray
from rich.console import Console

from mixwell import Hypergradient, Mixer
from mixwell.data.shuffle import ShuffledCursor
from mixwell.hypergradient.parameters import Parameters
from mixwell.lab import problems
from mixwell.mixer.scores import RoundScores
from mixwell.reference.comparison import tangent, tangent_cosine
from mixwell.signals import Signal
from mixwell.simplex.rounds import validation_points
from mixwell.training import builder, config_io, optimization
from mixwell.training.run import Run

Array = NDArray[np.float64]
Pair = tuple[torch.nn.Module, torch.optim.Optimizer]
EVALUATED = 4096


class Study:
    """A problem, and training on it outside of the runner."""

    def __init__(self, config: config_io.Config) -> None:
        self.config = config
        self.trainable, self.data = Run(config, Path("signal"), console=Console(quiet=True)).load()
        self.names = list(self.data.domains)
        self.rows = max(config.batch.rows // len(self.names), 1)
        assert self.data.validation is not None
        self.validation = self.data.validation

    def fresh(self) -> Pair:
        model = copy.deepcopy(self.trainable.model)
        trained = [p for p in model.parameters() if p.requires_grad]
        return model, optimization.build_optimizer(self.config.optimizer, trained)

    def cursors(self, key: str) -> dict[str, ShuffledCursor]:
        return {name: ShuffledCursor(len(rows), f"{key}, {name}") for name, rows in self.data.domains.items()}

    def batch_loss(
        self, model: torch.nn.Module, cursors: Mapping[str, ShuffledCursor], name: str
    ) -> torch.Tensor:
        return self.trainable.loss(model, self.data.domains[name].batch(cursors[name].take(self.rows)))

    def set_rate(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        rate = optimization.learning_rate(self.config.optimizer, step=step, steps=self.config.steps)
        for group in optimizer.param_groups:
            group["lr"] = rate

    def train(self, pair: Pair, key: str, weights: Array, steps: range) -> None:
        model, optimizer = pair
        cursors = self.cursors(key)
        for step in steps:
            self.set_rate(optimizer, step)
            optimizer.zero_grad()
            for weight, name in zip(weights, self.names, strict=True):
                (float(weight) * self.batch_loss(model, cursors, name)).backward()
            if self.config.optimizer.clip_norm:
                torch.nn.utils.clip_grad_norm_(model.parameters(), self.config.optimizer.clip_norm)
            optimizer.step()

    @torch.no_grad()
    def evaluate(self, model: torch.nn.Module) -> float:
        rows = ShuffledCursor(len(self.validation), "evaluation").take(min(EVALUATED, len(self.validation)))
        parts = np.array_split(rows, max(1, len(rows) // 256))
        losses = [
            float(self.trainable.loss(model, self.validation.batch(part))) * len(part) for part in parts
        ]
        return sum(losses) / len(rows)

    def replicate(
        self, start: Pair, key: str, begin: int, steps: int, rows: int
    ) -> tuple[Array, Array, Array]:
        """Scores after every step of a round; at its end with eight times the rows, and of averaged iterates."""
        model, optimizer = copy.deepcopy(start)
        signal: Signal = builder.hypergradient(self.config)
        assert isinstance(signal, Hypergradient)
        signal.points, signal.span = steps, 1.0
        mixer = Mixer(
            model,
            optimizer,
            self.names,
            horizon=steps,
            signal=signal,
            update=1e-12,
            clip_norm=self.config.optimizer.clip_norm,
        )
        names = Parameters.of(model, optimizer).names
        cursors, taken = self.cursors(key), ShuffledCursor(len(self.validation), f"{key}, validation")
        averaged = torch.optim.swa_utils.AveragedModel(model)
        found: list[Array] = []
        for step in range(steps):
            self.set_rate(optimizer, begin + step)
            for name in self.names:
                with mixer.domain(name, rows=self.rows):
                    self.batch_loss(model, cursors, name).backward()
            mixer.step()
            if step >= steps // 2:
                averaged.update_parameters(model)
            if step == steps - 1:
                many = self._scores(
                    mixer.signal, model, names, taken.take(min(8 * rows, len(self.validation)))
                )
                mean = self._scores(
                    mixer.signal, averaged.module, names, taken.take(min(rows, len(self.validation)))
                )
                found.append(
                    self._scores(mixer.signal, model, names, taken.take(min(rows, len(self.validation))))
                )
                return np.array(found), many, mean
            found.append(
                self._scores(mixer.signal, model, names, taken.take(min(rows, len(self.validation))))
            )
            with mixer.validation():
                self.trainable.loss(model, self.validation.batch(taken.take(1))).backward()
        raise AssertionError

    def _scores(self, signal: Signal, model: torch.nn.Module, names: Sequence[str], rows: Any) -> Array:
        parts = np.array_split(rows, max(1, len(rows) // 256))
        trained = [dict(model.named_parameters())[name] for name in names]
        total: list[torch.Tensor] = [torch.zeros_like(p) for p in trained]
        for part in parts:
            loss = self.trainable.loss(model, self.validation.batch(part)) * (len(part) / len(rows))
            for kept, gradient in zip(total, torch.autograd.grad(loss, trained), strict=True):
                kept += gradient
        return signal.scores(list(total))

    def effect(self, start: Pair, key: str, begin: int, steps: int, further: int = 0) -> Array:
        """Central differences of the validation loss, ``further`` steps after the round."""
        uniform = np.full(len(self.names), 1 / len(self.names))
        found = np.zeros(len(self.names))
        for index in range(len(self.names)):
            for sign in (0.1, -0.1):
                pair = copy.deepcopy(start)
                moved = uniform.copy()
                moved[index] += sign
                self.train(pair, key, moved, range(begin, begin + steps))
                self.train(pair, key + ", further", uniform, range(begin + steps, begin + steps + further))
                found[index] += self.evaluate(pair[0]) / (2 * sign)
        return found


def show(label: str, rows: int, scores: Array, effect: Array, error: Array | None) -> None:
    pairs = [tangent_cosine(a, b) for k, a in enumerate(scores) for b in scores[:k]]
    right = float(np.mean([tangent_cosine(one, effect) for one in scores]))
    shown = ""
    if error is not None:
        deviation = np.std(scores, axis=0, ddof=1)
        shown = f"{np.linalg.norm(error) / np.linalg.norm(deviation):12.2f}"
    print(f"{label:44}{rows:6d}{np.mean(pairs):10.2f} /{np.min(pairs):6.2f}{right:12.2f}{shown}", flush=True)


def standard_error(points: Sequence[int], scores: Array) -> Array:
    """Of one replicate's mean, as a mixer has it."""
    found = RoundScores()
    for point, one in zip(points, scores, strict=True):
        found.add(point, one)
    error = found.standard_errors()
    assert error is not None
    return error


def main() -> None:
    parser = plain_parser(__doc__)
    parser.add_argument("problem", help="the path of a config, or the name of an embedded problem")
    parser.add_argument("--set", action="append", default=[], help="key=value")
    parser.add_argument(
        "--begin", type=int, default=None, help="steps before the round; by default T: the second"
    )
    parser.add_argument("--replicates", type=int, default=4)
    parser.add_argument("--effects", type=int, default=2, help="replicates of the true effect")
    parser.add_argument(
        "--rows", default="", help="rows of a validation gradient, with commas; by default half a batch"
    )
    parser.add_argument("--persistence", default="", help="further steps after the round, with commas")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        config = config_io.read_config(problems.find(given.problem, Path(folder), Console()), given.set)
        study = Study(config)
    steps = builder.horizon(config)
    begin = steps if given.begin is None else given.begin
    start = study.fresh()
    study.train(start, "before", np.full(len(study.names), 1 / len(study.names)), range(begin))
    sizes = [int(number) for number in given.rows.split(",") if number] or [max(1, config.batch.rows // 2)]
    print(f"{given.problem}: {len(study.names)} domains, T = {steps}, the round after step {begin}")
    effects = [study.effect(start, f"effect {k}", begin, steps) for k in range(given.effects)]
    effect = np.mean(effects, axis=0)
    own = [tangent_cosine(a, b) for k, a in enumerate(effects) for b in effects[:k]]
    shown = ", ".join(f"{n} {v:+.3f}" for n, v in zip(study.names, tangent(effect), strict=True))
    print(f"true effect: {shown}; agrees with its own replicate by {np.mean(own):.2f}" if own else shown)
    print(
        f"{'validation gradient':44}{'rows':>6}{'replicates agree':>18}{'true effect':>12}{'error ratio':>12}"
    )
    for rows in sizes:
        found = [
            study.replicate(start, f"replicate {k}", begin, steps, rows) for k in range(given.replicates)
        ]
        every = np.stack([scores for scores, _, _ in found])
        show("at the last iterate (the paper's)", rows, every[:, -1], effect, None)
        many = np.stack([one for _, one, _ in found])
        show("the same, eight times the rows", 8 * rows, many, effect, None)
        for count, span in ((2, 0.5), (4, 0.5), (8, 0.25), (8, 0.5), (8, 1.0), (21, 0.5)):
            points = validation_points(steps, points=count, span=span)
            chosen = every[:, [point - 1 for point in points]]
            error = np.mean([standard_error(points, one) for one in chosen], axis=0)
            label = f"at {len(points)} iterates of the last {span:.0%}"
            show(label, rows * len(points), chosen.mean(axis=1), effect, error)
        mean = np.stack([one for _, _, one in found])
        show("at the average of the second half's iterates", rows, mean, effect, None)
    for further in (int(number) for number in given.persistence.split(",") if number):
        later = np.mean(
            [study.effect(start, f"effect {k}", begin, steps, further) for k in range(given.effects)], axis=0
        )
        left = float(tangent(later) @ tangent(effect) / (tangent(effect) @ tangent(effect)))
        shown = ", ".join(f"{n} {v:+.3f}" for n, v in zip(study.names, tangent(later), strict=True))
        cosine = tangent_cosine(later, effect)
        print(
            f"{further} steps later: {left:+.2f} of the effect is left (cosine {cosine:.2f}): {shown}",
            flush=True,
        )


if __name__ == "__main__":
    main()
