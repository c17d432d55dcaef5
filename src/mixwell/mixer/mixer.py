"""The heart: T training steps, then one update of the weights."""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from mixwell import distributed
from mixwell.hypergradient.capture.hooks import CaptureContext
from mixwell.hypergradient.capture.row_groups import RowGroups
from mixwell.hypergradient.parameters import Parameters
from mixwell.hypergradient.responses import unwrap_optimizer
from mixwell.hypergradient.traces.base import Combined
from mixwell.mixer import agreement, state
from mixwell.mixer.accumulation import LossMeans, RoundScores, Shares, WeightedSum
from mixwell.mixer.nonfinite import NonFinite, NonFinitePolicy
from mixwell.mixer.records import RoundRecord
from mixwell.mixer.row_batch import RowBatch, RowStep, places_of, rows_expected
from mixwell.mixer.row_counts import RowCounts, counted_inputs
from mixwell.mixer.scopes import Scope, Scopes
from mixwell.signals import Hypergradient, Signal
from mixwell.signals.probes import Probes
from mixwell.simplex import horizons, rounds
from mixwell.simplex.constraints import Constraint
from mixwell.simplex.horizons import Horizon
from mixwell.simplex.rounds import RoundClock
from mixwell.simplex.updates import Update
from mixwell.simplex.weight_updater import WeightUpdater
from mixwell.typing import Gradients, Vector

_VALIDATION = "validation"
# Losses of rows are weighted by no less, so that the gradient of a domain can be had from the weighted one.
_LEAST_WEIGHT = 1e-20
_ONE_WAY = "mixer.batch and mixer.domain cannot be used in one step; call mixer.step() between"


