"""Model, optimizer, mixer and loader together: one training step at a time, evaluation and state; no files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast, final

import numpy as np
import torch
from torch import Tensor, nn

from mixwell import distributed, methods
from mixwell.data.datasets import IndexedDataset
from mixwell.data.shuffle import ShuffledCursor
from mixwell.mixer import state
from mixwell.mixer.batch import MixtureBatch, RowRange, row_ranges
from mixwell.reference.fidelity import Fidelity
from mixwell.training import builder, checkpoints, optimization, parallel, randomness
from mixwell.training.backward import StepBackward, autocast
from mixwell.training.checkpoints import Checkpoint
from mixwell.training.config import Config
from mixwell.training.fidelity import measure_run_fidelity
from mixwell.training.models.base import Trainable
from mixwell.training.probe_data import ProbeRows
from mixwell.typing import Indices, LossFn
from mixwell.utils.nested import to_device


@final
@dataclass(frozen=True)
class StepOutcome:
    """The losses and counts of a training step.

    Args:
        loss: the weighted mean of the domains' losses, which the step minimizes; with several ranks the part of it
            that comes from this rank's rows.
        losses: mean loss of this rank's rows by domain.
        counts: this rank's rows by domain.
    """

    loss: float
    losses: dict[str, float]
    counts: dict[str, int]
    learning_rate: float


@final
class Trainer:
    """Trains a model with the mixer and loader of a config.

    Args:
        domains: rows by domain.
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
        self._config, self._method = config, methods.find(config.mixer.method)
        self._check_needs(trainable, reference)
        self.device = builder.choose_device(config.device)
        self.model = trainable.model.to(self.device)
        wrapped = parallel.wrap_model(self.model, config.parallel)
        self._forward = wrapped
        if config.compile:
            self._forward = cast("nn.Module", torch.compile(wrapped))
        self._trainable, self._reference = trainable, reference
        self._domains, self._validation = dict(domains), validation
        if reference is not None:
            reference.model.to(self.device).eval().requires_grad_(False)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self._optimizer = optimization.build_optimizer(config.optimizer, trained)
        self._loss = self._with_autocast(trainable.loss)
        self._probe_rows: ProbeRows | None = None
        if self._method.needs.probes:
            self._probe_rows = ProbeRows(
                self.model,
                self._loss,
                trainable.row_losses and self._with_autocast(trainable.row_losses),
                domains,
                validation,
                rows=config.batch.rows,
                seed=config.seed,
                device=self.device,
            )
        probes = None if self._probe_rows is None else self._probe_rows.probes
        self.mixer, self.loader = builder.build_mixer_and_loader(
            config, wrapped, self._optimizer, domains, probes
        )
        if self.mixer.signal.requirements.graph and config.compile:
            raise ValueError(
                f"mixer.method: {self._method.name} with options.curvature: exact differentiates twice, which a "
                "compiled model cannot; set compile: false"
            )
        self._backward = StepBackward(config, self.mixer, self._forward, trainable, reference, self.device)
        self._batches: Iterator[MixtureBatch] | None = None
        self._cursor: ShuffledCursor | None = None
        self.validation_rows = 0
        """Rows of one validation gradient; 0 where none is needed."""
        if validation is not None and self.mixer.signal.requirements.validation:
            self._cursor = ShuffledCursor(len(validation), f"seed {config.seed}, validation set")
            points = len(self.mixer.signal.validation_points(self.mixer.horizon))
            rows = builder.validation_rows(config, self.mixer.horizon, points=points)
            self.validation_rows = min(rows, len(validation))
        parallel.check_possible(config, validation=self.validation_rows)
        if distributed.rank():  # so that the dropout masks of ranks differ
            randomness.seed(self._rank_seed)

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
        """The compute so far, in rows of which a gradient was taken; evaluations do not count.

        It includes training, validation gradients and probes; a forward pass without a backward pass is a third.
        """
        probes = 0.0 if self._probe_rows is None else self._probe_rows.probes.spent
        return self._backward.rows_computed + probes

    @property
    def extra_bytes(self) -> int:
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
        traced = self.mixer.trace_due
        losses = self._backward.run(batch)
        self.mixer.step()
        if self.mixer.validation_due:
            self._validate()
        total, local = batch.step.total, batch.step.local
        products = len(weights) if traced and self.mixer.signal.uses_hessian_products else 0
        self._backward.rows_computed += sum(total.values()) * (1 + 2 * products)
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
                loss = self._loss(self._forward, to_device(rows.batch(chosen), self.device))
                scope.scaled_loss(loss).backward()
        self._backward.rows_computed += len(indices)

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
                loss = self._loss(model, to_device(rows.batch(indices), self.device))
                total += float(loss) * (piece.end - piece.begin)
        return float(distributed.all_reduce_sum(np.array([total]), self.device)[0]) / len(chosen)

    def fidelity(self, *, steps: int, replicates: int = 0) -> Fidelity:
        """Compare the estimated hypergradient with the exact one over the coming steps; nothing changes.

        The arguments are those of :func:`mixwell.training.fidelity.measure_run_fidelity`.

        Raises:
            ValueError: there is no validation set.
        """
        if self._validation is None:
            raise ValueError("the run has no validation set, by which a hypergradient could be measured")
        self._set_learning_rate()
        return measure_run_fidelity(
            self._config,
            self.model,
            self._trainable.loss,
            self._optimizer,
            self._domains,
            self._validation,
            self.mixer.weights.last,
            steps=steps,
            replicates=replicates,
            max_rows=self._max_rows,
            estimate_loss=self._loss,
        )

    # ------------------------------------------------------------------------------------------- state

    def checkpoint(self) -> Checkpoint:
        """Return everything that a resumed run needs, between two steps; the tensors are the live ones."""
        distributed.broadcast_tensors(self.model.buffers())
        mixer = self.mixer.state_dict()
        remembered, moments = optimization.state(self._optimizer)
        drawn, generators = randomness.state(self.device)
        parts = {"mixer": mixer.pop("tensors"), "optimizer": moments, "random": generators}
        plain = {
            "optimizer": remembered,
            "loader": self.loader.state_dict(),
            "validation_taken": 0 if self._cursor is None else self._cursor.taken,
            "probes": None if self._probe_rows is None else self._probe_rows.state(),
            "rows_computed": self._backward.rows_computed,
            "data": self._digests,
        }
        training = {f"{part}.{name}": t for part, tensors in parts.items() for name, t in tensors.items()}
        model, own = checkpoints.unique(self.model.state_dict()), {"mixer": mixer, "random": drawn}
        return Checkpoint(self.steps_done, model, training, plain, [own])

    def load(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint, bit for bit.

        Raises:
            ValueError: it is from other data or another model.
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
        mixer = state.values_for_rank([one["mixer"] for one in saved])
        self.mixer.load_state_dict({**mixer, "tensors": part("mixer")})
        self.loader.load_state_dict(plain["loader"])
        self._batches = None
        if self._cursor is not None:
            self._cursor.taken = int(plain["validation_taken"])
        if self._probe_rows is not None:
            self._probe_rows.load_state(plain["probes"])
        self._backward.rows_computed = float(plain["rows_computed"])
        if len(saved) == distributed.world_size():
            randomness.load_state(saved[distributed.rank()]["random"], part("random"), self.device)
        else:
            randomness.seed(self._rank_seed + self.steps_done)

    @cached_property
    def _digests(self) -> dict[str, str]:
        every: dict[str, IndexedDataset] = {**self._domains}
        if self._validation is not None:
            every["validation"] = self._validation
        return {name: rows.digest() for name, rows in every.items()}

    # ------------------------------------------------------------------------------------------- inside

    def _check_needs(self, trainable: Trainable, reference: Trainable | None) -> None:
        name, needs = f"mixer.method: {self._config.mixer.method}", self._method.needs
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

    def _with_autocast(self, loss: LossFn) -> LossFn:
        def cast_loss(model: nn.Module, batch: Any) -> Tensor:
            with autocast(self._config, self.device):
                return loss(model, batch)

        return cast_loss

    def _own_pieces(self, drawn: Indices) -> list[tuple[Indices, RowRange]]:
        """Return this rank's rows among those that all ranks drew, and how each piece of them counts.

        Where all ranks must run the model equally often, one that has no rows left runs one that does not count.
        """
        count = distributed.world_size()
        own = drawn[distributed.rank() :: count]
        found = row_ranges(
            len(own),
            len(drawn),
            self._max_rows,
            world_size=count,
            equal_forward_passes=self.mixer.requires_equal_forward_passes,
        )
        return [(own[p.begin : p.end] if p.end > p.begin else drawn[:1], p) for p in found]

    @property
    def _max_rows(self) -> int:
        """The greatest number of rows in one forward pass outside of training steps."""
        return self._config.batch.micro_rows or -(-self._config.batch.rows // distributed.world_size())

    @property
    def _rank_seed(self) -> int:
        return self._config.seed + 1_000_003 * distributed.rank()
