"""Model, optimizer, mixer and sampler put together: one training step at a time. It touches no files."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from mixwell import distributed, methods
from mixwell.data.datasets import IndexedDataset, moved
from mixwell.data.loader import joined
from mixwell.data.sharding import cut
from mixwell.data.shuffle import ShuffledCursor
from mixwell.mixer import state
from mixwell.reference.fidelity import Fidelity, measure_fidelity
from mixwell.signals import Hypergradient
from mixwell.signals.probes import FORWARD
from mixwell.simplex import rounds
from mixwell.training import checkpoints, mixing, noise, optimization, parallel, randomness
from mixwell.training.checkpoints import Checkpoint
from mixwell.training.config import Config
from mixwell.training.models.base import Trainable
from mixwell.training.probe_data import ProbeRows
from mixwell.typing import Indices, LossFn

NOISE_MEMORY = 0.7


@final
@dataclass(frozen=True)
class StepOutcome:
    """What a training step saw.

    Args:
        loss: the mean of the domains' losses by their weights, which the step makes less; of several processes the
            part that comes from this one's rows.
        losses: mean loss by domain, of this process's rows.
        counts: its rows by domain.
        learning_rate: of the step.
    """

    loss: float
    losses: dict[str, float]
    counts: dict[str, int]
    learning_rate: float


@final
@dataclass(frozen=True)
class Piece:
    """Rows that are computed at once.

    Args:
        rows: their indices.
        own: how many of them count.
        share: of what this process computes of them in all.
        portion: by which their mean loss counts, since processes have different numbers of rows.
    """

    rows: Indices
    own: int
    share: float
    portion: float


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
        domains: Mapping[str, IndexedDataset],
        validation: IndexedDataset | None,
        *,
        reference: Trainable | None = None,
    ) -> None:
        self._config = config
        self._expect_needed(trainable, reference)
        self.device = choose_device(config.device)
        self.model = trainable.model.to(self.device)
        shared = parallel.wrapped(self.model, config.parallel)
        self._forward = shared
        if config.compile:
            self._forward = cast("nn.Module", torch.compile(shared, dynamic=True))
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
        self.mixer, self.sampler = mixing.build(config, shared, self._optimizer, sizes, self._probes)
        self._expect_suitable()
        self._mixed = self._takes_mixed_batches()
        self._rows_computed = 0.0
        self._cursor: ShuffledCursor | None = None
        self.validation_rows = 0
        """Rows of one validation gradient; 0 where none is needed."""
        if validation is not None and self.mixer.signal.needs_validation:
            self._cursor = ShuffledCursor(len(validation), f"seed {config.seed}, validation set")
            points = len(self.mixer.signal.validation_points(self.mixer.horizon))
            rows = validation_rows(config, self.mixer.horizon, points=points)
            self.validation_rows = min(rows, len(validation))
        parallel.expect_possible(config, validation=self.validation_rows)
        if distributed.rank():  # so that no two drop out the same
            randomness.seed(self._own_seed)

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
        """One training step, with the validation gradient and the update of the weights that are due after it.

        Returns:
            What it saw.
        """
        weights = self.mixer.weights.values
        rate = self._set_learning_rate()
        self.mixer.inclusion = self.sampler.inclusion(weights)
        self.model.train()
        measuring = self.sampler.rule == "noise" and self._round_begins()
        drawn = self.sampler.draw(weights)
        own = cut(drawn, rank=distributed.rank(), processes=distributed.world_size())
        self.mixer.portions = own.portions
        losses: dict[str, float] = {}
        if self._mixed and not measuring:
            losses = self._mixed_backward(drawn, own.rows)
        else:
            for name, indices in (
                own.requires_equal_forward_passes if self.mixer.requires_equal_forward_passes else own.rows
            ).items():
                if measuring and len(indices) > 1:
                    losses[name] = self._measured_backward(name, indices)
                else:
                    losses |= self._backward(name, own.rows.get(name, indices[:0]), drawn[name])
        self.mixer.step()
        if self.mixer.validation_due:
            self._validate()
        signal, rows = self.mixer.signal, sum(len(indices) for indices in drawn.values())
        products = len(weights) if isinstance(signal, Hypergradient) and signal.takes_products else 0
        self._rows_computed += rows * (1 + 2 * products)
        present = {name: weights[self.mixer.weights.index(name)] for name in drawn}
        portions = {name: len(one) / len(drawn[name]) for name, one in own.rows.items()}
        loss = sum(losses[name] * present[name] * portions[name] for name in losses) / sum(present.values())
        counts = {name: len(indices) for name, indices in own.rows.items()}
        return StepOutcome(float(loss), losses, counts, rate)

    def _validate(self) -> None:
        """The validation gradient that is due."""
        assert self._cursor is not None
        assert self._validation is not None
        self.model.eval()
        distributed.broadcast_tensors(self.model.buffers())
        indices, rows = self._cursor.take(self.validation_rows), self._validation
        own = indices[distributed.rank() :: distributed.world_size()]
        for piece in self._pieces(own, indices, most=self._most_rows):
            self.mixer.portions = {"validation": piece.portion}
            with self.mixer.validation(share=piece.share) as scope:
                scope.scaled_loss(self._mean_loss(self._forward, rows.batch(piece.rows))).backward()
        self._rows_computed += len(indices)

    @torch.no_grad()
    def evaluate(self, rows: IndexedDataset, *, at_most: int) -> float:
        """The mean loss on rows that are the same at every call.

        Args:
            rows: to evaluate on.
            at_most: how many of them to take.

        Returns:
            The mean over those rows.
        """
        self.model.eval()
        distributed.broadcast_tensors(self.model.buffers())
        chosen = np.sort(ShuffledCursor(len(rows), "evaluation").take(min(at_most, len(rows))))
        own = chosen[distributed.rank() :: distributed.world_size()]
        # Not the wrapper of data parallelism, in which processes would wait for each other.
        model = self._forward if distributed.is_single_process() else self.model
        total = 0.0
        with torch.random.fork_rng(devices=[]):
            for piece in self._pieces(own, chosen, most=self._most_rows):
                if piece.own or self.mixer.requires_equal_forward_passes:
                    total += float(self._mean_loss(model, rows.batch(piece.rows))) * piece.own
        return float(distributed.all_reduce_sum(np.array([total]), self.device)[0]) / len(chosen)

    def fidelity(self, *, steps: int, replicates: int = 0) -> Fidelity:
        """Compare the estimated hypergradient with the exact one over the coming steps; nothing changes.

        Args:
            steps: T of the comparison. It takes ``2 m + 1`` times as many training steps.
            replicates: how often the steps are also estimated with other rows; each takes as many.

        Returns:
            Both, and how well they agree.

        Raises:
            ValueError: there is no validation set.
        """
        if self._validation is None:
            raise ValueError("the run has no validation set, by which a hypergradient could be measured")
        points = len(mixing.hypergradient(self._config).validation_points(steps))
        wanted = min(points * validation_rows(self._config, steps, points=points), len(self._validation))
        chosen = ShuffledCursor(len(self._validation), "fidelity").take(wanted)
        held_out = np.sort(
            ShuffledCursor(len(self._validation), "effect").take(min(4096, len(self._validation)))
        )
        self._set_learning_rate()
        return measure_fidelity(
            self.model,
            self._optimizer,
            self._loss,
            self._batches_of_all("fidelity", steps),
            moved(self._validation.batch(chosen), self.device),
            signal=lambda: mixing.hypergradient(self._config),
            weights=self.mixer.weights.last,
            clip_norm=self._config.optimizer.clip_norm,
            replicates=[self._replicate(k, steps, wanted) for k in range(replicates)],
            held_out=[
                moved(self._validation.batch(part), self.device)
                for part in self._parts(held_out, at_most=self._most_rows)
            ],
        )

    def _replicate(self, number: int, steps: int, wanted: int) -> tuple[list[dict[str, Any]], Any]:
        assert self._validation is not None
        key = f"fidelity, replicate {number}"
        rows = self._validation.batch(ShuffledCursor(len(self._validation), key).take(wanted))
        return self._batches_of_all(key, steps), moved(rows, self.device)

    def _batches_of_all(self, key: str, steps: int) -> list[dict[str, Any]]:
        """For every step as many rows of each domain, drawn by a key."""
        rows = max(self._config.batch.rows // len(self._domains), 1)
        cursors = {name: ShuffledCursor(len(own), f"{key}, {name}") for name, own in self._domains.items()}
        return [
            {
                name: moved(own.batch(cursors[name].take(rows)), self.device)
                for name, own in self._domains.items()
            }
            for _ in range(steps)
        ]

    # ------------------------------------------------------------------------------------------- state

    def checkpoint(self) -> Checkpoint:
        """Everything that a resumed run needs, between two steps.

        Returns:
            A checkpoint; its tensors are the live ones.
        """
        distributed.broadcast_tensors(self.model.buffers())
        mixer = self.mixer.state_dict()
        remembered, moments = optimization.state(self._optimizer)
        drawn, generators = randomness.state(self.device)
        parts = {"mixer": mixer.pop("tensors"), "optimizer": moments, "random": generators}
        plain = {
            "optimizer": remembered,
            "sampler": self.sampler.state(),
            "validation_taken": 0 if self._cursor is None else self._cursor.taken,
            "probes": self._probe_rows.state(),
            "rows_computed": self._rows_computed,
            "data": self._digests,
        }
        training = {f"{part}.{name}": t for part, tensors in parts.items() for name, t in tensors.items()}
        model, own = checkpoints.unique(self.model.state_dict()), {"mixer": mixer, "random": drawn}
        return Checkpoint(self.steps_done, model, training, plain, [own])

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

        expected = self.mixer.state_dict()["tensors"]
        like = {f"mixer.{name}": tensor for name, tensor in expected.items()}
        like |= {f"optimizer.{name}": t for name, t in optimization.patterns(self._optimizer).items()}
        training = checkpoint.tensors(like)

        def part(name: str) -> dict[str, Tensor]:
            prefix = name + "."
            return {k.removeprefix(prefix): t for k, t in training.items() if k.startswith(prefix)}

        expected_model = checkpoints.unique(self.model.state_dict())
        checkpoints.load_model(self.model, checkpoint.model_tensors(expected_model))
        optimization.load_state(self._optimizer, plain["optimizer"], part("optimizer"))
        saved = checkpoint.own
        mixer = state.own_of([one["mixer"] for one in saved])
        self.mixer.load_state_dict({**mixer, "tensors": part("mixer")})
        self.sampler.load_state(plain["sampler"])
        if self._cursor is not None:
            self._cursor.taken = int(plain["validation_taken"])
        self._probe_rows.load_state(plain["probes"])
        self._rows_computed = float(plain["rows_computed"])
        if len(saved) == distributed.world_size():
            randomness.load_state(saved[distributed.rank()]["random"], part("random"), self.device)
        else:
            randomness.seed(self._own_seed + self.steps_done)

    @cached_property
    def _digests(self) -> dict[str, str]:
        every: dict[str, IndexedDataset] = {**self._domains}
        if self._validation is not None:
            every["validation"] = self._validation
        return {name: rows.digest() for name, rows in every.items()}

    # ------------------------------------------------------------------------------------------- inside

    def _backward(self, name: str, indices: Indices, drawn: Indices) -> dict[str, float]:
        """The gradient of a domain: of this process's rows among those that all drew."""
        total, portions = 0.0, self.mixer.portions
        signal = self.mixer.signal
        most = min(self._config.batch.micro_rows or len(drawn), -(-len(drawn) // signal.parts))
        for piece in self._pieces(indices, drawn, most=most):
            rows = moved(self._domains[name].batch(piece.rows), self.device)
            reference = None
            if signal.needs_reference:
                assert self._reference is not None
                reference = self._referred(self._reference.loss, rows, piece.own)
            self.mixer.portions = portions | {name: piece.portion}
            with self.mixer.domain(name, share=piece.share, rows=piece.own) as scope:
                with self._autocast(), self._differentiable_twice():
                    loss = self._loss(self._forward, rows)
                less = loss
                if reference is not None and signal.objective == "excess":
                    less = (loss - reference).clamp(min=0)
                counted = scope.scaled_loss(loss, objective=less, reference=reference)
                counted.backward(create_graph=self.mixer.needs_graph)
            total += float(loss.detach()) * piece.own
        self.mixer.portions = portions
        return {name: total / len(indices)} if len(indices) else {}

    def _mixed_backward(self, drawn: Mapping[str, Indices], own: Mapping[str, Indices]) -> dict[str, float]:
        """One backward pass over the rows of all domains, or several over parts of them."""
        assert self._row_losses is not None
        names = self.mixer.weights.names
        labels = np.concatenate([np.full(len(one), names.index(name)) for name, one in own.items()])
        indices = np.concatenate(list(own.values()))
        often = self.mixer.inclusion
        counts = {name: len(one) * often[name] / distributed.world_size() for name, one in drawn.items()}
        found: list[Tensor] = []
        places = np.arange(len(labels))
        parts = self._parts(places, at_most=self._config.batch.micro_rows or len(places))
        for number, part in enumerate(parts):
            chosen = [(name, indices[part[labels[part] == names.index(name)]]) for name in own]
            rows = joined([self._domains[name].batch(some) for name, some in chosen if len(some)])
            rows = moved(rows, self.device)
            # Processes average what all parts have left, with the last one.
            last = number == len(parts) - 1
            averaging = nullcontext() if last else distributed.no_sync(self._forward)
            with averaging, self.mixer.batch(labels[part], counts=counts) as batch:
                losses, reference, objective = self._element_losses(rows, len(part))
                batch.weighted_loss(losses, reference=reference, objective=objective, data=rows).backward()
            found.append(losses.detach().flatten(1).mean(dim=1) if losses.dim() > 1 else losses.detach())
        each = torch.cat(found).float().cpu().numpy()
        return {name: float(each[labels == names.index(name)].mean()) for name in own}

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
    def _referred(self, loss: LossFn, rows: Any, count: int) -> Tensor:
        """The losses of the reference model on rows."""
        assert self._reference is not None
        self._rows_computed += FORWARD * count
        with self._autocast():
            return loss(self._reference.model, rows)

    def _measured_backward(self, name: str, indices: Indices) -> float:
        def backward(half: Indices) -> float:
            total = 0.0
            for part in self._parts(half, at_most=self._config.batch.micro_rows or len(half)):
                batch = self._domains[name].batch(part)
                loss = self._mean_loss(self._forward, batch) * (len(part) / len(indices))
                loss.backward()
                total += float(loss.detach())
            return total

        first, second = np.array_split(indices, 2)
        with self.mixer.domain(name) as scope:
            loss, spread = noise.backward_with_noise(self._trained(), backward, first, second)
            scope.record_loss(loss)
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
        return self._row_losses is not None and self.mixer.signal.supports_mixed_batches

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
        rate = optimization.learning_rate(
            self._config.optimizer, step=self.steps_done, steps=self._config.steps
        )
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        return rate

    def _trained(self) -> list[Tensor]:
        return [p for p in self.model.parameters() if p.requires_grad]

    def _cast(self, loss: LossFn) -> LossFn:
        def cast_loss(model: nn.Module, batch: Any) -> Tensor:
            with self._autocast():
                return loss(model, batch)

        return cast_loss

    def _mean_loss(self, model: nn.Module, batch: Any) -> Tensor:
        with self._autocast():
            return self._loss(model, moved(batch, self.device))

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

    def _pieces(self, own: Indices, drawn: Indices, *, most: int) -> list[Piece]:
        """This process's rows among those that all drew, no more than some at once.

        Where all processes must run the model equally often, one that has no rows left runs one that does not
        count.
        """
        count = distributed.world_size()
        if not self.mixer.requires_equal_forward_passes:
            portion = count * len(own) / len(drawn)
            parts = self._parts(own, at_most=most)
            return [Piece(part, len(part), len(part) / len(own), portion) for part in parts]
        number = math.ceil(math.ceil(len(drawn) / count) / most)
        return [
            Piece(
                part if len(part) else drawn[:1],
                len(part),
                1 / number,
                number * count * len(part) / len(drawn),
            )
            for part in np.array_split(own, number)
        ]

    @property
    def _most_rows(self) -> int:
        """Rows that are computed at once outside of training steps."""
        return self._config.batch.micro_rows or -(-self._config.batch.rows // distributed.world_size())

    @property
    def _own_seed(self) -> int:
        """Of what is random in this process alone."""
        return self._config.seed + 1_000_003 * distributed.rank()

    def _round_begins(self) -> bool:
        rounds = self.mixer.rounds
        begin = rounds[-1].first_step + rounds[-1].steps if rounds else self._config.mixer.warmup
        return self.steps_done == begin


def validation_rows(config: Config, horizon: int, *, points: int) -> int:
    """Rows of one validation gradient, where there are so many.

    Args:
        config: the settings.
        horizon: T.
        points: validation gradients in a round.

    Returns:
        Their number.
    """
    wanted = config.mixer.validation_rows
    if wanted != "auto":
        return wanted
    # Each process has one at least.
    return max(
        rounds.validation_rows(config.batch.rows, steps=horizon, points=points), distributed.world_size()
    )


def choose_device(name: str) -> torch.device:
    """The device that a setting means.

    Args:
        name: ``auto`` or a name of PyTorch's.

    Returns:
        The device.

    Raises:
        ValueError: it is not there.
    """
    if name in ("auto", "cuda") and torch.cuda.is_available():
        # Of several processes each has set its own.
        return (
            torch.device("cuda")
            if distributed.is_single_process()
            else torch.device("cuda", torch.cuda.current_device())
        )
    if name == "auto":
        # Processes cannot exchange what is on Apple's devices.
        mps = torch.backends.mps.is_available() and distributed.is_single_process()
        return torch.device("mps" if mps else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"device: {name!r} is not there ({reason}); try auto or cpu") from error
    return device
