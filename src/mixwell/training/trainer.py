"""Model, optimizer, mixer and loader put together: one training step at a time. It touches no files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from mixwell import distributed, methods
from mixwell.data.datasets import IndexedDataset
from mixwell.data.shuffle import ShuffledCursor
from mixwell.mixer import state
from mixwell.mixer.batch import MixtureBatch, Piece, pieces
from mixwell.reference.fidelity import Fidelity, measure_fidelity
from mixwell.simplex import rounds
from mixwell.training import builder, checkpoints, optimization, parallel, randomness
from mixwell.training.checkpoints import Checkpoint
from mixwell.training.config import Config
from mixwell.training.models.base import Trainable
from mixwell.training.probe_data import ProbeRows
from mixwell.typing import Indices, LossFn
from mixwell.utils.costs import FORWARD
from mixwell.utils.nested import to_device


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
        self._optimizer = optimization.build_optimizer(config.optimizer, self._trained())
        self._probe_rows = ProbeRows(
            domains, validation, rows=config.batch.rows, seed=config.seed, device=self.device
        )
        self._probes = self._probe_rows.probes(
            self.model, self._cast(trainable.loss), self._row_losses and self._cast(self._row_losses)
        )
        self.mixer, self.loader = builder.build_mixer_and_loader(
            config, shared, self._optimizer, domains, self._probes
        )
        self._batches: Iterator[MixtureBatch] | None = None
        self._expect_suitable()
        self._mixed = self._takes_mixed_batches()
        self._rows_computed = 0.0
        self._cursor: ShuffledCursor | None = None
        self.validation_rows = 0
        """Rows of one validation gradient; 0 where none is needed."""
        if validation is not None and self.mixer.needs_validation:
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

        Rows that were trained on, of validation gradients, of probes; a forward pass without a backward pass is
        a third.
        """
        return self._rows_computed + self._probes.spent

    @property
    def held(self) -> int:
        """Bytes held from step to step in addition to plain training: by the mixer and a reference model."""
        if self._reference is None:
            return self.mixer.nbytes
        other = self._reference.model
        return self.mixer.nbytes + sum(t.nbytes for t in (*other.parameters(), *other.buffers()))

    # ------------------------------------------------------------------------------------------- training

    def step(self) -> StepOutcome:
        """Take one training step, with the validation gradient and the update of the weights that are due."""
        weights = self.mixer.weights.values
        rate = self._set_learning_rate()
        self.model.train()
        if self._batches is None:
            self._batches = self.loader.follow(self.mixer)
        batch = next(self._batches)
        losses = self._mixed_backward(batch) if self._mixed else self._backward(batch)
        self.mixer.step()
        if self.mixer.validation_due:
            self._validate()
        total, local = batch.step.total, batch.step.local
        products = len(weights) if self.mixer.signal.takes_products else 0
        self._rows_computed += sum(total.values()) * (1 + 2 * products)
        present = {name: weights[self.mixer.weights.index(name)] for name in total}
        parts = sum(losses[name] * present[name] * (local[name] / total[name]) for name in losses)
        return StepOutcome(float(parts / sum(present.values())), losses, batch.counts, rate)

    def _validate(self) -> None:
        """Compute the validation gradient that is due."""
        assert self._cursor is not None
        assert self._validation is not None
        self.model.eval()
        distributed.broadcast_tensors(self.model.buffers())
        indices, rows = self._cursor.take(self.validation_rows), self._validation
        for chosen, piece in self._own_pieces(indices):
            with self.mixer.validation(fraction=piece.fraction, rank_scale=piece.rank_scale) as scope:
                scope.scaled_loss(self._mean_loss(self._forward, rows.batch(chosen))).backward()
        self._rows_computed += len(indices)

    @torch.no_grad()
    def evaluate(self, rows: IndexedDataset, *, at_most: int) -> float:
        """Return the mean loss on rows that are the same at every call."""
        self.model.eval()
        distributed.broadcast_tensors(self.model.buffers())
        chosen = np.sort(ShuffledCursor(len(rows), "evaluation").take(min(at_most, len(rows))))
        # Not the wrapper of data parallelism, in which processes would wait for each other.
        model = self._forward if distributed.is_single_process() else self.model
        total = 0.0
        with torch.random.fork_rng(devices=[]):
            for indices, piece in self._own_pieces(chosen):
                total += float(self._mean_loss(model, rows.batch(indices))) * (piece.end - piece.begin)
        return float(distributed.all_reduce_sum(np.array([total]), self.device)[0]) / len(chosen)

    def fidelity(self, *, steps: int, replicates: int = 0) -> Fidelity:
        """Compare the estimated hypergradient with the exact one over the coming steps; nothing changes.

        Args:
            steps: T of the comparison. It takes ``2 m + 1`` times as many training steps.
            replicates: how often the steps are also estimated with other rows; each takes as many.

        Raises:
            ValueError: there is no validation set.
        """
        if self._validation is None:
            raise ValueError("the run has no validation set, by which a hypergradient could be measured")
        points = len(builder.hypergradient(self._config).validation_points(steps))
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
            to_device(self._validation.batch(chosen), self.device),
            signal=lambda: builder.hypergradient(self._config),
            weights=self.mixer.weights.last,
            clip_norm=self._config.optimizer.clip_norm,
            replicates=[self._replicate(k, steps, wanted) for k in range(replicates)],
            held_out=[
                to_device(self._validation.batch(part), self.device)
                for part in self._parts(held_out, at_most=self._most_rows)
            ],
        )

    def _replicate(self, number: int, steps: int, wanted: int) -> tuple[list[dict[str, Any]], Any]:
        assert self._validation is not None
        key = f"fidelity, replicate {number}"
        rows = self._validation.batch(ShuffledCursor(len(self._validation), key).take(wanted))
        return self._batches_of_all(key, steps), to_device(rows, self.device)

    def _batches_of_all(self, key: str, steps: int) -> list[dict[str, Any]]:
        """For every step as many rows of each domain, drawn by a key."""
        rows = max(self._config.batch.rows // len(self._domains), 1)
        cursors = {name: ShuffledCursor(len(own), f"{key}, {name}") for name, own in self._domains.items()}
        return [
            {
                name: to_device(own.batch(cursors[name].take(rows)), self.device)
                for name, own in self._domains.items()
            }
            for _ in range(steps)
        ]

    # ------------------------------------------------------------------------------------------- state

    def checkpoint(self) -> Checkpoint:
        """Return everything that a resumed run needs, between two steps.

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
            "loader": self.loader.state_dict(),
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

        Raises:
            ValueError: it is of other data or another model.
        """
        plain = checkpoint.plain
        changed = [name for name, digest in self._digests.items() if plain["data"].get(name) != digest]
        if changed:
            raise ValueError(
                f"the data of {', '.join(changed)} have changed since the checkpoint, so the run cannot resume "
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
        self.loader.load_state_dict(plain["loader"])
        self._batches = None
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

    def _backward(self, batch: MixtureBatch) -> dict[str, float]:
        """Compute the gradient of each domain; return the mean loss of this rank's rows of each."""
        signal, totals = self.mixer.signal, dict[str, float]()
        for part in batch.by_domain(
            max_rows=self._config.batch.micro_rows, min_parts=signal.requirements.parts
        ):
            assert part.count is not None
            rows, reference = to_device(part.rows, self.device), None
            if signal.requirements.reference:
                assert self._reference is not None
                reference = self._referred(self._reference.loss, rows, part.count)
            with self.mixer.domain(part) as scope:
                with self._autocast(), self._differentiable_twice():
                    loss = self._loss(self._forward, rows)
                objective = loss
                if reference is not None and signal.requirements.objective == "excess":
                    objective = (loss - reference).clamp(min=0)
                scaled = scope.scaled_loss(loss, objective=objective, reference=reference)
                scaled.backward(create_graph=self.mixer.needs_graph)
            totals[part.domain] = totals.get(part.domain, 0.0) + float(loss.detach()) * part.count
        return {name: totals[name] / count for name, count in batch.counts.items()}

    def _mixed_backward(self, batch: MixtureBatch) -> dict[str, float]:
        """Run one backward pass over the rows of all domains, or several over parts of them."""
        found: list[Tensor] = []
        parts = batch.split(self._config.batch.micro_rows or len(batch))
        for number, part in enumerate(parts):
            rows = to_device(part.rows, self.device)
            # Ranks average the gradient of all parts, with the last one.
            last = number == len(parts) - 1
            averaging = nullcontext() if last else distributed.no_sync(self._forward)
            with averaging, self.mixer.batch(part) as scope:
                losses, reference, objective = self._element_losses(rows, len(part))
                scope.weighted_loss(losses, reference=reference, objective=objective, data=rows).backward()
            found.append(losses.detach().flatten(1).mean(dim=1) if losses.dim() > 1 else losses.detach())
        each, labels = torch.cat(found).float().cpu().numpy(), batch.labels.numpy()
        return {name: float(each[labels == batch.names.index(name)].mean()) for name in batch.counts}

    def _element_losses(self, rows: Any, count: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Losses of rows, those of the reference model, and what is made less where it is not the losses."""
        assert self._row_losses is not None
        if not self.mixer.signal.requirements.reference:
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
        excess = self.mixer.signal.requirements.objective == "excess"
        return losses, reference, (losses - reference).clamp(min=0) if excess else None

    @torch.no_grad()
    def _referred(self, loss: LossFn, rows: Any, count: int) -> Tensor:
        """Return the losses of the reference model on rows."""
        assert self._reference is not None
        self._rows_computed += FORWARD * count
        with self._autocast():
            return loss(self._reference.model, rows)

    def _takes_mixed_batches(self) -> bool:
        """Return whether a step is one batch of all domains' rows, as in plain training; else one for each."""
        traced = self.mixer.signal.uses_traces
        if traced and self._config.traces != "projected":
            return False
        if traced and self._row_losses is None:
            raise ValueError(
                "mixer.traces: projected needs the loss of every row: let the Python function give (model, loss, "
                "row_losses), or mixwell.train(..., row_losses=...), or choose dense traces"
            )
        return self._row_losses is not None and not self.mixer.signal.requirements.domain_batches

    def _expect_suitable(self) -> None:
        name = f"mixer.method: {self._config.mixer.method}"
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
            return self._loss(model, to_device(batch, self.device))

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

    def _own_pieces(self, drawn: Indices) -> list[tuple[Indices, Piece]]:
        """Return this rank's rows among those that all ranks drew, and how each piece of them counts.

        Where all ranks must run the model equally often, one that has no rows left runs one that does not count.
        """
        count = distributed.world_size()
        own = drawn[distributed.rank() :: count]
        found = pieces(
            len(own),
            len(drawn),
            self._most_rows,
            world_size=count,
            equal_forward_passes=self.mixer.requires_equal_forward_passes,
        )
        return [(own[p.begin : p.end] if p.end > p.begin else drawn[:1], p) for p in found]

    @property
    def _most_rows(self) -> int:
        """Rows that are computed at once outside of training steps."""
        return self._config.batch.micro_rows or -(-self._config.batch.rows // distributed.world_size())

    @property
    def _own_seed(self) -> int:
        """The seed of this rank."""
        return self._config.seed + 1_000_003 * distributed.rank()


def validation_rows(config: Config, horizon: int, *, points: int) -> int:
    """Return the number of rows of one validation gradient, where there are as many."""
    wanted = config.mixer.validation_rows
    if wanted != "auto":
        return wanted
    # Each process has one at least.
    return max(
        rounds.validation_rows(config.batch.rows, steps=horizon, points=points), distributed.world_size()
    )


def choose_device(name: str) -> torch.device:
    """Return the device that a setting means.

    Args:
        name: ``auto`` or a name of PyTorch's.

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
