"""Models that Python code makes: a function named by the config, or an object passed to :func:`mixwell.train`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast, final

from pydantic import Field
from torch import nn
from typing_extensions import override

from mixwell.training.models import inputs
from mixwell.training.models.base import MODELS, ModelConfig, Trainable
from mixwell.utils.entry_points import call_entry_point
from mixwell.utils.sections import Whole


@final
@MODELS.register("python")
class PythonModelConfig(ModelConfig):
    """A model that a Python function makes."""

    kind: str = "python"
    entry: str
    """`module:function`; it is called with `arguments` and returns the model, its loss function
    `loss(model, batch)`, the mean over the batch, and (for `projected` traces) one for every row."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function."""
    context: Whole | None = None
    """Tokens of a row, where the domains are text."""
    vocabulary: Whole | None = None
    """The number of tokens, where they are not text (`tokens`) and it should be checked."""

    @override
    def build(self, *, base: Path, vocabulary: int) -> Trainable:
        made: Any = call_entry_point(self.entry, self.arguments, base=base, key="model.entry")
        parts: list[Any] = list(cast("tuple[Any, ...]", made)) if isinstance(made, tuple) else []
        if (
            len(parts) not in (2, 3)
            or not isinstance(parts[0], nn.Module)
            or not all(map(callable, parts[1:]))
        ):
            raise ValueError(
                f"model.entry: {self.entry} must return (model, loss) with a torch.nn.Module and a function "
                "loss(model, batch), or (model, loss, row_losses) with one that gives the loss of every row; got "
                f"{type(made).__name__}"
            )
        model, loss, *more = parts
        if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
            raise ValueError(f"model.entry: the model of {self.entry} is on the meta device; give it values")
        row_losses = inputs.user_loss(more[0], each=True, name="row_losses") if more else None
        loss = inputs.user_loss(loss, each=False, name="loss")
        return Trainable(model, loss, self.context, self.vocabulary, row_losses)


@final
@MODELS.register("given")
class GivenModelConfig(ModelConfig):
    """A model object that was passed to `mixwell.train`."""

    kind: str = "given"
    name: str
    """The name of its class."""
    context: Whole | None = None
    """Tokens of a row, where the domains are text."""

    @override
    def build(self, *, base: Path, vocabulary: int) -> Trainable:
        raise ValueError(
            f"the model ({self.name}) was passed to mixwell.train: continue with mixwell.train from there"
        )
