"""Models with every kind of layer, and trainings on mixed batches or on one batch per domain."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

import mixwell
from mixwell import Hypergradient, Mixer, ProjectedTraces
from mixwell.training.models.gpt import Gpt

DOMAINS = ["a", "b", "c"]
LABELS = torch.tensor([0, 0, 1, 2, 2, 2])
SHUFFLED = torch.tensor([2, 0, 1, 2, 0, 2])
EXACT = 10_000
Batch = tuple[Tensor, Tensor]


class TokenModel(nn.Module):
    """Embedding, norms, a shared layer that is used twice, an activation with a parameter, a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8, padding_idx=3)
        self.first = nn.LayerNorm(8)
        self.shared = nn.Linear(8, 8)
        self.second = nn.RMSNorm(8)
        self.bend = nn.PReLU(8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.first(self.embedding(tokens))
        x = x + torch.tanh(self.shared(x))
        x = x + self.bend(self.shared(self.second(x)).flatten(0, 1)).view_as(
            x
        )  # positions flattened into rows
        return self.head(x)


class ImageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Sequential(
            nn.Conv2d(3, 6, 3, stride=2, padding=1, dilation=1),
            nn.Tanh(),
            nn.Conv2d(6, 4, (2, 3), dilation=(1, 2), padding="valid", bias=False),
            nn.Tanh(),
            nn.Conv2d(4, 4, 1, groups=2),
            nn.Flatten(),
            nn.Linear(24, 5),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.parts(images)


class SignalModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Conv1d(2, 7, 3, padding=1)
        self.out = nn.Linear(7, 5)

    def forward(self, signals: Tensor) -> Tensor:
        return self.out(torch.tanh(self.wide(signals)).mean(dim=-1))


class Conv1D(nn.Module):
    """As transformers has it: a linear layer with the weights the other way round."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.nf = outputs
        self.weight = nn.Parameter(torch.randn(inputs, outputs) * 0.3)
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], self.nf)


class Gpt2Like(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Sequential(Conv1D(9, 4), nn.ReLU(), Conv1D(3, 9))

    def forward(self, x: Tensor) -> Tensor:
        return self.parts(x)


class LikeRMSNorm(nn.Module):
    """As transformers has them: with names of their own, and for some models around one."""

    def __init__(self, width: int, around: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width))
        self.variance_epsilon = 1e-3
        self._around = around

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return (self._around + self.weight) * (x * scale)


class LlamaLike(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Sequential(
            nn.Linear(4, 9), LikeRMSNorm(9, 0.0), nn.SiLU(), LikeRMSNorm(9, 1.0), nn.Linear(9, 3)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.parts(x)


def tokens(rows: int) -> Batch:
    drawn = torch.randint(0, 11, (rows, 6))
    return drawn[:, :-1], drawn[:, 1:]


def images(rows: int) -> Batch:
    return torch.randn(rows, 3, 8, 12).double(), torch.randint(0, 5, (rows,))


def signals(rows: int) -> Batch:
    return torch.randn(rows, 2, 9).double(), torch.randint(0, 5, (rows,))


def vectors(rows: int) -> Batch:
    return torch.randn(rows, 7, 4).double(), torch.randint(0, 3, (rows, 7))


PROBLEMS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Batch]]] = {
    "tokens": (TokenModel, tokens),
    "images": (ImageModel, images),
    "signals": (SignalModel, signals),
    "conv1d of transformers": (Gpt2Like, vectors),
    "norms of transformers": (LlamaLike, vectors),
    "gpt": (lambda: Gpt(11, context=8, layers=2, heads=2, width=8), tokens),
}


def row_losses(model: nn.Module, batch: Batch) -> Tensor:
    scores, wanted = model(batch[0]), batch[1]
    losses = functional.cross_entropy(scores.flatten(0, -2), wanted.flatten(), reduction="none")
    return losses.view(wanted.shape).flatten(1).mean(dim=1) if wanted.dim() > 1 else losses


def mean_loss(model: nn.Module, batch: Batch) -> Tensor:
    return row_losses(model, batch).mean()


def draw_steps(draw: Callable[[int], Batch], count: int) -> tuple[list[Batch], Batch]:
    torch.manual_seed(1)
    return [draw(len(LABELS)) for _ in range(count)], draw(5)


def train_by_domain(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: Sequence[Batch],
    validation: Batch,
    labels: Tensor,
    **options,
) -> Mixer:
    """The reference: dense traces, one backward pass per domain."""
    mixer = Mixer(model, optimizer, DOMAINS, horizon=len(steps), update=1.0, **options)
    for x, y in steps:
        for place, name in enumerate(DOMAINS):
            with mixer.domain(name):
                mean_loss(model, (x[labels == place], y[labels == place])).backward()
        mixer.step()
        if mixer.validation_due:
            validate(mixer, model, validation)
    return mixer


def train_mixed(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: Sequence[Batch],
    validation: Batch,
    labels: Tensor,
    traces: mixwell.Traces | None = None,
    **options,
) -> Mixer:
    signal = Hypergradient(traces=traces or ProjectedTraces(EXACT))
    mixer = Mixer(model, optimizer, DOMAINS, horizon=len(steps), update=1.0, signal=signal, **options)
    for batch in steps:
        with mixer.batch(labels) as rows:
            rows.weighted_loss(row_losses(model, batch)).backward()
        mixer.step()
        if mixer.validation_due:
            validate(mixer, model, validation)
    return mixer


def validate(mixer: Mixer, model: nn.Module, validation: Batch) -> None:
    with mixer.validation() as scope:
        loss = mean_loss(model, validation)
        loss.backward()
        scope.record_loss(loss)


def last_scores(mixer: Mixer) -> np.ndarray:
    return np.array(list(mixer.rounds[-1].scores.values()))


def train_steps(
    mixer: Mixer, model: nn.Module, steps: Sequence[Batch], validation: Batch | None = None
) -> None:
    """Train on mixed batches; with the validation gradients that are due, where there is a batch for them."""
    for batch in steps:
        with mixer.batch(LABELS) as rows:
            rows.weighted_loss(row_losses(model, batch)).backward()
        mixer.step()
        if validation is not None and mixer.validation_due:
            validate(mixer, model, validation)


def new_mixer(
    model: nn.Module,
    *,
    traces: mixwell.Traces | None = None,
    horizon: int = 2,
    points: int = 1,
    **options,
) -> Mixer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    signal = Hypergradient(traces=traces or ProjectedTraces(EXACT), points=points)
    return Mixer(model, optimizer, DOMAINS, horizon=horizon, signal=signal, update=1.0, **options)


def flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([t.detach().flatten() for t in tensors])
