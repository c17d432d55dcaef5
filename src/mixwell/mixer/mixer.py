"""The mixer: T training steps, then one update of the weights."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, Self, final

from torch import Tensor, nn
from torch.optim import Optimizer

from mixwell import distributed
from mixwell.hypergradient.parameters import Parameters
from mixwell.hypergradient.responses import unwrap_optimizer
from mixwell.mixer import state
from mixwell.mixer.batch import DomainBatch, MixtureBatch
from mixwell.mixer.gradient_collector import GradientCollector
from mixwell.mixer.nonfinite import NonFiniteGuard, NonFinitePolicy
from mixwell.mixer.optimizers import expect_one_optimizer, no_param_groups
from mixwell.mixer.properties import MixerProperties
from mixwell.mixer.recipes import METHODS
from mixwell.mixer.records import RoundRecord
from mixwell.mixer.round import RoundAccumulator
from mixwell.mixer.row_labels import RowLabels
from mixwell.mixer.scopes import BatchScope, DomainScope
from mixwell.mixer.step import StepAccumulator
from mixwell.signals import Hypergradient, Signal
from mixwell.signals.finite_draws import VALIDATION
from mixwell.signals.probes import Probes
from mixwell.simplex import horizons
from mixwell.simplex.constraints import Constraint
from mixwell.simplex.horizons import Horizon
from mixwell.simplex.rounds import RoundClock
from mixwell.simplex.updates import Update
from mixwell.simplex.weight_updater import WeightUpdater


@final
class Mixer(MixerProperties):
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

    Calls out of order, missing domains and values that are not finite raise errors that say what to do.

    A mixed batch takes one forward and backward pass, with the losses of its rows (at little cost with
    ``signal=Hypergradient(traces=ProjectedTraces())``)::

        with mixer.batch(batch) as scope:
            scope.weighted_loss(losses(model, batch.rows)).backward()
        mixer.step()

    Args:
        model: the model; its parameters' names appear in messages and state.
        optimizer: its learning rate, momentum and preconditioner are read at every step.
        budget: the number N of training steps, which the default horizon requires.
        horizon: T; a number, a rule, or ``None`` for ``ceil(sqrt(N log N) / 2)``.
        signal: the scores of the domains; ``None`` for :class:`mixwell.Hypergradient` with its defaults.
        update: how the weights move; a number is the alpha of :class:`mixwell.MirrorDescent`, ``None`` is
            ``MirrorDescent("auto")``.
        weights: initial weights, uniform by default.
        warmup: the number of first steps that are trained with the initial weights and leave no trace; the
            first round begins after them.
        clip_norm: clip the norm of the combined gradient to this before the optimizer steps.
        on_nonfinite: ``"raise"`` an error at a non-finite loss or gradient, or ``"skip"`` that contribution,
            count it and report it.
        probes: what the signal may compute on its own, for signals that need more than a step's gradients.
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
        nonfinite = NonFiniteGuard(on_nonfinite)
        expect_one_optimizer(optimizer)
        length = horizons.resolve(horizon, budget)
        clock = RoundClock(length, budget=None if budget is None else int(budget), warmup=warmup)
        updater = WeightUpdater(update, constraints)
        first = updater.initial_weights(domains, weights)
        if VALIDATION in first.names:
            raise ValueError(f"the name {VALIDATION!r} is taken in records; give that domain another one")
        self._optimizer = unwrap_optimizer(optimizer)
        self._parameters = Parameters.of(model, optimizer)
        self.signal = signal or Hypergradient()
        """The signal; ``signal.requirements`` says what it requires of the training loop."""
        self.signal.attach(self._optimizer, self._parameters, first.names, probes, nonfinite.reject)
        self._collector = GradientCollector(self._parameters, graphs=self.signal.requirements.graph)
        self._round = RoundAccumulator(first, clock, updater, self._parameters, self.signal, nonfinite)
        self.rounds: list[RoundRecord] = self._round.records
        """The records of the finished rounds."""
        self._step = StepAccumulator(self._round, self._collector, optimizer, clip_norm)

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
            horizon: T; ``"auto"`` is the T of the method's authors, ``"long"`` is ``ceil(sqrt(N log N))``.
            options: the method's settings; ``mixwell methods NAME`` lists them.
            rows: the number of rows by domain, for methods that use the domains' sizes.
            batch_rows: the rows of a training step over all domains, for methods that use it.
            step_size: alpha, for methods that descend along a hypergradient; ``"auto"`` tunes it.
            weights: initial weights; by default those of the method, or uniform.

        Raises:
            ValueError: a name or setting is wrong, a package is missing, or the method trains proxies on many
                mixtures, which only :func:`mixwell.train` and ``mixwell run`` do.

        Example:
            >>> import torch
            >>> model = torch.nn.Linear(2, 1)
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

    def __getattr__(self, name: str) -> Any:
        # scaler.step(mixer) and scaler.unscale_(mixer) ask for it.
        raise AttributeError(
            no_param_groups() if name == "param_groups" else f"Mixer has no attribute {name!r}"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        # A setting that nothing reads would be ignored in silence.
        # `mixer.rounds += ...` sets the list that is there already.
        same = self.__dict__.get(name, self) is value
        if "_step" in self.__dict__ and not (same or name.startswith("_") or hasattr(type(self), name)):
            raise AttributeError(
                f"mixer.{name} cannot be set; mixer.weights and mixer.constraints can. For other settings make a "
                "new Mixer(weights=mixer.weights.last, ...)"
            )
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        clock, update = self._round.clock, self._round.updater.update
        return f"Mixer({self.weights!r}, {clock!r}, {self.signal!r}, {update!r})"

    def domain(
        self, batch: DomainBatch | str, *, fraction: float = 1.0, rows: int | None = None
    ) -> AbstractContextManager[DomainScope]:
        """Return a block in which everything that ``.backward()`` accumulates is this domain's gradient.

        An error inside leaves the mixer as it was, so that the block can be tried again.

        Args:
            batch: a part of a loader's batch, or the name of a domain that is in every step.
            fraction: with a name, the fraction of the domain's batch in this step that is computed here. With four
                equal micro-batches (gradient accumulation) enter four times with ``fraction=1/4``; the fractions
                of a step must sum to one.
            rows: with a name, the number of rows that are computed here, for signals that measure noise.
        """
        if isinstance(batch, str):
            self.weights.index(batch)
            batch = DomainBatch(batch, None, rows, fraction=fraction)
        elif fraction != 1 or rows is not None:
            raise ValueError("fraction and rows go with the name of a domain; a DomainBatch has its own")
        return self._step.domain(batch)

    def batch(
        self, batch: MixtureBatch | RowLabels, *, expected_counts: Mapping[str, float] | None = None
    ) -> AbstractContextManager[BatchScope]:
        """Return a block for one mixed batch; inside, call ``scope.weighted_loss(losses).backward()``.

        The loss of row i, of domain d, is weighted by ``w_d / e_d``, so that one ordinary backward pass gives
        ``.grad = sum_d w_d g_d``, and the signal separates the domains by what the layers see.

        An error inside drops the step, with its earlier batches. Where gradients are in the traces already
        (:class:`mixwell.DenseTraces`, after the backward pass), later calls are refused until a state is loaded.

        Args:
            batch: a batch of a loader, or for every row the name of its domain or its number in the order of
                ``domains``.
            expected_counts: with labels, ``e_d`` by domain; by default the number of rows in this batch, so that
                every domain counts by its weight. Give the total of all batches where a step has several (gradient
                accumulation), and the expected number where domains are drawn at random: with rows drawn by the
                weights, ``{d: w_d * rows}``, the loss is the ordinary mean. With several ranks the mean of theirs.
        """
        return self._step.batch(batch, expected_counts)

    def auxiliary(self) -> AbstractContextManager[DomainScope]:
        """Return a block for a loss of no domain; its gradient is added to the combined one with weight 1.

        It is for a regularizer or a loss on other data that is trained in addition to the mixture::

            with mixer.auxiliary():
                (0.01 * penalty(model)).backward()

        Enter it after the first block of the step, as often as needed, and before :meth:`step`. The gradient does
        not depend on the weights, so it leaves no trace; it is clipped with the rest. With several micro-batches
        divide the loss by their number; with several ranks the mean over them is taken.
        """
        return self._step.auxiliary()

    def step(self) -> None:
        """Take one training step: ``.grad = sum_j w_j g_j``, clipped if set, then ``optimizer.step()``.

        The parameters have no gradients afterwards.
        """
        self._step.take()

    def before_step(self, *, norm: float | Tensor | None = None, clip_norm: float | None = None) -> None:
        """Do the first half of :meth:`step`, for a trainer that calls ``optimizer.step()`` itself, right after it.

        Call it when all of the step's gradients are there, and :meth:`after_step` after the optimizer. A step that
        had to be skipped has no gradients then, so that the optimizer does nothing.

        Args:
            norm: the norm of the combined gradient before the trainer clipped it to ``clip_norm``, if it did.
        """
        self._step.prepare(norm=norm, clip_norm=clip_norm)

    def after_step(self) -> None:
        """Do the second half of :meth:`step`; see :meth:`before_step`."""
        self._step.finish()

    def validation(
        self, *, fraction: float = 1.0, rank_scale: float = 1.0
    ) -> AbstractContextManager[DomainScope]:
        """Return a block in which everything that ``.backward()`` accumulates is the validation gradient.

        Call it where :attr:`validation_due` says so. At the end of a round the weights are updated with it, and
        the next round begins; :attr:`rounds` has the record. The model's buffers (running statistics of BatchNorm)
        are restored afterwards.

        Args:
            fraction: the fraction of the validation batch that is computed here; fractions must sum to one.
            rank_scale: the rows of this rank over the mean of all ranks. Where it is not 1, call
                ``scope.scaled_loss(loss).backward()``.
        """
        part = DomainBatch(VALIDATION, fraction=fraction, rank_scale=rank_scale)
        return self._round.validation(part, self._collector)

    def state_dict(self, *, forget_step: bool = False) -> state.State:
        """Return everything that a resumed run needs, as plain values and tensors; also in the middle of a round.

        With several ranks it is the state of this one, with traces of its own rows; :meth:`save` writes all.

        Args:
            forget_step: whether a step that was begun may be left out, as if it had not been. It is an error where
                its gradients are in the traces already (:class:`mixwell.DenseTraces`).

        Returns:
            A state for :meth:`load_state_dict`. Its tensors are the live ones; save or copy it before training on.
        """
        self._step.expect_between_steps("mixer.state_dict()", forget_step=forget_step)
        return state.capture(self._round, self._step.clip_norm)

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue where another mixer stopped, bit for bit. A step that was begun is forgotten.

        Args:
            saved: what :meth:`state_dict` returned, of a mixer with the same settings.

        Raises:
            ValueError: it is of another version or another run; nothing is changed.
        """
        self._collector.expect_closed("mixer.load_state_dict()")
        state.restore(saved, self._round, self._step.clip_norm)
        self._step.clear()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write :meth:`state_dict` to a file, atomically. With several ranks all must call it.

        Args:
            path: one safetensors file; with several ranks a folder, which ``torch.distributed.checkpoint`` fills,
                and from which any number of ranks can resume.
        """
        write = state.write_file if distributed.is_single_process() else state.write_folder
        write(path, self.state_dict())

    def load(self, path: str | os.PathLike[str]) -> None:
        """Continue from what :meth:`save` wrote. No code from it is run. With several ranks all must call it.

        Args:
            path: a file or a folder, whatever the number of ranks that wrote it.
        """
        here = state.capture(self._round, self._step.clip_norm)
        self.load_state_dict(state.read(path, like=here["tensors"]))
