"""Model, optimiser, mixer and sampler put together: one training step at a time. It touches no files."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast, final

import numpy as np
import torch
from torch import Tensor, nn

from mixwell.data.loader import joined
from mixwell.data.rows import Rows, moved
from mixwell.data.shuffles import Cursor, Indices
from mixwell.fidelity import Fidelity, measure_fidelity
from mixwell.records import RoundRecord
from mixwell.training import checkpoints, mixing, noise, optimization, randomness, schedules
from mixwell.training.checkpoints import Checkpoint
from mixwell.training.config import Config
from mixwell.training.trainables import Trainable

VALIDATION_BATCHES = 8
NOISE_MEMORY = 0.7


@final
@dataclass(frozen=True)
class StepOutcome:
    """What a training step saw.

    Args:
        loss: the mean of the domains' losses by their weights, which the step makes less.
        losses: mean loss by domain, of those that were in it.
        counts: rows by domain.
        learning_rate: of the step.
    """

    loss: float
    losses: dict[str, float]
    counts: dict[str, int]
    learning_rate: float


@final
class Trainer:
    """A run's computation.

    Args:
        config: the settings.
        trainable: model and loss.
        domains: rows by domain.
        validation: rows of the validation set.
    """

    def __init__(
        self, config: Config, trainable: Trainable, domains: Mapping[str, Rows], validation: Rows
    ) -> None:
        self._config = config
        self.device = choose_device(config.device)
        self.model = trainable.model.to(self.device)
        self._forward = self.model
        if config.compile:
            self._forward = cast("nn.Module", torch.compile(self.model, dynamic=True))
        self._loss, self._row_losses = trainable.loss, trainable.row_losses
        self._domains, self._validation = dict(domains), validation
        self._optimizer = optimization.build(config.optimizer, self._trained())
        sizes = {name: len(rows) for name, rows in domains.items()}
        self.mixer, self.sampler = mixing.build(config, self.model, self._optimizer, sizes)
        self._mixed = self._takes_mixed_batches()
        self._cursor = Cursor(len(validation), f"seed {config.seed}, validation set")
        wanted = config.mixer.validation_rows
        rows = VALIDATION_BATCHES * config.batch.rows if wanted == "auto" else wanted
        self.validation_rows = min(rows, len(validation))
        """Rows of a validation gradient."""

    @property
    def steps_done(self) -> int:
        """Training steps so far."""
        return self.mixer.steps_done

    @property
    def finished(self) -> bool:
        """Whether all steps are done."""
        return self.steps_done >= self._config.steps

    # ------------------------------------------------------------------------------------------- training

    def step(self) -> StepOutcome:
        """One training step; a round that is done must have been ended before.

        Returns:
            What it saw.
        """
        weights = self.mixer.weights.values
        rate = self._set_learning_rate()
        self.mixer.inclusion = self.sampler.inclusion(weights)
        self.model.train()
        measuring = self.sampler.rule == "noise" and self._round_begins()
        drawn = self.sampler.draw(weights)
        losses: dict[str, float] = {}
        if self._mixed and not measuring:
            losses = self._mixed_backward(drawn)
        else:
            for name, indices in drawn.items():
                one = self._measured_backward if measuring and len(indices) > 1 else self._backward
                losses[name] = one(name, indices)
        self.mixer.step()
        present = {name: weights[self.mixer.weights.index(name)] for name in losses}
        loss = sum(losses[name] * weight for name, weight in present.items()) / sum(present.values())
        counts = {name: len(indices) for name, indices in drawn.items()}
        return StepOutcome(float(loss), losses, counts, rate)

    def end_round(self) -> RoundRecord:
        """A validation gradient and one update of the weights.

        Returns:
            The record of the round.
        """
        indices = self._cursor.take(self.validation_rows)
        self.model.eval()
        for part in self._parts(indices, at_most=self._config.batch.micro_rows or self._config.batch.rows):
            with self.mixer.validation(share=len(part) / len(indices)) as scope:
                loss = self._mean_loss(self._validation.batch(part))
                loss.backward()
                scope.observe(loss)
        return self.mixer.update()

    @torch.no_grad()
    def evaluate(self, rows: Rows, *, at_most: int) -> float:
        """The mean loss on rows that are the same at every call.

        Args:
            rows: to evaluate on.
            at_most: how many of them to take.

        Returns:
            The mean over those rows.
        """
        self.model.eval()
        chosen = np.sort(Cursor(len(rows), "evaluation").take(min(at_most, len(rows))))
        total = 0.0
        with torch.random.fork_rng(devices=[]):
            for part in self._parts(chosen, at_most=self._config.batch.micro_rows or self._config.batch.rows):
                total += float(self._mean_loss(rows.batch(part))) * len(part)
        return total / len(chosen)

    def fidelity(self, *, steps: int) -> Fidelity:
        """Compare the estimated hypergradient with the exact one over the coming steps; nothing changes.

        Args:
            steps: T of the comparison. It takes ``2 m + 1`` times as many training steps.

        Returns:
            Both, and how well they agree.
        """
        rows = max(self._config.batch.rows // len(self._domains), 1)
        cursors = {name: Cursor(len(own), f"fidelity, {name}") for name, own in self._domains.items()}
        batches = [
            {
                name: moved(own.batch(cursors[name].take(rows)), self.device)
                for name, own in self._domains.items()
            }
            for _ in range(steps)
        ]
        validation = self._validation.batch(
            Cursor(len(self._validation), "fidelity").take(self.validation_rows)
        )
        self._set_learning_rate()
        return measure_fidelity(
            self.model,
            self._optimizer,
            self._loss,
            batches,
            moved(validation, self.device),
            signal=lambda: mixing.hypergradient(self._config),
            weights=self.mixer.weights.last,
            clip_norm=self._config.optimizer.clip_norm,
        )

    # ------------------------------------------------------------------------------------------- state

    def checkpoint(self) -> Checkpoint:
        """Everything that a resumed run needs, between two steps.

        Returns:
            A checkpoint; its tensors are the live ones.
        """
        mixer = self.mixer.state_dict()
        remembered, moments = optimization.state(self._optimizer)
        drawn, generators = randomness.state(self.device)
        parts = {"mixer": mixer.pop("tensors"), "optimizer": moments, "random": generators}
        plain = {
            "mixer": mixer,
            "optimizer": remembered,
            "random": drawn,
            "sampler": self.sampler.state(),
            "validation_taken": self._cursor.taken,
            "data": self._digests,
        }
        training = {f"{part}.{name}": t for part, tensors in parts.items() for name, t in tensors.items()}
        return Checkpoint(self.steps_done, checkpoints.unique(self.model.state_dict()), training, plain)

    def load(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint, bit for bit.

        Args:
            checkpoint: what :meth:`checkpoint` gave.

        Raises:
            ValueError: it is of other data or another model.
        """
        plain = checkpoint.plain
        changed = [name for name, digest in self._digests.items() if plain["data"].get(name) != digest]
        if changed:
            raise ValueError(
                f"the data of {', '.join(changed)} have changed since the checkpoint, so the run cannot go on "
                "as it was; put them back, or start a new run"
            )

        def part(name: str) -> dict[str, Tensor]:
            prefix = name + "."
            return {k.removeprefix(prefix): t for k, t in checkpoint.training.items() if k.startswith(prefix)}

        checkpoints.load_model(self.model, checkpoint.model)
        optimization.load_state(self._optimizer, plain["optimizer"], part("optimizer"))
        self.mixer.load_state_dict({**plain["mixer"], "tensors": part("mixer")})
        self.sampler.load_state(plain["sampler"])
        self._cursor.taken = int(plain["validation_taken"])
        randomness.load_state(plain["random"], part("random"), self.device)

    @cached_property
    def _digests(self) -> dict[str, str]:
        return {
            name: rows.digest() for name, rows in {**self._domains, "validation": self._validation}.items()
        }

    # ------------------------------------------------------------------------------------------- inside

    def _backward(self, name: str, indices: Indices) -> float:
        total = 0.0
        for part in self._parts(indices, at_most=self._config.batch.micro_rows or len(indices)):
            with self.mixer.domain(name, share=len(part) / len(indices)) as scope:
                loss = self._mean_loss(self._domains[name].batch(part))
                loss.backward()
                scope.observe(loss)
            total += float(loss.detach()) * len(part) / len(indices)
        return total

    def _mixed_backward(self, drawn: Mapping[str, Indices]) -> dict[str, float]:
        """One backward pass over the rows of all domains, or several over parts of them."""
        assert self._row_losses is not None
        names = self.mixer.weights.names
        labels = np.concatenate([np.full(len(own), names.index(name)) for name, own in drawn.items()])
        indices = np.concatenate(list(drawn.values()))
        often = self.mixer.inclusion
        counts = {name: len(own) * often[name] for name, own in drawn.items()}
        found: list[Tensor] = []
        places = np.arange(len(labels))
        for part in self._parts(places, at_most=self._config.batch.micro_rows or len(places)):
            own = [(name, indices[part[labels[part] == names.index(name)]]) for name in drawn]
            rows = joined([self._domains[name].batch(chosen) for name, chosen in own if len(chosen)])
            with self.mixer.batch(labels[part], counts=counts) as batch:
                with self._autocast():
                    losses = self._row_losses(self._forward, moved(rows, self.device))
                batch.weigh(losses).backward()
            found.append(losses.detach())
        each = torch.cat(found).float().cpu().numpy()
        return {name: float(each[labels == names.index(name)].mean()) for name in drawn}

    def _measured_backward(self, name: str, indices: Indices) -> float:
        def backward(half: Indices) -> float:
            total = 0.0
            for part in self._parts(half, at_most=self._config.batch.micro_rows or len(half)):
                loss = self._mean_loss(self._domains[name].batch(part)) * (len(part) / len(indices))
                loss.backward()
                total += float(loss.detach())
            return total

        first, second = np.array_split(indices, 2)
        with self.mixer.domain(name) as scope:
            loss, spread = noise.backward_with_noise(self._trained(), backward, first, second)
            scope.observe(loss)
        place = self.sampler.names.index(name)
        before = self.sampler.noise[place]
        keep = 0.0 if np.isnan(before) else NOISE_MEMORY
        self.sampler.noise[place] = keep * np.nan_to_num(before) + (1 - keep) * spread
        return loss

    def _takes_mixed_batches(self) -> bool:
        """Whether a step is one batch of all domains' rows, as in plain training; else it is one for each."""
        learned = self._config.mixer.method == "mixwell"
        if learned and self._config.traces != "projected":
            return False
        if learned and self._row_losses is None:
            raise ValueError(
                "mixer.traces: projected needs the loss of every row: let the Python function give (model, loss, "
                "row_losses), or mixwell.train(..., row_losses=...), or choose dense traces"
            )
        return self._row_losses is not None

    def _set_learning_rate(self) -> float:
        rate = schedules.learning_rate(self._config.optimizer, step=self.steps_done, steps=self._config.steps)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        return rate

    def _trained(self) -> list[Tensor]:
        return [p for p in self.model.parameters() if p.requires_grad]

    def _mean_loss(self, batch: Any) -> Tensor:
        with self._autocast():
            return self._loss(self._forward, moved(batch, self.device))

    def _autocast(self) -> AbstractContextManager[Any]:
        if self._config.precision == "float32":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    @staticmethod
    def _parts(indices: Indices, *, at_most: int) -> list[Indices]:
        return [indices[i : i + at_most] for i in range(0, len(indices), at_most)]

    def _round_begins(self) -> bool:
        rounds = self.mixer.rounds
        begin = rounds[-1].first_step + rounds[-1].steps if rounds else self._config.mixer.warmup
        return self.steps_done == begin


def choose_device(name: str) -> torch.device:
    """The device that a setting means.

    Args:
        name: ``auto`` or a name of PyTorch's.

    Returns:
        The device.

    Raises:
        ValueError: it is not there.
    """
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"device: {name!r} is not there ({reason}); try auto or cpu") from error
    return device
