"""Recurrent networks and multi-head attention, whose rows are in the first or the second dimension."""

from __future__ import annotations

import inspect
from typing import Any, final

from torch import Tensor, nn
from typing_extensions import override

from mixwell.hypergradient.capture.layer_rules.base import LAYER_RULES, LayerCall
from mixwell.hypergradient.capture.layer_rules.recompute import RecomputeRule


class _SequenceRule(RecomputeRule):
    """A layer with ``batch_first``."""

    @property
    def batch_dim(self) -> int:
        """The dimension of the rows in a batch of sequences."""
        return 0 if self.module.batch_first else 1

    def _argument_dim(self, name: str, value: Any) -> int | None:
        """Return the dimension of the rows in an argument, ``None`` where it has none."""
        raise AssertionError

    @override
    def input_row_dims(self, call: LayerCall) -> tuple[list[int | None], dict[str, int | None]]:
        names = list(inspect.signature(self.module.forward).parameters)
        positional = [self._argument_dim(name, value) for name, value in zip(names, call.args, strict=False)]
        return positional, {name: self._argument_dim(name, value) for name, value in call.kwargs.items()}


@final
@LAYER_RULES.register(nn.RNN, nn.LSTM, nn.GRU)
class RecurrentRule(_SequenceRule):
    """``nn.RNN``, ``nn.LSTM`` and ``nn.GRU``; states have the rows in the second dimension."""

    @override
    def row_dims(self, count: int) -> list[int]:
        return [self.batch_dim, *[1] * (count - 1)]

    @override
    def _argument_dim(self, name: str, value: Any) -> int | None:
        return self.batch_dim if name == "input" else 1


@final
@LAYER_RULES.register(nn.MultiheadAttention)
class AttentionRule(_SequenceRule):
    """``nn.MultiheadAttention``, which uses the weights of its output layer without calling it."""

    covers_submodules = True

    @override
    def row_dims(self, count: int) -> list[int]:
        return [self.batch_dim, *[0] * (count - 1)]

    @override
    def _argument_dim(self, name: str, value: Any) -> int | None:
        if name in ("query", "key", "value"):
            return self.batch_dim
        # A mask of the rows, or one for each row and head; else it is for pairs of positions.
        of_rows = name == "key_padding_mask" or (isinstance(value, Tensor) and value.dim() == 3)
        return 0 if of_rows else None