@final
class Mixer:
    """Learns the weights of the domains while an optimizer trains a model.

    Put it around a training loop::

        mixer = Mixer(model, optimizer, domains=["web", "code"], budget=20_000)
        for batches in loader:                           # {"web": ..., "code": ...}
            for domain, batch in batches.items():
                with mixer.domain(domain):
                    loss(model, batch).backward()
            mixer.step()                                 # replaces optimizer.step()
            if mixer.validation_due:
                with mixer.validation():
                    loss(model, next(validation)).backward()
        mixer.weights.average

    Every T steps (a round) the weights take one step against the signal (Algorithms 1 to 3 of the paper), with the
    validation gradient that is due at the end of the round, or with the last training step where the signal needs
    none.

    Where batches are mixed already, give the domain of each row instead, and losses by row (at little cost with
    ``signal=Hypergradient(traces=ProjectedTraces())``)::

        with mixer.batch(labels) as batch:
            batch.weighted_loss(losses(model, rows)).backward()
        mixer.step()

    Args:
        model: the model; its parameters' names appear in messages and state.
        optimizer: trains it. Its learning rate, momentum and preconditioner are read at every step.
        domains: the names of the domains.
        budget: the number N of training steps. Needed by the default horizon.
        horizon: T; a number, a rule, or ``None`` for ``ceil(sqrt(N log N) / 2)``.
        signal: what is measured; ``None`` for :class:`mixwell.Hypergradient` with its defaults.
        update: how the weights move; a number is the alpha of :class:`mixwell.MirrorDescent`, ``None`` is
            :class:`mixwell.SelfTunedMirrorDescent`.
        constraints: where the weights may live.
        weights: initial weights, uniform by default.
        warmup: the number of first steps that are trained with the initial weights and leave no trace; the
            first round begins after them.
        clip_norm: clip the norm of the combined gradient to this before the optimizer steps.
        inclusion: the probability with which a domain is in a step, for those that may be absent. Its
            gradient is divided by it, so that the combined gradient and the traces stay unbiased.
        on_nonfinite: ``"raise"`` an error at a non-finite loss or gradient, or ``"skip"`` that contribution
            (it is left out of this step, counted and reported).
        probes: what the signal may compute on its own, for those that look further than a step's gradients.

    Raises:
        ValueError: a setting is wrong; the message says what was got and what to do.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        domains: Sequence[str],
        *,
        budget: int | None = None,
        horizon: Horizon | int | None = None,
        signal: Signal | None = None,
        update: Update | float | None = None,
        constraints: Sequence[Constraint] = (),
        weights: Mapping[str, float] | Sequence[float] | None = None,
        warmup: int = 0,
        clip_norm: float | None = None,
        inclusion: Mapping[str, float] | None = None,
        on_nonfinite: NonFinitePolicy = "raise",
        probes: Probes | None = None,
    ) -> None:
        self._nonfinite = NonFinite(on_nonfinite)
        if clip_norm is not None and not (np.isfinite(clip_norm) and clip_norm > 0):
            raise ValueError(f"clip_norm must be positive and finite, got {clip_norm}")
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ValueError(
                "LBFGS evaluates the loss within a step, so it cannot be mixed; use SGD or AdamW"
            )
        length = horizons.resolve(horizon, budget)
        self._clock = RoundClock(length, budget=None if budget is None else int(budget), warmup=warmup)
        self._outer = WeightUpdater(update, constraints)
        self.weights = self._outer.start(domains, weights)
        if _VALIDATION in self.weights.names:
            raise ValueError(f"the name {_VALIDATION!r} is taken in records; give that domain another one")
        self._shares = Shares(self.weights.names, inclusion or {})
        self._clip_norm = None if clip_norm is None else float(clip_norm)
        self._stepped = optimizer
        self._optimizer = unwrap_optimizer(optimizer)
        self._model = model
        self._parameters = Parameters.of(model, optimizer)
        self._signal = signal or Hypergradient()
        self._signal.attach(self._optimizer, self._parameters, self.weights.names, probes)
        self.rounds: list[RoundRecord] = []
        """The records of the finished rounds."""
        # Gradients of domains are averaged over processes when they are combined: once, and not for each.
        self._averaging = distributed.is_ddp(model)
        self._sum = WeightedSum(
            self._parameters, lazy=self._signal.supports_mixed_batches, shared=self._averaging
        )
        self._scopes = Scopes(self._parameters, graphs=self._signal.needs_graph)
        self._row_counts = RowCounts(self.weights.names)
        self._round_begun = False
        self._clear_step()
        self._clear_round()

    def __repr__(self) -> str:
        return f"Mixer({self.weights!r}, {self._clock!r}, {self._signal!r}, {self._outer.update!r})"

    # ------------------------------------------------------------------------------------------- reading

    @property
    def horizon(self) -> int:
        """The number T of training steps in a round."""
        return self._clock.horizon

    @property
    def budget(self) -> int | None:
        """The number N of training steps, where it is known."""
        return self._clock.budget

    @property
    def steps_done(self) -> int:
        """The number of training steps so far."""
        return self._clock.steps_done

    @property
    def validation_due(self) -> bool:
        """Whether a validation gradient is due before the next step (``with mixer.validation():``).

        That is so several times in the later part of a round and at its end, when the weights are updated with it;
        never where the signal needs none.
        """
        done, due = len(self._scores.points) + self._points_lost, self._due_points
        return done < len(due) and self._clock.steps_in_round == due[done]

    def validation_rows(self, batch_rows: int) -> int:
        """How many rows a validation batch should have, so that those of a round take a twentieth of its training.

        Args:
            batch_rows: of a training step, all domains together.

        Returns:
            At least 1. In a round of fewer than twenty steps they are one training batch in all.
        """
        points = len(self._signal.validation_points(self.horizon))
        return rounds.validation_rows(batch_rows, steps=self.horizon, points=points)

    @property
    def round_ended(self) -> RoundRecord | None:
        """The record of the round that ended with the last step and its validation, ``None`` where none did."""
        if not self.rounds:
            return None
        last = self.rounds[-1]
        return last if last.first_step + last.steps == self.steps_done else None

    @property
    def round_left(self) -> int:
        """Steps until the weights may change, so that batches may be drawn ahead."""
        return self._clock.remaining

    @property
    def limits(self) -> dict[str, tuple[float, float]]:
        """The least and the greatest weight that the constraints allow each domain, as of the last update."""
        return self._outer.limits(self.weights.names)

    @property
    def requires_equal_forward_passes(self) -> bool:
        """Whether all processes must run the model equally often, since each has parts of it (``fully_shard``)."""
        return self._parameters.sharded

    @property
    def needs_validation(self) -> bool:
        """Whether the signal needs validation gradients; where not, none is ever due."""
        return self._signal.needs_validation

    @property
    def needs_graph(self) -> bool:
        """Whether domains need ``backward(create_graph=True)``, as exact Hessian products do."""
        return self._signal.needs_graph

    @property
    def signal(self) -> Signal:
        """What is measured; its properties say what it needs to be told."""
        return self._signal

    @property
    def nbytes(self) -> int:
        """The memory that mixing holds beyond plain training, in bytes: the traces and the weighted sum."""
        return self._signal.nbytes + self._sum.nbytes

    @property
    def skipped(self) -> dict[str, int]:
        """How many non-finite contributions were left out so far, by domain, where there were any."""
        return dict(self._nonfinite.total)

    @property
    def inclusion(self) -> dict[str, float]:
        """The probability with which each domain is in a step; 1 for those that are not named."""
        return {name: self._shares.inclusion.get(name, 1.0) for name in self.weights.names}

    @inclusion.setter
    def inclusion(self, probabilities: Mapping[str, float]) -> None:
        self._shares.inclusion = probabilities

    @property
    def portions(self) -> dict[str, float]:
        """The rows of each domain that this process has in the step, over the mean of all processes.

        With n rows of a domain in a step of R processes, of which n_r are here, it is ``R n_r / n``. Processes
        average their gradients, so the loss of n_r rows counts by that: ``scope.scaled_loss(loss)`` in
        ``mixer.domain``
        sees to it, as ``batch.weighted_loss`` in ``mixer.batch`` does. 1 for those that are not named; 0
        for one of which
        other processes have all rows, which may then be left out (but not with ``fully_shard``, where all
        processes must run the model as often: run any row). ``"validation"`` is that of the validation batch. A
        :class:`mixwell.MixtureLoader` sets those of the domains.
        """
        return dict(self._shares.portions)

    @portions.setter
    def portions(self, portions: Mapping[str, float]) -> None:
        self._shares.portions = portions

    # ------------------------------------------------------------------------------------------- training

    @contextmanager
    def domain(self, name: str, *, share: float = 1.0, rows: int | None = None) -> Generator[Scope]:
        """Everything that ``.backward()`` accumulates inside is this domain's gradient.

        Args:
            name: the domain.
            share: the share of the domain's batch in this step that is computed here. With four equal
                micro-batches (gradient accumulation) enter four times with ``share=1/4``; the shares of a
                step must sum to one.
            rows: how many rows are computed here, for signals that measure noise.

        Yields:
            A scope, to which the loss may be told.

        Raises:
            ValueError: the domain is unknown or given twice, or its gradient is missing or not finite, or the
                signal needs more than was told.
            RuntimeError: the calls are out of order.
        """
        index = self.weights.index(name)
        self._expect_no_validation_due()
        if self._rows.given:
            raise RuntimeError(_ONE_WAY)
        self._shares.check(name, share, self.steps_done)
        portion = self._shares.portions.get(name, 1.0)
        look = rows is None and self._row_counts.wanted
        counting = counted_inputs(self._model) if look else nullcontext([rows or 0])
        with counting as counted, self._scopes.collect(name, self.steps_done, portion=portion) as scope:
            yield scope
        # Inputs of length 1 are as likely packed sequences, whose rows are not seen.
        if not (look and set(counted) == {1}):
            self._row_counts.add(index, sum(counted))
        with self._parameters.full_precision():
            if self._accept(name, scope):
                self._expect_recorded(name, scope)
                self._fold(index, scope.gradients, self._shares.scale(name, share), rows)
                self._losses.add(name, scope.loss, share * portion)
                if self._step_begun and scope.losses:
                    losses, reference = scope.told()
                    self._signal.record_loss(index, losses, share=share * portion, reference=reference)
            scope.gradients = []  # so that a kept scope does not keep its gradient alive
        self._shares.give(name, share)

    @contextmanager
    def batch(
        self, labels: Tensor | NDArray[Any] | Sequence[Any], *, counts: Mapping[str, float] | None = None
    ) -> Generator[RowBatch]:
        """One mixed batch; inside, call ``batch.weighted_loss(losses).backward()`` with the losses of its rows.

        The loss of row i, of domain d, is weighted by ``w_d / n_d``, so that one ordinary backward pass gives
        ``.grad = sum_d w_d g_d``, and the signal tells the domains apart by what the layers see.

        Args:
            labels: for every row the name of its domain, or its number in the order of ``domains``.
            counts: ``n_d`` by domain. By default the number of rows in this batch (times the inclusion
                probability, over the process's :attr:`portions`), so that every domain counts by its weight alone.
                Give the total of all batches where a step has several (gradient accumulation), and the expected
                number where the loader draws domains at random: with rows drawn by the weights,
                ``{d: w_d * rows}``, the loss is the ordinary mean. In several processes the mean of theirs.

        Yields:
            The batch, which weighs the losses.

        Raises:
            ValueError: a label is wrong or a domain is given twice, a loss or gradient is missing or not finite,
                or the signal needs one batch per domain.
            RuntimeError: the calls are out of order.
        """
        self._expect_no_validation_due()
        if self._sum or (self._shares and not self._rows.given):
            raise RuntimeError(_ONE_WAY)
        names = self.weights.names
        segments = RowGroups(places_of(labels, names), len(names))
        expected = rows_expected(segments, names, counts, self._shares.inclusion, self._shares.portions)
        if counts is None:
            for place, _, _ in segments.slices:
                self._shares.check(names[place], 1.0, self.steps_done)
        weights = np.maximum(self.weights.values, _LEAST_WEIGHT)
        watching = (
            self._signal.capture(segments, weights) if self._begin_step() else nullcontext(CaptureContext())
        )
        first = not self._rows.given
        self._rows.given = True
        try:
            with self._scopes.accumulate("batch", self.steps_done, first=first), watching as watch:
                batch = RowBatch(segments, (weights / expected)[segments.labels], watch, self._signal)
                yield batch
        except BaseException:
            self._clear_step()  # with it goes what batches before it left
            raise
        for place, begin, end in segments.slices:
            self._row_counts.add(place, end - begin)
        self._look_at(batch, expected)
        self._rows.counted = counts is not None
        if counts is None:
            for place, _, _ in segments.slices:
                self._shares.give(names[place], 1.0)

    def step(self) -> None:
        """One training step: ``.grad = sum_j w_j g_j``, clipped if set, then ``optimizer.step()``.

        The parameters have no gradients afterwards.

        Raises:
            RuntimeError: a validation gradient is due, or a ``mixer.domain`` is still open.
            ValueError: a domain is missing although it is always included, or its shares do not sum to one.
        """
        self._expect_step("mixer.step()")
        try:
            if self._prepare(None, None):
                with self._parameters.full_precision(), torch.enable_grad():
                    self._stepped.step()
        finally:
            self._parameters.clear_gradients()
        self._end_step()

    def before_step(self, *, norm: float | None = None, clip_norm: float | None = None) -> None:
        """The first half of :meth:`step`, for a trainer that calls ``optimizer.step()`` itself, right after it.

        Call it when all of the step's gradients are there, and :meth:`after_step` after the optimizer::

            mixer.before_step()
            optimizer.step()
            mixer.after_step()

        A step that had to be left out has no gradients then, so that the optimizer does nothing.

        Args:
            norm: the norm of the combined gradient, where the trainer has clipped it already, before it did.
            clip_norm: to what it was clipped.

        Raises:
            RuntimeError: the calls are out of order.
            ValueError: a domain is missing, or the gradient is to be clipped twice.
        """
        self._expect_step("mixer.before_step()")
        if clip_norm is not None and self._clip_norm is not None:
            raise ValueError(
                f"the gradient is clipped to {clip_norm:g} by the trainer and to {self._clip_norm:g} by the "
                "mixer; leave out one of them"
            )
        if not self._prepare(norm, clip_norm):
            self._parameters.clear_gradients()
        self._halfway = True

    def after_step(self) -> None:
        """The second half of :meth:`step`; see :meth:`before_step`.

        Raises:
            RuntimeError: there was no :meth:`before_step`.
        """
        if not self._halfway:
            raise RuntimeError(
                "mixer.after_step() without mixer.before_step(): call it before optimizer.step()"
            )
        self._parameters.clear_gradients()
        self._end_step()

    @contextmanager
    def validation(self, *, share: float = 1.0) -> Generator[Scope]:
        """Everything that ``.backward()`` accumulates inside is the validation gradient at the current parameters.

        Call it where :attr:`validation_due` says so. At the end of a round the weights are updated with it, and
        the next round begins; :attr:`rounds` has the record. The model's buffers (running statistics of BatchNorm)
        are restored afterwards.

        Args:
            share: the share of the validation batch that is computed here; shares must sum to one.

        Yields:
            A scope, to which the loss may be told.

        Raises:
            ValueError: the shares exceed one, or there is no gradient.
            RuntimeError: no validation gradient is due, or another process has other weights.
        """
        self._expect_validation_due()
        self._shares.check(_VALIDATION, share, self.steps_done)
        portion = self._shares.portions.get(_VALIDATION, 1.0)
        with (
            self._parameters.buffers_kept(),
            self._scopes.collect(_VALIDATION, self.steps_done, portion=portion) as scope,
        ):
            yield scope
        with self._parameters.full_precision():
            if self._accept(_VALIDATION, scope):
                if self._validation is None:
                    self._validation = self._new_validation()
                # A part's score needs its gradient of all processes, which is had of the whole only.
                only = len(self._due_points) == 1
                if share < 1 and only and self._signal.linear and distributed.is_single_process():
                    self._scores.add_part(share, self._signal.scores(scope.gradients))
                self._validation.take(scope.gradients, share)
                self._losses.add(_VALIDATION, scope.loss, share * portion)
            else:
                self._validation_lost = True
            scope.gradients = []
            self._shares.give(_VALIDATION, share)
            if self._shares.complete(_VALIDATION):
                self._end_point()

    def _end_point(self) -> None:
        """The validation gradient of a point is complete: keep its scores, and end the round with the last one."""
        if not distributed.is_single_process():
            self._share_validation()
        validation = self._usable_validation()
        scores = None if validation is None else self._finite_scores(validation)
        if scores is None:
            self._points_lost += 1
        else:
            self._scores.add(self._clock.steps_in_round, scores)
        self._validation, self._validation_lost = None, False
        self._shares.clear()
        if self._clock.round_done:
            self._end_round(validation)

    def _end_round(self, validation: Gradients | None) -> None:
        """One update of the weights; the next round begins."""
        self._row_counts.check(self.weights.values)
        self.rounds.append(self._move_weights())
        self._clear_step()
        self._clear_round()
        self._clock.next_round()
        self._round_begun = False
        if not self._clock.finished:
            self._begin_round(validation)

    # ------------------------------------------------------------------------------------------- state

    def state_dict(self, *, forget_step: bool = False) -> state.State:
        """Everything that a resumed run needs, as plain values and tensors; also in the middle of a round.

        In several processes it is the state of this one: traces are of its own rows. :meth:`save` writes those of
        all.

        Args:
            forget_step: whether a step that was begun may be left out, as if it had not been.

        Returns:
            A state for :meth:`load_state_dict`. Its tensors are the live ones; save or copy it before training on.

        Raises:
            RuntimeError: in the middle of a step.
        """
        self._scopes.expect_closed("mixer.state_dict()")
        if (self._shares or self._rows.given) and not forget_step:
            raise RuntimeError(
                "a state can be taken between steps, not in the middle of one; call it after mixer.step() or "
                "after the block of mixer.validation()"
            )
        return self._state()

    def _state(self) -> state.State:
        values, tensors = self._signal.state()
        history, steps = self.weights.state()
        named = {f"signal.{name}": tensor.detach() for name, tensor in tensors.items()}
        named["weights.history"] = torch.from_numpy(history)
        named["weights.steps"] = torch.from_numpy(steps)
        return {
            "format": state.FORMAT,
            "settings": {
                "domains": list(self.weights.names),
                "horizon": self.horizon,
                "budget": self.budget,
                "warmup": self._clock.warmup,
                "clip_norm": self._clip_norm,
                "signal": repr(self._signal),
                "update": repr(self._outer.update),
                "constraints": repr(self._outer.constraints),
                "parameters": self._parameters.shapes(),
            },
            "values": {
                "clock": self._clock.state(),
                "signal": values,
                "update": self._outer.update.state(),
                "inclusion": dict(self._shares.inclusion),
                "rounds": [record.to_json() for record in self.rounds],
                "skipped": dict(self._nonfinite.total),
                "skipped_in_round": dict(self._nonfinite.in_round),
                "round_begun": self._round_begun,
                "losses": {name: list(sums) for name, sums in self._losses.sums.items()},
                "points": self._scores.state(),
                "points_lost": self._points_lost,
            },
            "tensors": named,
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue where another mixer stopped, bit for bit. A step that was begun is forgotten.

        Args:
            saved: what :meth:`state_dict` returned, of a mixer with the same settings.

        Raises:
            ValueError: it is of another version or another run; the message says what differs, and nothing
                is changed.
        """
        self._scopes.expect_closed("mixer.load_state_dict()")
        state.check(saved, self._state(), growing=("weights.history", "weights.steps"))
        tensors: dict[str, Tensor] = saved["tensors"]
        values: dict[str, Any] = saved["values"]
        own = {k.removeprefix("signal."): t for k, t in tensors.items() if k.startswith("signal.")}
        with torch.no_grad():
            self._signal.load_state(values["signal"], own)
        history, steps = (tensors[f"weights.{part}"].cpu().numpy() for part in ("history", "steps"))
        self.weights.load_state(history, steps)
        self._clock.load_state(values["clock"])
        self._outer.at_step(self._clock.round_start if values["rounds"] else 0)
        self._outer.update.load_state(values["update"])
        self._shares.inclusion = values["inclusion"]
        self.rounds = [RoundRecord(**record) for record in values["rounds"]]
        self._clear_step()
        self._clear_round()
        self._round_begun = bool(values["round_begun"])
        self._nonfinite.total = dict(values["skipped"])
        self._nonfinite.in_round = dict(values["skipped_in_round"])
        self._losses.sums = {name: (total, count) for name, (total, count) in values["losses"].items()}
        self._scores.load_state(values["points"])
        self._points_lost = int(values["points_lost"])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write :meth:`state_dict` to a file, atomically. In several processes all must call it.

        Args:
            path: where to. One safetensors file; of several processes a folder, which
                ``torch.distributed.checkpoint`` fills, and from which any number of processes can go on.
        """
        if distributed.is_single_process():
            state.write(path, self.state_dict())
        else:
            state.write_all(path, self.state_dict())

    def load(self, path: str | os.PathLike[str]) -> None:
        """Continue from what :meth:`save` wrote. No code from it is run. In several processes all must call it.

        Args:
            path: where from; a file or a folder, whatever the number of processes that wrote it.
        """
        self.load_state_dict(state.read(path, like=self._state()["tensors"]))

    # ------------------------------------------------------------------------------------------- inside

    def _accept(self, name: str, scope: Scope) -> bool:
        return self._nonfinite.accept(name, self.steps_done, self._parameters, scope.gradients, scope.loss)

    def _usable_validation(self) -> Gradients | None:
        """The validation gradient, ``None`` where a part of it had to be left out."""
        return None if self._validation_lost or self._validation is None else self._validation.gradients

    def _new_validation(self) -> WeightedSum:
        return WeightedSum(self._parameters, lazy=True, shared=self._averaging)

    def _share_validation(self) -> None:
        """The validation gradient of all processes, where each has that of its own rows."""
        if self._nonfinite.policy == "skip":
            self._validation_lost = distributed.any_rank(self._validation_lost, self._parameters.device)
        if self._averaging and not self._validation_lost:
            self._validation = self._validation or self._new_validation()
            self._validation.share()

    def _begin_round(self, validation: Gradients | None) -> None:
        self._signal.begin_round(self._clock.round_index, self.weights.values, validation)
        self._round_begun = True

    def _expect_recorded(self, name: str, scope: Scope) -> None:
        if self._signal.needs_losses and not scope.losses:
            raise ValueError(
                f"{self._signal!r} lives by the losses: call scope.record_loss(loss) in `with "
                f"mixer.domain({name!r}) as scope:`"
            )
        if self._signal.needs_reference and any(other is None for _, other in scope.losses):
            raise ValueError(
                f"{self._signal!r} needs the losses of a reference model: scope.record_loss(losses, reference=...)"
            )

    def _fold(self, index: int, gradients: Gradients, scale: float, rows: int | None) -> None:
        """A gradient goes into its trace and into the weighted sum, and is then free."""
        weight = float(self.weights.values[index])
        if self._begin_step():
            self._signal.fold(index, gradients, scale=scale, weight=weight, rows=rows)
        self._sum.add(gradients, weight * scale * self._signal.domain_factor(index))

    def _begin_step(self) -> bool:
        """Whether the step belongs to a round; the signal then knows that it has begun."""
        if not self._clock.in_round:
            return False
        if not self._round_begun:
            self._begin_round(None)
        if not self._step_begun:
            self._signal.begin_step(remaining=self._clock.remaining)
            self._step_begun = True
        return True

    def _look_at(self, batch: RowBatch, expected: Vector) -> None:
        """Keep the losses of a mixed batch, and leave its step out where something is not finite."""
        names = self.weights.names
        found = self._signal.non_finite() if self._step_begun else None
        problems = {names[place]: "gradient" for place in found or []}
        for place, rows, mean in batch.means():
            if np.isfinite(mean):
                self._losses.add(names[place], mean, rows / float(expected[place]))
            else:
                problems[names[place]] = f"loss ({mean:g})"
        if self._step_begun and batch.observed is not None and not problems:
            self._observe_rows(batch.observed, batch.segments, expected)
        if found is None and not problems:  # no signal has looked at the gradients
            parameter = self._parameters.non_finite([p.grad for p in self._parameters.tensors])
            if parameter is not None:
                problems["batch"] = f"gradient of parameter {parameter}"
        for name, problem in problems.items():
            self._rows.lost = True
            self._nonfinite.reject(
                name,
                f"non-finite {problem} in a row of {name!r} at step {self.steps_done}, which is left out",
                "Look at that batch, or lower the learning rate",
            )

    def _observe_rows(
        self, observed: tuple[Tensor, Tensor | None], segments: RowGroups, expected: Vector
    ) -> None:
        losses, reference = observed
        if self._signal.needs_reference and reference is None:
            raise ValueError(
                f"{self._signal!r} needs the losses of a reference model: "
                "batch.weighted_loss(losses, reference=...)"
            )
        if not self._signal.needs_losses:
            return
        losses, reference = (
            segments.sort_rows(losses),
            None if reference is None else segments.sort_rows(reference),
        )
        for place, begin, end in segments.slices:
            often = self._shares.inclusion.get(self.weights.names[place], 1.0)
            self._signal.record_loss(
                place,
                losses[begin:end],
                share=(end - begin) * often / float(expected[place]),
                reference=None if reference is None else reference[begin:end],
            )

    def _expect_step(self, call: str) -> None:
        self._scopes.expect_closed(call)
        if self._halfway:
            raise RuntimeError(
                f"{call} after mixer.before_step(): call optimizer.step() and mixer.after_step()"
            )
        self._expect_no_validation_due()
        if not self._rows.counted:
            self._shares.check_step(self.steps_done)
        self._parameters.expect_all_of(self._optimizer)

    def _prepare(self, norm: float | None, clip_norm: float | None) -> bool:
        """Put the combined gradient into ``.grad`` and fold the step into the traces.

        Args:
            norm: of the gradient before it was clipped, where it was.
            clip_norm: to what it was.

        Returns:
            Whether there is a gradient to step along.
        """
        if self._rows.given and self._nonfinite.policy == "skip":
            # What is not finite in one process has spread to the gradients of all.
            self._rows.lost = distributed.any_rank(self._rows.lost, self._parameters.device)
        if self._averaging and not self._rows.given:
            with self._parameters.full_precision():
                self._begin_step()  # also where this process has no rows
                self._sum.share()
                distributed.broadcast_buffers(self._parameters.model)
        if not (self._sum or (self._rows.given and not self._rows.lost)):
            return False
        with self._parameters.full_precision():
            return self._combine(norm, clip_norm)

    def _combine(self, norm: float | None, clip_norm: float | None) -> bool:
        if self._rows.given:
            self._scopes.expect_gradient("batch", self.steps_done)
            combined: Gradients = [p.grad for p in self._parameters.tensors]
        else:
            combined = self._sum.gradients
            for parameter, gradient in zip(self._parameters.tensors, combined, strict=True):
                parameter.grad = gradient
        if self._clip_norm is not None:
            clip_norm = self._clip_norm
            norm = float(
                distributed.full_tensor(
                    torch.nn.utils.clip_grad_norm_(self._parameters.tensors, self._clip_norm)
                )
            )
        if norm is not None and not np.isfinite(norm):
            self._nonfinite.reject(
                "combined gradient",
                f"the norm of the combined gradient overflowed at step {self.steps_done}",
                "Lower the learning rate",
            )
            return False
        clip = 1.0 if norm is None or clip_norm is None else min(1.0, clip_norm / (norm + 1e-6))
        if self._step_begun:
            self._signal.end_step(Combined(combined, clip, norm))
        return True

    def _end_step(self) -> None:
        self._clear_step()
        self._row_counts.end_step()
        self._clock.tick()
        if self._clock.round_done and not self._due_points:
            with self._parameters.full_precision():
                if self._round_begun:  # a step of it could be taken
                    scores = self._finite_scores(None)
                    if scores is not None:
                        self._scores.add(self._clock.steps_in_round, scores)
                self._end_round(None)

    def _move_weights(self) -> RoundRecord:
        before, names = self.weights.last, self.weights.names
        scores, noise = self._scores.mean(), self._scores.standard_errors()
        # What the parts of one batch tell is for the record only: in how many parts a batch is computed must not
        # change the weights.
        known = noise if len(self._scores.points) > 1 else None
        alpha = self._outer.move(self.weights, scores, self._clock, noise=known)
        agreement.check_weights_in_sync(
            names,
            self.weights.values,
            self._losses,
            self._nonfinite,
            round_index=self._clock.round_index,
            parameters=self._parameters,
        )
        return RoundRecord(
            index=self._clock.round_index,
            first_step=self._clock.round_start,
            steps=self._clock.round_length,
            weights=before,
            scores={} if scores is None else dict(zip(names, scores.tolist(), strict=True)),
            step_size=alpha,
            new_weights=self.weights.last,
            losses=self._losses.means(),
            skipped=dict(self._nonfinite.in_round),
            noise={} if noise is None else dict(zip(names, noise.tolist(), strict=True)),
            points=len(self._scores.points),
            measured={**self._signal.summary(), **self._outer.update.summary()},
        )

    def _finite_scores(self, validation: Gradients | None) -> Vector | None:
        """The signal's scores, ``None`` where they had to be left out."""
        if not self._round_begun:  # no step of it could be taken
            return None
        scores = self._signal.scores(validation)
        wrong = [n for n, s in zip(self.weights.names, scores, strict=True) if not np.isfinite(s)]
        if not wrong:
            return scores
        self._nonfinite.reject(
            _VALIDATION,
            f"the score of {', '.join(wrong)} overflowed in round {len(self.rounds)}",
            "Lower the learning rate, shorten the horizon, or raise the curvature",
        )
        return None

    @property
    def _due_points(self) -> tuple[int, ...]:
        return self._signal.validation_points(self._clock.round_length)

    def _expect_no_validation_due(self) -> None:
        if self.validation_due:
            begun = self._shares.of(_VALIDATION)
            so_far = f" (shares that sum to {begun:g} of 1 were given)" if begun else ""
            raise RuntimeError(
                f"a validation gradient is due after step {self.steps_done}{so_far}: compute it in `with "
                "mixer.validation():` where mixer.validation_due is true, before more training"
            )

    def _expect_validation_due(self) -> None:
        if not self._signal.needs_validation:
            raise RuntimeError(
                f"{self._signal!r} needs no validation gradient; call mixer.validation() only where "
                "mixer.validation_due is true"
            )
        if not self.validation_due:
            raise RuntimeError(
                f"no validation gradient is due ({self._clock!r}); call mixer.validation() only where "
                "mixer.validation_due is true after mixer.step()"
            )

    def _clear_step(self) -> None:
        self._shares.clear()
        self._sum.clear()
        self._step_begun = False
        self._halfway = False
        self._rows = RowStep()

    def _clear_round(self) -> None:
        self._validation: WeightedSum | None = None
        self._validation_lost = False
        self._nonfinite.in_round = {}
        self._row_counts.clear()
        self._losses = LossMeans()
        self._scores = RoundScores()
        self._points_lost = 0
