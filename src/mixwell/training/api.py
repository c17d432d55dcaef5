"""A run from Python, with models and data that are in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import nn

from mixwell.data.datasets import IndexedDataset, as_rows
from mixwell.training import config_io
from mixwell.training.logging.base import Logger
from mixwell.training.models import inputs
from mixwell.training.models.base import Trainable
from mixwell.training.run import CONFIG, Run
from mixwell.training.trainer import Trainer
from mixwell.training.unread import describe_unread
from mixwell.typing import LossFn
from mixwell.utils.user_warnings import warn_user


def train(
    domains: Mapping[str, Any],
    validation: Any = None,
    *,
    out: str | Path,
    model: nn.Module | Mapping[str, Any] | None = None,
    loss: LossFn | None = None,
    row_losses: LossFn | None = None,
    context: int | None = None,
    test: Any = None,
    resume: bool = False,
    quiet: bool = False,
    loggers: Mapping[str, Any] | Sequence[Logger] = (),
    **options: Any,
) -> Trainer:
    """Train a model and learn the mixture of its domains, in a run directory, as ``mixwell run`` does.

    Args:
        domains: by name a PyTorch dataset, a tensor, a tuple of tensors, or what a config file would say (a path,
            or a mapping such as ``{"jsonl": "data.jsonl", "field": "body"}``).
        validation: the same, of the validation set; ``None`` for methods that need none.
        model: the model, or what a config file would say of one; by default a small GPT.
        loss: ``loss(model, batch)``, the mean over the batch; needed with a model object.
        row_losses: ``row_losses(model, batch)``, the loss of every row, which ``mixer={"traces": "projected"}``
            needs with a model object.
        context: tokens of a row, where a model object is trained on text.
        test: the same as ``validation``, of rows that nothing is learned from.
        resume: continue the run in ``out`` if there is one. The same model and data must be given.
        loggers: what a config file would say (``{"tensorboard": True, "wandb": {"project": "mixtures"}}``), or
            loggers of :mod:`mixwell.integrations.loggers` that are open already, and stay open.
        options: further settings of a config file, such as ``steps=1000`` or ``batch={"rows": 64}``.

    Returns:
        The trainer: ``.model`` is trained, ``.mixer.weights`` are the weights.

    Example:
        >>> import tempfile, torch
        >>> rows = {name: (torch.randn(64, 3), torch.randint(2, (64,))) for name in ("a", "b", "validation")}
        >>> validation = rows.pop("validation")
        >>> loss = lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     done = train(rows, validation, model=torch.nn.Linear(3, 2), loss=loss, out=folder + "/run",
        ...                  steps=20, quiet=True)
        >>> sorted(done.mixer.weights.last), done.steps_done
        (['a', 'b'], 20)
    """
    given: dict[str, IndexedDataset] = {}

    def described(key: str, data: Any) -> Any:
        if isinstance(data, str | Path):
            return str(data)
        if isinstance(data, Mapping) or (
            isinstance(data, list) and all(isinstance(one, str) for one in data)
        ):
            return data
        try:
            given[key] = as_rows(data)
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from error
        return {"given": type(data).__name__}

    own = isinstance(model, nn.Module)
    if own != (loss is not None):
        raise ValueError("a model and its loss belong together: give both, or neither for a built-in model")
    if row_losses is not None and not own:
        raise ValueError("row_losses is for a model object; the built-in ones have theirs")
    if context is not None and not own:
        raise ValueError("context is for a model object; for others it is a setting, model={'context': 256}")
    plain: dict[str, Any] = {
        "domains": {name: described(f"domains.{name}", one) for name, one in domains.items()},
        **options,
        "base": str(Path(options.get("base", ".")).resolve()),
    }
    for key, rows in (("validation", validation), ("test", test)):
        if rows is not None:
            plain[key] = described(key, rows)
    trainable = None
    if isinstance(model, nn.Module) and loss is not None:
        plain["model"] = {"kind": "given", "name": type(model).__name__, "context": context}
        each = row_losses and inputs.user_loss(row_losses, each=True, name="row_losses")
        mean = inputs.user_loss(loss, each=False, name="loss")
        trainable = Trainable(model, mean, context, row_losses=each)
    elif model is not None:
        plain["model"] = model
    own_loggers: Sequence[Logger] = ()
    if isinstance(loggers, Mapping):
        plain["loggers"] = loggers
    else:
        own_loggers = loggers
    config = config_io.validate_config(plain, where="mixwell.train")
    unread = describe_unread(config)
    if unread is not None:
        warn_user(unread)
    console = Console(quiet=quiet)
    run = Run(config, Path(out), console=console, trainable=trainable, given=given, loggers=own_loggers)
    if resume and (Path(out) / CONFIG).exists():
        return run.resume()
    return run.start()
