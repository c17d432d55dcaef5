"""Where the loop of ``Trainer`` calls a ``MixerTrainer``, and how its logs are displayed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PrinterCallback, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ProgressCallback
from typing_extensions import override

from mixwell.integrations import loggers
from mixwell.training.logging.names import PREFIX

if TYPE_CHECKING:
    from mixwell.integrations.transformers.trainer import MixerTrainer

SHOWN = 6
"""The number of domains in a displayed log."""


class MixingCallback(TrainerCallback):
    """Calls the trainer back where its loop has places for it."""

    def __init__(self, trainer: MixerTrainer) -> None:
        self._trainer = trainer

    @override
    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._trainer.begin_mixing()

    @override
    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self._trainer.before_step()

    @override
    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        self._trainer.mixer.after_step()

    @override
    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        mixer = self._trainer.mixer
        if mixer.validation_due:
            self._trainer.validate()
        record, due = mixer.round_ended, control.should_log
        if record is not None and args.logging_strategy != "no":
            self._trainer.log(loggers.named(record))
            control.should_log = due  # logging takes it for done

    @override
    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if not args.save_only_model:
            self._trainer.save_mixing(Path(str(args.output_dir), f"checkpoint-{state.global_step}"))

    @override
    def on_train_end(self, args: TrainingArguments, *_: Any, **__: Any) -> None:
        self._trainer.save_mixture(Path(str(args.output_dir)))


class FoldedPrinterCallback(PrinterCallback):
    """Prints logs with one entry for each kind of number, of the heaviest domains."""

    @override
    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        super().on_log(args, state, control, logs=fold_domains(logs or {}), **kwargs)


class FoldedProgressCallback(ProgressCallback):
    """Writes logs over the progress bar as :class:`FoldedPrinterCallback` does."""

    @override
    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        super().on_log(args, state, control, logs=fold_domains(logs or {}), **kwargs)


def fold_domains(logs: Mapping[str, Any], shown: int = SHOWN) -> dict[str, Any]:
    """Return logs for display, with one entry for each kind of number in place of one for each domain.

    Args:
        logs: with ``mixwell/<kind>/<domain>``, which remain as they are in ``state.log_history``.
        shown: the number of domains; those with the greatest weights are displayed.

    Example:
        >>> logs = {"loss": 2.0, "mixwell/weight/a": 0.2, "mixwell/weight/b": 0.5, "mixwell/weight/c": 0.3}
        >>> fold_domains(logs, shown=2)
        {'loss': 2.0, 'mixwell/weight': {'b': 0.5, 'c': 0.3, '(1 more)': 0.2}}
    """
    folded: dict[str, Any] = {}
    kinds: dict[str, dict[str, float]] = {}
    for name, value in logs.items():
        parts = name.split("/", 2)  # the name of a domain may have slashes
        if parts[0] == PREFIX and len(parts) == 3:
            kind = folded.setdefault(f"{PREFIX}/{parts[1]}", kinds.setdefault(parts[1], {}))
            kind[parts[2]] = value
        else:
            folded[name] = value
    weights = kinds.get("weight", {})
    heaviest = sorted(weights, key=lambda name: -weights[name])
    for kind, values in kinds.items():
        # Entries that are not of domains, such as loss/validation, are always displayed.
        order = [name for name in heaviest if name in values]
        kept: dict[str, Any] = {name: _rounded(values[name]) for name in order[:shown]}
        hidden = order[shown:]
        if hidden:
            rest = sum(values[name] for name in hidden)
            kept[f"({len(hidden)} more)"] = _rounded(rest) if kind == "weight" else "..."
        others = {name: _rounded(value) for name, value in values.items() if name not in weights}
        folded[f"{PREFIX}/{kind}"] = {**kept, **others}
    return folded


def _rounded(value: float) -> Any:
    return float(f"{value:.4g}")
