"""Weights from losses alone, for those who cannot subclass ``Trainer``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from mixwell.integrations import loggers
from mixwell.integrations.datasets import Interleaved
from mixwell.simplex.constraints import Constraint, apply_constraints
from mixwell.simplex.updates import mirror_step
from mixwell.simplex.weights import Weights


class DomainLossCallback(TrainerCallback):
    """After every evaluation, domains whose loss is far above its target get more weight.

    ``w_d <- w_d exp(alpha (loss_d - target_d))``, divided by the sum, and kept within the constraints: the dynamic
    batch loading of Sheared LLaMA (Xia et al. 2024). Without targets it is the update of Group DRO (Sagawa et al.
    2020), which favors the domains with the highest loss.

    It needs no gradient and changes nothing in the training loop, so that it works with any ``Trainer``; but it
    does not know what helps another domain, nor what a validation set asks for. :class:`MixerTrainer` does::

        rows = Interleaved({"web": web, "code": code})
        trainer = Trainer(
            train_dataset=rows,
            eval_dataset={"web": web_test, "code": code_test},
            callbacks=[DomainLossCallback(rows)],
            ...
        )

    The weights are in the trainer's ``log_history`` and are taken up from there when it resumes. Its rows are then
    not the same ones, since ``Trainer`` passes over batches that are drawn anew.

    Args:
        rows: the training data, whose weights are set.
        targets: the loss that each domain should reach; 0 where it is not named.
        step_size: alpha.
        constraints: where the weights may live.

    Raises:
        ValueError: a target is of an unknown domain, or the step size is not positive.
    """

    def __init__(
        self,
        rows: Interleaved,
        *,
        targets: Mapping[str, float] | None = None,
        step_size: float = 1.0,
        constraints: Sequence[Constraint] = (),
    ) -> None:
        unknown = sorted(set(targets or {}) - set(rows.names))
        if unknown:
            raise ValueError(
                f"targets name unknown domain {unknown[0]!r}; the domains are {', '.join(rows.names)}"
            )
        if not step_size > 0:
            raise ValueError(f"the step size must be positive, got {step_size}")
        self.rows = rows
        self.weights = Weights(rows.names, rows.weights)
        """The weights of the domains: last, average, history."""
        self._targets, self._step_size, self._constraints = dict(targets or {}), step_size, tuple(constraints)
        self._losses: dict[str, float] = {}
        self._since = 0
        self._training = False

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Leave the weights alone from now on.

        Args:
            args: of the trainer.
            state: of the trainer.
            control: of the trainer.
            kwargs: not used.
        """
        self._training = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Take up the weights of a run that is resumed.

        Args:
            args: of the trainer.
            state: of the trainer.
            control: of the trainer.
            kwargs: not used.
        """
        self._since, self._training = 0, True
        names = list(loggers.named_weights(self.weights.last))
        for entry in state.log_history:
            if names[0] in entry and "step" in entry:
                self._advance([float(entry[name]) for name in names], int(entry["step"]))

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: Mapping[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Keep the loss of a domain, and move the weights as soon as all are there.

        Args:
            args: of the trainer.
            state: of the trainer; the new weights are put into its log.
            control: of the trainer.
            metrics: of one evaluation set.
            kwargs: not used.

        Raises:
            ValueError: the evaluation sets are not one for each domain, or a loss is not finite.
        """
        if not self._training:  # somebody only wants to know
            return
        known = {f"eval_{name}_loss": name for name in self.rows.names}
        found = {known[key]: float(value) for key, value in (metrics or {}).items() if key in known}
        if "eval_loss" in (metrics or {}):
            raise ValueError(
                "one evaluation set does not tell the domains apart; give one for each: eval_dataset={"
                + ", ".join(f"{name!r}: ..." for name in self.rows.names)
                + "}"
            )
        for name, loss in found.items():
            if not np.isfinite(loss):
                raise ValueError(
                    f"the loss of {name!r} is {loss} at step {state.global_step}; the weights stay"
                )
        self._losses |= found
        if set(self._losses) < set(self.rows.names):
            return
        losses = [self._losses[name] - self._targets.get(name, 0.0) for name in self.rows.names]
        log = mirror_step(self.weights.log, -np.array(losses), self._step_size)
        log = apply_constraints(self.weights.names, log, self._constraints, step_size=self._step_size)
        self._advance(np.exp(log).tolist(), state.global_step)
        state.log_history.append(
            {
                **loggers.named_weights(self.weights.last),
                **loggers.named_evaluation(self._losses),
                "step": state.global_step,
            }
        )
        self._losses = {}

    def _advance(self, weights: Sequence[float], step: int) -> None:
        self.weights.advance(np.log(np.maximum(weights, np.finfo(float).tiny)), steps=step - self._since)
        self._since = step
        self.rows.weights = self.weights.last
