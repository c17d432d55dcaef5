"""The mixer: T training steps, then one update of the weights."""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Literal, Self, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mixwell import distributed
from mixwell.hypergradient.capture.hooks import CaptureContext
from mixwell.hypergradient.capture.row_groups import RowGroups
from mixwell.hypergradient.parameters import Parameters
from mixwell.hypergradient.responses import unwrap_optimizer
from mixwell.mixer import state
from mixwell.mixer.batch import DomainBatch, MixtureBatch, RowLabels, domain_numbers, resolve_expected
from mixwell.mixer.collection import GradientCollector
from mixwell.mixer.nonfinite import NonFiniteGuard, NonFinitePolicy
from mixwell.mixer.recipes import METHODS
from mixwell.mixer.records import RoundRecord
from mixwell.mixer.round import RoundAccumulator
from mixwell.mixer.row_counts import RowCounts, count_inputs
from mixwell.mixer.scopes import BatchScope, DomainScope
from mixwell.mixer.step import VALIDATION, StepAccumulator
from mixwell.signals import Hypergradient, Signal
from mixwell.signals.probes import Probes
from mixwell.simplex import horizons, rounds
from mixwell.simplex.constraints import Constraint
from mixwell.simplex.horizons import Horizon
from mixwell.simplex.rounds import RoundClock
from mixwell.simplex.updates import Update
from mixwell.simplex.weight_updater import WeightUpdater
from mixwell.typing import Gradients

# Losses of rows are weighted by no less, so that a domain's gradient can be recovered from the weighted one.
_LEAST_WEIGHT = 1e-20


