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
from torch.nn.attention import SDPBackend, sdpa_kernel

from mixwell import methods
from mixwell.costs import FORWARD, VALIDATION_BATCHES
from mixwell.data.loader import joined
from mixwell.data.rows import Rows, moved
from mixwell.data.shuffles import Cursor, Indices
from mixwell.fidelity import Fidelity, measure_fidelity
from mixwell.records import RoundRecord
from mixwell.signals import Hypergradient
from mixwell.training import checkpoints, mixing, noise, optimization, randomness, schedules
from mixwell.training.checkpoints import Checkpoint
from mixwell.training.config import Config
from mixwell.training.probing import ProbeRows
from mixwell.training.trainables import Loss, Trainable

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
        validation: rows of the validation set, if there is one.
        reference: a trained model and its losses, for methods that compare with one.

    Raises:
        ValueError: the method lacks something that it needs.
    """

    def __init__(
        self,
        config: Config,
        trainable: Trainable,
        domains: Mapping[str, Rows],
        validation: Rows | None,
        *,
        reference: Trainable | None = None,
    ) -> None:
        self._config = config
        self._expect_needed(trainable, reference)
        self.device = choose_device(config.device)
        self.model = trainable.model.to(self.device)
        self._forward = self.model
        if config.compile:
            self._forward = cast("nn.Module", torch.compile(self.model, dynamic=True))
        self._loss, self._row_losses = trainable.loss, trainable.row_losses
        self._token_losses = trainable.token_losses
        self._domains, self._validation = dict(domains), validation
        self._reference = reference
        if reference is not None:
            reference.model.to(self.device).eval().requires_grad_(False)
        self._optimizer = optimization.build(config.optimizer, self._trained())
        sizes = {name: len(rows) for name, rows in domains.items()}
        self._probe_rows = ProbeRows(
            domains, validation, rows=config.batch.rows, seed=config.seed, device=self.device
        )
        self._probes = self._probe_rows.probes(
            self.model, self._cast(trainable.loss), self._row_losses and self._cast(self._row_losses)
        )
        self.mixer, self.sampler = mixing.build(config, self.model, self._optimizer, sizes, self._probes)
        self._expect_suitable()
        self._mixed = self._takes_mixed_batches()
        self._rows_computed = 0.0
        self._cursor: Cursor | None = None
        self.validation_rows = 0
        """Rows of a validation gradient; 0 where none is needed."""
        if validation is not None and self.mixer.signal.needs_validation:
            self._cursor = Cursor(len(validation), f"seed {config.seed}, validation set")
            self.validation_rows = min(validation_rows(config, self.mixer.horizon), len(validation))

    @property
    def steps_done(self) -> int:
        """Training steps so far."""
        return self.mixer.steps_done

    @property
    def finished(self) -> bool:
        """Whether all steps are done."""
        return self.steps_done >= self._config.steps

    @property
    def computed(self) -> float:
        """What was computed so far, in rows of which a gradient was taken; evaluations do not count.

        Rows that were trained on, of validation gradients, of probes; a forward pass alone is a third.
        """
        return self._rows_computed + self._probes.spent

    @property
    def held(self) -> int:
        """Bytes that are held from step to step beside plain training: by the mixer, and by a reference model."""
        if self._reference is None:
            return self.mixer.nbytes
        other = self._reference.model
        return self.mixer.nbytes + sum(t.nbytes for t in (*other.parameters(), *other.buffers()))

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
        signal, rows = self.mixer.signal, sum(len(indices) for indices in drawn.values())
        products = len(weights) if isinstance(signal, Hypergradient) and signal.takes_products else 0
        self._rows_computed += rows * (1 + 2 * products)
        present = {name: weights[self.mixer.weights.index(name)] for name in losses}
        loss = sum(losses[name] * weight for name, weight in present.items()) / sum(present.values())
        counts = {name: len(indices) for name, indices in drawn.items()}
        return StepOutcome(float(loss), losses, counts, rate)

    def end_round(self) -> RoundRecord:
        """A validation gradient where the method needs one, and one update of the weights.

        Returns:
            The record of the round.
        """
        self.model.eval()
        if self._cursor is not None and self._validation is not None:
            self._validation_gradient(self._cursor.take(self.validation_rows), self._validation)
        return self.mixer.update()

    def _validation_gradient(self, indices: Indices, rows: Rows) -> None:
        for part in self._parts(indices, at_most=self._config.batch.micro_rows or self._config.batch.rows):
            with self.mixer.validation(share=len(part) / len(indices)) as scope:
                loss = self._mean_loss(rows.batch(part))
                loss.backward()
                scope.observe(loss)
        self._rows_computed += len(indices)

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
        if self._validation is None:
            raise ValueError("the run has no validation set, by which a hypergradient could be measured")
        wanted = min(validation_rows(self._config, steps), len(self._validation))
        validation = self._validation.batch(Cursor(len(self._validation), "fidelity").take(wanted))
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
            "validation_taken": 0 if self._cursor is None else self._cursor.taken,
            "probes": self._probe_rows.state(),
            "rows_computed": self._rows_computed,
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
        if self._cursor is not None:
            self._cursor.taken = int(plain["validation_taken"])
        self._probe_rows.load_state(plain["probes"])
        self._rows_computed = float(plain["rows_computed"])
        randomness.load_state(plain["random"], part("random"), self.device)

    @cached_property
    def _digests(self) -> dict[str, str]:
        every: dict[str, Rows] = {**self._domains}
        if self._validation is not None:
            every["validation"] = self._validation
        return {name: rows.digest() for name, rows in every.items()}

    # ------------------------------------------------------------------------------------------- inside

    def _backward(self, name: str, indices: Indices) -> float:
        total = 0.0
        signal = self.mixer.signal
        most = min(self._config.batch.micro_rows or len(indices), -(-len(indices) // signal.parts))
        for part in self._parts(indices, at_most=most):
            rows = moved(self._domains[name].batch(part), self.device)
            reference = None
            if signal.needs_reference:
                assert self._reference is not None
                reference = self._referred(self._reference.loss, rows, len(part))
            with self.mixer.domain(name, share=len(part) / len(indices), rows=len(part)) as scope:
                with self._autocast(), self._differentiable_twice():
                    loss = self._loss(self._forward, rows)
                less = loss
                if reference is not None and signal.objective == "excess":
                    less = (loss - reference).clamp(min=0)
                less.backward(create_graph=self.mixer.needs_graph)
                scope.observe(loss, reference=reference)
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
            rows = moved(rows, self.device)
            with self.mixer.batch(labels[part], counts=counts) as batch:
                losses, reference, objective = self._element_losses(rows, len(part))
                batch.weigh(losses, reference=reference, objective=objective, data=rows).backward()
            found.append(losses.detach().flatten(1).mean(dim=1) if losses.dim() > 1 else losses.detach())
        each = torch.cat(found).float().cpu().numpy()
        return {name: float(each[labels == names.index(name)].mean()) for name in drawn}

    def _element_losses(self, rows: Any, count: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Losses of rows, those of the reference model, and what is made less where it is not the losses."""
        assert self._row_losses is not None
        if not self.mixer.signal.needs_reference:
            with self._autocast():
                return self._row_losses(self._forward, rows), None, None
        assert self._reference is not None
        tokens = self._token_losses, self._reference.token_losses
        own, other = tokens if all(tokens) else (self._row_losses, self._reference.row_losses)
        assert own is not None
        assert other is not None
        with self._autocast():
            losses = own(self._forward, rows)
        reference = self._referred(other, rows, count)
        excess = self.mixer.signal.objective == "excess"
        return losses, reference, (losses - reference).clamp(min=0) if excess else None

    @torch.no_grad()
    def _referred(self, loss: Loss, rows: Any, count: int) -> Tensor:
        """The losses of the reference model on rows."""
        assert self._reference is not None
        self._rows_computed += FORWARD * count
        with self._autocast():
            return loss(self._reference.model, rows)

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
        traced = isinstance(self.mixer.signal, Hypergradient)
        if traced and self._config.traces != "projected":
            return False
        if traced and self._row_losses is None:
            raise ValueError(
                "mixer.traces: projected needs the loss of every row: let the Python function give (model, loss, "
                "row_losses), or mixwell.train(..., row_losses=...), or choose dense traces"
            )
        return self._row_losses is not None and self.mixer.signal.takes_rows

    def _expect_suitable(self) -> None:
        name = f"mixer.method: {self._config.mixer.method}"
        if self._config.batch.counts == "noise" and self.mixer.signal.parts > 1:
            raise ValueError(f"{name} splits batches in its own way; set batch.counts to weight or equal")
        if self.mixer.needs_graph and self._config.compile:
            raise ValueError(
                f"{name} with options.curvature: exact differentiates twice, which a compiled model cannot; set "
                "compile: false"
            )

    def _expect_needed(self, trainable: Trainable, reference: Trainable | None) -> None:
        name = f"mixer.method: {self._config.mixer.method}"
        needs = methods.find(self._config.mixer.method).needs
        if needs.row_losses and trainable.row_losses is None:
            raise ValueError(
                f"{name} weighs every row, so it needs the loss of every row: let the Python function give "
                "(model, loss, row_losses), or mixwell.train(..., row_losses=...)"
            )
        if needs.reference and reference is None:
            raise ValueError(
                f"{name} needs a reference model: give the directory of a run with options.reference, or leave it "
                "out, and one is trained first"
            )

    def _set_learning_rate(self) -> float:
        rate = schedules.learning_rate(self._config.optimizer, step=self.steps_done, steps=self._config.steps)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        return rate

    def _trained(self) -> list[Tensor]:
        return [p for p in self.model.parameters() if p.requires_grad]

    def _cast(self, loss: Loss) -> Loss:
        def cast_loss(model: nn.Module, batch: Any) -> Tensor:
            with self._autocast():
                return loss(model, batch)

        return cast_loss

    def _mean_loss(self, batch: Any) -> Tensor:
        with self._autocast():
            return self._loss(self._forward, moved(batch, self.device))

    def _autocast(self) -> AbstractContextManager[Any]:
        if self._config.precision == "float32":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    def _differentiable_twice(self) -> AbstractContextManager[Any]:
        """Faster kinds of attention have no second derivative."""
        return sdpa_kernel(SDPBackend.MATH) if self.mixer.needs_graph else nullcontext()

    @staticmethod
    def _parts(indices: Indices, *, at_most: int) -> list[Indices]:
        return [indices[i : i + at_most] for i in range(0, len(indices), at_most)]

    def _round_begins(self) -> bool:
        rounds = self.mixer.rounds
        begin = rounds[-1].first_step + rounds[-1].steps if rounds else self._config.mixer.warmup
        return self.steps_done == begin


def validation_rows(config: Config, horizon: int) -> int:
    """Rows of a validation gradient, where there are so many.

    Args:
        config: the settings.
        horizon: T; a gradient that is needed often is one of fewer rows.

    Returns:
        Their number.
    """
    wanted = config.mixer.validation_rows
    return min(VALIDATION_BATCHES, horizon) * config.batch.rows if wanted == "auto" else wanted


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
