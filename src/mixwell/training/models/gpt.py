"""A small GPT: what a language model of today has, in one page."""

from __future__ import annotations

from pathlib import Path
from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from mixwell.training.models.base import (
    MODELS,
    ModelConfig,
    ModelSize,
    Trainable,
    next_token_each,
)
from mixwell.utils.sections import Share, Whole


@final
@MODELS.register("gpt")
class GptConfig(ModelConfig):
    """The built-in small GPT."""

    is_language_model = True

    kind: str = "gpt"
    layers: Whole = 4
    heads: Whole = 4
    width: Whole = 128
    context: Whole = 128
    """Tokens of a row."""
    dropout: Share = 0.0

    @override
    def build(self, *, base: Path, vocabulary: int) -> Trainable:
        model = Gpt(vocabulary, **self.model_dump(exclude={"kind"}))
        return Trainable.language_model(model, next_token_each, context=self.context, vocabulary=vocabulary)

    @override
    def size(self, vocabulary: int) -> ModelSize:
        width, layers = self.width, self.layers
        return ModelSize(
            parameters=vocabulary * width + layers * (12 * width**2 + 2 * width) + width,
            buffers=self.context * (width // self.heads),
            # Of each token at least 16 vectors of the width in a block, and its logits with their gradient.
            activations=self.context * (16 * layers * width + 2 * vocabulary),
            modules=7 * layers,
        )


@final
class Gpt(nn.Module):
    """A decoder-only transformer: rotary positions, RMS norms before each part, tied embeddings, no biases.

    Attention is :func:`torch.nn.functional.scaled_dot_product_attention`, which takes a flash kernel where it can.

    Args:
        context: the greatest length of a sequence.
        layers: blocks of attention and feed-forward.
        heads: they divide the width.
        width: of the residual stream.

    Raises:
        ValueError: a number is not positive, or the heads do not divide the width into even parts.

    Example:
        >>> model = Gpt(257, context=64, layers=2, heads=2, width=32)
        >>> model(torch.zeros(3, 10, dtype=torch.long)).shape
        torch.Size([3, 10, 257])
    """

    def __init__(
        self, vocabulary: int, *, context: int, layers: int, heads: int, width: int, dropout: float = 0.0
    ) -> None:
        super().__init__()
        if min(vocabulary, context, layers, heads, width) < 1:
            raise ValueError("vocabulary, context, layers, heads and width of a GPT must be at least 1")
        if width % heads or (width // heads) % 2:
            raise ValueError(f"the heads must divide the width into even parts, got {heads} and {width}")
        self.context = context
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(_Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        turns = torch.outer(torch.arange(context).float(), 10_000.0 ** -torch.arange(0, 1, 2 * heads / width))
        self.register_buffer("cosine", turns.cos(), persistent=False)
        self.register_buffer("sine", turns.sin(), persistent=False)
        self.apply(_initialize)
        for name, parameter in self.named_parameters():
            if name.endswith("out.weight"):  # so that the residual stream does not grow with depth
                nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits of the next token, shape ``(rows, length, vocabulary)``, for ``(rows, length)`` tokens."""
        length = tokens.shape[1]
        if length > self.context:
            raise ValueError(f"a sequence of {length} tokens is longer than the context of {self.context}")
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cosine[:length], self.sine[:length])  # type: ignore[index]
        return self.head(self.norm(x))


class _Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.attention_norm, self.feed_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention_in = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.feed_in = nn.Linear(width, 4 * width, bias=False)
        self.feed_out = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        x = x + self._dropped(self._attend(self.attention_norm(x), cosine, sine))
        feed = self.feed_out(functional.gelu(self.feed_in(self.feed_norm(x))))
        return x + self._dropped(feed)

    def _attend(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        rows, length, width = x.shape
        parts = self.attention_in(x).view(rows, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(
            _turn(query, cosine, sine),
            _turn(key, cosine, sine),
            value,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=True,
        )
        return self.attention_out(mixed.transpose(1, 2).reshape(rows, length, width))

    def _dropped(self, x: Tensor) -> Tensor:
        return functional.dropout(x, self.dropout, self.training) if self.dropout else x


def _turn(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotary positions (Su et al., RoFormer): pairs of features are turned by an angle that grows with place."""
    first, second = x.chunk(2, dim=-1)
    cosine, sine = cosine.to(x.dtype), sine.to(x.dtype)
    return torch.cat([first * cosine - second * sine, first * sine + second * cosine], dim=-1)


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