@final
class Mixer:
    """Learns the weights of the domains while an optimizer trains a model.

    Put it around a training loop::

        loader = MixtureLoader({"web": web, "code": code}, batch_size=64)
        mixer = Mixer(model, optimizer, domains=["web", "code"], budget=20_000)
        for batch in loader.follow(mixer):
            for part in batch.by_domain():
                with mixer.domain(part):
                    loss(model, part.rows).backward()
            mixer.step()                                 # replaces optimizer.step()
            if mixer.validation_due:
                with mixer.validation():
                    loss(model, next(validation)).backward()
        mixer.weights.average

    Every T steps (a round) the weights take one step against the signal (Algorithms 1 to 3 of the paper), with the
    validation gradient that is due at the end of the round, or with the last training step where the signal needs
    none.

    A mixed batch takes one forward and backward pass, with the losses of its rows (at little cost with
    ``signal=Hypergradient(traces=ProjectedTraces())``)::

        with mixer.batch(batch) as scope:
            scope.weighted_loss(losses(model, batch.rows)).backward()
        mixer.step()

    Args:
        model: the model; its parameters' names appear in messages and state.
        optimizer: its learning rate, momentum and preconditioner are read at every step.
        domains: the names of the domains.
        budget: the number N of training steps, which the default horizon requires.
        horizon: T; a number, a rule, or ``None`` for ``ceil(sqrt(N log N) / 2)``.
        signal: the scores of the domains; ``None`` for :class:`mixwell.Hypergradient` with its defaults.
        update: how the weights move; a number is the alpha of :class:`mixwell.MirrorDescent`, ``None`` is
            ``MirrorDescent("auto")``.
        constraints: the set that the weights stay in.
        weights: initial weights, uniform by default.
        warmup: the number of first steps that are trained with the initial weights and leave no trace; the
            first round begins after them.
        clip_norm: clip the norm of the combined gradient to this before the optimizer steps.
        on_nonfinite: ``"raise"`` an error at a non-finite loss or gradient, or ``"skip"`` that contribution,
            count it and report it.
        probes: what the signal may compute on its own, for signals that need more than a step's gradients.

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
        on_nonfinite: NonFinitePolicy = "raise",
        probes: Probes | None = None,
    ) -> None:
        self._nonfinite = NonFiniteGuard(on_nonfinite)
        if clip_norm is not None and not (np.isfinite(clip_norm) and clip_norm > 0):
            raise ValueError(f"clip_norm must be positive and finite, got {clip_norm}")
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ValueError(
                "LBFGS evaluates the loss within a step, so it cannot be mixed; use SGD or AdamW"
            )
        length = horizons.resolve(horizon, budget)
        self._clock = RoundClock(length, budget=None if budget is None else int(budget), warmup=warmup)
        self._outer = WeightUpdater(update, constraints)
        self.weights = self._outer.initial_weights(domains, weights)
        names = self.weights.names
        if VALIDATION in names:
            raise ValueError(f"the name {VALIDATION!r} is taken in records; give that domain another one")
        self._clip_norm = None if clip_norm is None else float(clip_norm)
        self._stepped = optimizer
        self._optimizer = unwrap_optimizer(optimizer)
        self._model = model
        self._parameters = Parameters.of(model, optimizer)
        self._signal = signal or Hypergradient()
        self._signal.attach(self._optimizer, self._parameters, names, probes)
        self.rounds: list[RoundRecord] = []
        """The records of the finished rounds."""
        # Gradients of domains are averaged over ranks when they are combined: once, and not for each.
        self._averaging = distributed.is_ddp(model)
        parts = names, self._parameters, self._signal, self._nonfinite
        self._step = StepAccumulator(*parts, averaged=self._averaging)
        self._round = RoundAccumulator(*parts, averaged=self._averaging)
        self._collector = GradientCollector(self._parameters, graphs=self._signal.requirements.graph)
        self._row_counts = RowCounts(names)

    @classmethod
    def from_method(
        cls,
        method: str,
        model: nn.Module,
        optimizer: Optimizer,
        domains: Sequence[str],
        *,
        budget: int,
        horizon: int | Literal["auto", "long"] = "auto",
        options: Mapping[str, Any] | None = None,
        rows: Mapping[str, int] | None = None,
        batch_rows: int = 0,
        step_size: float | Literal["auto"] = "auto",
        seed: int = 0,
        constraints: Sequence[Constraint] = (),
        weights: Mapping[str, float] | Sequence[float] | None = None,
        warmup: int = 0,
        clip_norm: float | None = None,
        on_nonfinite: NonFinitePolicy = "raise",
        probes: Probes | None = None,
    ) -> Self:
        """Return a mixer with the signal, update and constraints of a named method.

        With ``doge`` and ``doremi`` they are the rule by which their proxies learn. Methods that compute outside
        of the training step also need ``probes``, those that use losses ``scope.record_loss(loss)``, and those
        that weight rows ``scope.weighted_loss(losses, data=rows)``.

        Args:
            method: its name; ``mixwell methods`` lists them.
            model: as for :class:`Mixer`, like all arguments that are not named here.
            optimizer: trains it.
            domains: the names of the domains.
            budget: N, training steps of the run.
            horizon: T; ``"auto"`` is the T of the method's authors, ``"long"`` is ``ceil(sqrt(N log N))``.
            options: the method's settings; ``mixwell methods NAME`` lists them.
            rows: the number of rows by domain, for methods that use the domains' sizes.
            batch_rows: the rows of a training step over all domains, for methods that use it.
            step_size: alpha, for methods that descend along a hypergradient; ``"auto"`` tunes it.
            seed: of the method's random numbers.
            weights: initial weights; by default those of the method, or uniform.

        Raises:
            ValueError: a name or setting is wrong, a package is missing, or the method trains proxies on many
                mixtures, which only :func:`mixwell.train` and ``mixwell run`` do.

        Example:
            >>> model = nn.Linear(2, 1)
            >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            >>> mixer = Mixer.from_method("doge", model, optimizer, ["web", "code"], budget=100, horizon="long")
            >>> mixer.horizon
            22
        """
        found = METHODS.get(method)
        recipe = found.loop_recipe(
            domains,
            budget=budget,
            horizon=horizon,
            options=options or {},
            rows=rows or {},
            batch_rows=batch_rows,
            warmup=warmup,
            step_size=step_size,
            seed=seed,
        )
        return cls(
            model,
            optimizer,
            domains,
            budget=budget,
            horizon=found.round_length(horizon, budget),
            signal=recipe.signal,
            update=recipe.update,
            constraints=[*constraints, *recipe.constraints],
            weights=recipe.weights if weights is None else weights,
            warmup=warmup,
            clip_norm=clip_norm,
            on_nonfinite=on_nonfinite,
            probes=probes,
        )

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
        done, due = self._round.points_done, self._due_points
        return done < len(due) and self._clock.steps_in_round == due[done]

    def validation_rows(self, batch_rows: int) -> int:
        """Return the number of rows of a validation batch with which those of a round take 5% of its training.

        Args:
            batch_rows: the rows of a training step, all domains together.

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
        """The number of steps until the weights may change, so that batches may be drawn ahead."""
        return self._clock.remaining

    @property
    def limits(self) -> dict[str, tuple[float, float]]:
        """The least and the greatest weight that the constraints allow each domain, as of the last update."""
        return self._outer.limits(self.weights.names)

    @property
    def requires_equal_forward_passes(self) -> bool:
        """Whether all ranks must run the model equally often, since each has parts of it (``fully_shard``)."""
        return self._parameters.sharded

    @property
    def needs_validation(self) -> bool:
        """Whether the signal needs validation gradients; where not, none is ever due."""
        return self._signal.requirements.validation

    @property
    def needs_graph(self) -> bool:
        """Whether domains need ``backward(create_graph=True)``, as exact Hessian products do."""
        return self._signal.requirements.graph

    @property
    def signal(self) -> Signal:
        """The signal; its properties say what it needs."""
        return self._signal

    @property
    def nbytes(self) -> int:
        """The memory in bytes that mixing holds in addition to plain training: traces and weighted sum."""
        return self._signal.nbytes + self._step.sum.nbytes

    @property
    def skipped(self) -> dict[str, int]:
        """The number of non-finite contributions that were skipped so far, by domain, where there were any."""
        return dict(self._nonfinite.total)

    # ------------------------------------------------------------------------------------------- training

    @contextmanager
    def domain(
        self, batch: DomainBatch | str, *, fraction: float = 1.0, rows: int | None = None
    ) -> Generator[DomainScope]:
        """Everything that ``.backward()`` accumulates inside is this domain's gradient.

        Args:
            batch: a part of a loader's batch, or the name of a domain that is in every step.
            fraction: with a name, the fraction of the domain's batch in this step that is computed here. With four
                equal micro-batches (gradient accumulation) enter four times with ``fraction=1/4``; the fractions
                of a step must sum to one.
            rows: with a name, the number of rows that are computed here, for signals that measure noise.

        Yields:
            A scope, which records the loss.

        Raises:
            ValueError: the domain is unknown or given twice, its gradient is missing or not finite, or the signal
                needs losses that were not recorded.
            RuntimeError: the calls are out of order.
        """
        if isinstance(batch, str):
            self.weights.index(batch)
            batch = DomainBatch(batch, None, rows, fraction=fraction)
        elif fraction != 1 or rows is not None:
            raise ValueError("fraction and rows go with the name of a domain; a DomainBatch has its own")
        name, index = batch.domain, self.weights.index(batch.domain)
        self._expect_no_validation_due()
        self._step.expect(batch, self.steps_done)
        counting = batch.count is None and self._row_counts.wanted
        counter = count_inputs(self._model) if counting else nullcontext([batch.count or 0])
        with counter as counted, self._collector.collect(batch, self.steps_done) as scope:
            yield scope
        # Inputs of length 1 are as likely packed sequences, where rows are not seen.
        if not (counting and set(counted) == {1}):
            self._row_counts.add(index, sum(counted))
        with self._parameters.full_precision():
            if self._accept(scope):
                self._expect_recorded(name, scope)
                self._begin_step()
                self._step.add_domain(index, scope, float(self.weights.values[index]))
                self._round.losses.add(name, scope.loss, batch.fraction * batch.rank_scale)
            scope.gradients = []  # so that a kept scope does not keep its gradient alive
        self._step.give(batch)

    @contextmanager
    def batch(
        self, batch: MixtureBatch | RowLabels, *, expected_counts: Mapping[str, float] | None = None
    ) -> Generator[BatchScope]:
        """One mixed batch; inside, call ``scope.weighted_loss(losses).backward()`` with the losses of its rows.

        The loss of row i, of domain d, is weighted by ``w_d / e_d``, so that one ordinary backward pass gives
        ``.grad = sum_d w_d g_d``, and the signal separates the domains by what the layers see.

        Args:
            batch: a batch of a loader, or for every row the name of its domain or its number in the order of
                ``domains``.
            expected_counts: with labels, ``e_d`` by domain; by default the number of rows in this batch, so that
                every domain counts by its weight. Give the total of all batches where a step has several (gradient
                accumulation), and the expected number where domains are drawn at random: with rows drawn by the
                weights, ``{d: w_d * rows}``, the loss is the ordinary mean. With several ranks the mean of theirs.

        Yields:
            A scope, which weights the losses.

        Raises:
            ValueError: a label is wrong or a domain is given twice, a loss or gradient is missing or not finite,
                or the signal needs one batch per domain.
            RuntimeError: the calls are out of order.
        """
        self._expect_no_validation_due()
        names, known = self.weights.names, None
        if isinstance(batch, MixtureBatch):
            if expected_counts is not None:
                raise ValueError("expected_counts goes with labels; a MixtureBatch has its own")
            known, expected_counts = batch, batch.expected_counts
            places = np.array([self.weights.index(name) for name in batch.names])
            numbers = places[domain_numbers(batch.labels, batch.names)]
        else:
            numbers = domain_numbers(batch, names)
        groups, counted = RowGroups(numbers, len(names)), expected_counts is not None
        expected = resolve_expected(groups.counts, names, expected_counts)
        present = [index for index, _, _ in groups.slices]
        self._step.expect_batch(known, present, self.steps_done, counted=counted)
        weights = np.maximum(self.weights.values, _LEAST_WEIGHT)
        capture = (
            self._signal.capture(groups, weights) if self._begin_step() else nullcontext(CaptureContext())
        )
        first, self._step.mixed = not self._step.mixed, True
        try:
            with self._collector.accumulate("batch", self.steps_done, first=first), capture as context:
                scope = BatchScope(groups, expected, weights, context, self._signal)
                yield scope
        except BaseException:
            self._step.clear()  # including what earlier batches of the step left
            raise
        for index in present:
            self._row_counts.add(index, int(groups.counts[index]))
        for name, mean, part in self._step.add_batch(scope, known, self.steps_done):
            self._round.losses.add(name, mean, part)
        self._step.give_batch(known, present, counted=counted)

    def step(self) -> None:
        """Take one training step: ``.grad = sum_j w_j g_j``, clipped if set, then ``optimizer.step()``.

        The parameters have no gradients afterwards.

        Raises:
            RuntimeError: a validation gradient is due, or a ``mixer.domain`` is still open.
            ValueError: a domain is missing, or its fractions do not sum to one.
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
        """Do the first half of :meth:`step`, for a trainer that calls ``optimizer.step()`` itself, right after it.

        Call it when all of the step's gradients are there, and :meth:`after_step` after the optimizer::

            mixer.before_step()
            optimizer.step()
            mixer.after_step()

        A step that had to be skipped has no gradients then, so that the optimizer does nothing.

        Args:
            norm: the norm of the combined gradient before the trainer clipped it, if it did.

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
        self._step.prepared = True

    def after_step(self) -> None:
        """Do the second half of :meth:`step`; see :meth:`before_step`.

        Raises:
            RuntimeError: there was no :meth:`before_step`.
        """
        if not self._step.prepared:
            raise RuntimeError(
                "mixer.after_step() without mixer.before_step(): call it before optimizer.step()"
            )
        self._parameters.clear_gradients()
        self._end_step()

    @contextmanager
    def validation(self, *, fraction: float = 1.0, rank_scale: float = 1.0) -> Generator[DomainScope]:
        """Everything that ``.backward()`` accumulates inside is the validation gradient at the current parameters.

        Call it where :attr:`validation_due` says so. At the end of a round the weights are updated with it, and
        the next round begins; :attr:`rounds` has the record. The model's buffers (running statistics of BatchNorm)
        are restored afterwards.

        Args:
            fraction: the fraction of the validation batch that is computed here; fractions must sum to one.
            rank_scale: the rows of this rank over the mean of all ranks. Where it is not 1, call
                ``scope.scaled_loss(loss).backward()``.

        Yields:
            A scope, which records the loss.

        Raises:
            ValueError: the fractions exceed one, or there is no gradient.
            RuntimeError: no validation gradient is due, or another rank has other weights.
        """
        self._expect_validation_due()
        part = DomainBatch(VALIDATION, fraction=fraction, rank_scale=rank_scale)
        self._step.expect(part, self.steps_done)
        with self._parameters.buffers_kept(), self._collector.collect(part, self.steps_done) as scope:
            yield scope
        with self._parameters.full_precision():
            only = len(self._due_points) == 1
            self._round.add_validation(scope, accepted=self._accept(scope), only_point=only)
            scope.gradients = []
            self._step.give(part)
            if self._step.complete(VALIDATION):
                validation = self._round.end_point(self._clock.steps_in_round, len(self.rounds))
                self._step.clear()
                if self._clock.round_done:
                    self._end_round(validation)

    # ------------------------------------------------------------------------------------------- state

    def state_dict(self, *, forget_step: bool = False) -> state.State:
        """Return everything that a resumed run needs, as plain values and tensors; also in the middle of a round.

        With several ranks it is the state of this one: traces are of its own rows. :meth:`save` writes those of
        all.

        Args:
            forget_step: whether a step that was begun may be left out, as if it had not been.

        Returns:
            A state for :meth:`load_state_dict`. Its tensors are the live ones; save or copy it before training on.

        Raises:
            RuntimeError: in the middle of a step.
        """
        self._collector.expect_closed("mixer.state_dict()")
        if self._step and not forget_step:
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
                "rounds": [record.to_json() for record in self.rounds],
                "skipped": dict(self._nonfinite.total),
                "skipped_in_round": dict(self._nonfinite.in_round),
                **self._round.state(),
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
        self._collector.expect_closed("mixer.load_state_dict()")
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
        self.rounds = [RoundRecord(**record) for record in values["rounds"]]
        self._step.clear()
        self._row_counts.clear()
        self._round.load_state(values)
        self._nonfinite.total = dict(values["skipped"])
        self._nonfinite.in_round = dict(values["skipped_in_round"])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write :meth:`state_dict` to a file, atomically. With several ranks all must call it.

        Args:
            path: one safetensors file; with several ranks a folder, which ``torch.distributed.checkpoint`` fills,
                and from which any number of ranks can resume.
        """
        (state.write if distributed.is_single_process() else state.write_all)(path, self.state_dict())

    def load(self, path: str | os.PathLike[str]) -> None:
        """Continue from what :meth:`save` wrote. No code from it is run. With several ranks all must call it.

        Args:
            path: a file or a folder, whatever the number of ranks that wrote it.
        """
        self.load_state_dict(state.read(path, like=self._state()["tensors"]))

    # ------------------------------------------------------------------------------------------- inside

    def _accept(self, scope: DomainScope) -> bool:
        return self._nonfinite.accept(
            scope.batch.domain, self.steps_done, self._parameters, scope.gradients, scope.loss
        )

    def _begin_round(self, validation: Gradients | None) -> None:
        self._signal.begin_round(self._clock.round_index, self.weights.values, validation)
        self._round.begun = True

    def _begin_step(self) -> bool:
        """Return whether the step belongs to a round; the signal then knows that it has begun."""
        if not self._clock.in_round:
            return False
        if not self._round.begun:
            self._begin_round(None)
        if not self._step.traced:
            self._signal.begin_step(remaining=self._clock.remaining)
            self._step.traced = True
        return True

    def _prepare(self, norm: float | None, clip_norm: float | None) -> bool:
        """Combine the gradients of the step and fold it into the traces; return whether there is a gradient."""
        if self._averaging and not self._step.mixed:
            with self._parameters.full_precision():
                self._begin_step()  # also where this rank has no rows
        if not self._step.reduce():
            return False
        if self._step.mixed:
            self._collector.expect_gradient("batch", self.steps_done)
        with self._parameters.full_precision():
            return self._step.combine(
                self.steps_done, own_clip=self._clip_norm, norm=norm, clip_norm=clip_norm
            )

    def _end_step(self) -> None:
        self._step.clear()
        self._row_counts.end_step()
        self._clock.tick()
        if self._clock.round_done and not self._due_points:
            with self._parameters.full_precision():
                self._round.add_scores(self._clock.steps_in_round, None, len(self.rounds))
                self._end_round(None)

    def _end_round(self, validation: Gradients | None) -> None:
        """Update the weights and begin the next round."""
        self._row_counts.check(self.weights.values)
        self.rounds.append(self._move_weights())
        self._step.clear()
        self._round.clear()
        self._row_counts.clear()
        self._clock.next_round()
        self._round.begun = False
        if not self._clock.finished:
            self._begin_round(validation)

    def _move_weights(self) -> RoundRecord:
        before, names, points = self.weights.last, self.weights.names, self._round.scores
        scores, noise = points.mean(), points.standard_errors()
        # The noise estimated from the parts of one batch is for the record only: the number of parts in which a
        # batch is computed must not change the weights.
        known = noise if len(points.points) > 1 else None
        alpha = self._outer.apply(self.weights, scores, self._clock, noise=known)
        self._round.sync(self.weights.values, self._clock.round_index)
        return RoundRecord(
            index=self._clock.round_index,
            first_step=self._clock.round_start,
            steps=self._clock.round_length,
            weights=before,
            scores={} if scores is None else dict(zip(names, scores.tolist(), strict=True)),
            step_size=alpha,
            new_weights=self.weights.last,
            losses=self._round.losses.means(),
            skipped=dict(self._nonfinite.in_round),
            noise={} if noise is None else dict(zip(names, noise.tolist(), strict=True)),
            points=len(points.points),
            measured={**self._signal.summary(), **self._outer.update.summary()},
        )

    @property
    def _due_points(self) -> tuple[int, ...]:
        return self._signal.validation_points(self._clock.round_length)

    # ------------------------------------------------------------------------------------------- misuse

    def _expect_step(self, call: str) -> None:
        self._collector.expect_closed(call)
        if self._step.prepared:
            raise RuntimeError(
                f"{call} after mixer.before_step(): call optimizer.step() and mixer.after_step()"
            )
        self._expect_no_validation_due()
        self._step.expect_complete(self.steps_done)
        self._parameters.expect_all_of(self._optimizer)

    def _expect_recorded(self, name: str, scope: DomainScope) -> None:
        if self._signal.requirements.losses and not scope.losses:
            raise ValueError(
                f"{self._signal!r} requires the losses: call scope.record_loss(loss) in `with "
                f"mixer.domain({name!r}) as scope:`"
            )
        if self._signal.requirements.reference and any(other is None for _, other in scope.losses):
            raise ValueError(
                f"{self._signal!r} needs the losses of a reference model: scope.record_loss(losses, reference=...)"
            )

    def _expect_no_validation_due(self) -> None:
        if self.validation_due:
            begun = self._step.fraction(VALIDATION)
            so_far = f" (fractions that sum to {begun:g} of 1 were given)" if begun else ""
            raise RuntimeError(
                f"a validation gradient is due after step {self.steps_done}{so_far}: compute it in `with "
                "mixer.validation():` where mixer.validation_due is true, before more training"
            )

    def _expect_validation_due(self) -> None:
        if not self._signal.requirements.validation:
            raise RuntimeError(
                f"{self._signal!r} needs no validation gradient; call mixer.validation() only where "
                "mixer.validation_due is true"
            )
        if not self.validation_due:
            raise RuntimeError(
                f"no validation gradient is due ({self._clock!r}); call mixer.validation() only where "
                "mixer.validation_due is true after mixer.step()"
            )
