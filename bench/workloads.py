"""What is trained in the benchmarks, plainly and with mixwell.

A round is T steps; a mixed one ends with a validation gradient on a batch of one domain's size and the update of
the weights. The plain loop takes the same rows in one batch, with the same optimiser, and has no validation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from typing import Any

import torch
from measure import PLAIN, Round
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

import mixwell
from mixwell.models.cnn import small_cnn
from mixwell.models.gpt import Gpt

Batch = tuple[Tensor, Tensor]
# A round cycles through so many batches: drawing is no part of what is measured.
DISTINCT = 8
LEARNING_RATE = 0.05  # of SGD


@dataclass(frozen=True)
class Workload:
    """A model and its data.

    Args:
        model: makes it; with the same parameters every time.
        optimizer: makes it.
        draw: ``draw(domains, rows, generator)`` makes a batch of ``rows`` rows of each of ``domains``.
        domains: the number m.
        rows: of each domain in a step.
        horizon: T, the steps of a round.
        variants: names of :data:`VARIANTS`.
        turns: how often each variant is timed.
    """

    model: Callable[[], nn.Module]
    optimizer: Callable[[Iterable[Tensor]], Optimizer]
    draw: Callable[[Iterable[int], int, torch.Generator], Batch]
    domains: int
    rows: int
    horizon: int
    variants: tuple[str, ...]
    turns: int

    @property
    def names(self) -> list[str]:
        """Of the domains."""
        return [f"domain {j}" for j in range(self.domains)]

    @property
    def parameter_bytes(self) -> int:
        """The size of one buffer of all parameters."""
        return sum(p.nbytes for p in self.model().parameters())

    def data(self, seed: int = 1) -> Data:
        """The batches of a round and its validation batch."""
        generator = torch.Generator().manual_seed(seed)
        every = range(self.domains)
        batches = [self.draw(every, self.rows, generator) for _ in range(min(self.horizon, DISTINCT))]
        return Data(
            list(islice(cycle(batches), self.horizon)),
            torch.arange(self.domains).repeat_interleave(self.rows),
            self.draw([0], self.rows, generator),
        )


@dataclass(frozen=True)
class Data:
    """Of one round.

    Args:
        steps: a batch per step; the rows of domain 0, then those of domain 1, and so on.
        labels: the domain of each row.
        validation: a batch.
    """

    steps: list[Batch]
    labels: Tensor
    validation: Batch

    def split(self, batch: Batch) -> list[Batch]:
        """The batch of every domain, without a copy."""
        rows = len(self.labels) // (int(self.labels[-1]) + 1)
        return list(zip(batch[0].split(rows), batch[1].split(rows), strict=True))


# ---------------------------------------------------------------------------------------------- training


def mean_loss(model: Callable[..., Any], batch: Batch) -> Tensor:
    """The mean over all rows (and tokens)."""
    return functional.cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten())


def row_losses(model: Callable[..., Any], batch: Batch) -> Tensor:
    """One loss per row, shape ``(rows,)``; of text the mean over the row's tokens."""
    x, y = batch
    losses = functional.cross_entropy(model(x).flatten(0, -2), y.flatten(), reduction="none")
    return losses.view(len(y), -1).mean(1)


def plain(workload: Workload, data: Data) -> Round:
    """An ordinary loop."""
    model = workload.model()
    optimizer = workload.optimizer(model.parameters())

    def train() -> None:
        for batch in data.steps:
            optimizer.zero_grad()
            mean_loss(model, batch).backward()
            optimizer.step()

    return Round(train)


def split(workload: Workload, data: Data) -> Round:
    """The same without mixing, in a batch per domain: what accumulating gradients costs or saves by itself."""
    model = workload.model()
    optimizer = workload.optimizer(model.parameters())

    def train() -> None:
        for batch in data.steps:
            optimizer.zero_grad()
            for part in data.split(batch):
                (mean_loss(model, part) / workload.domains).backward()
            optimizer.step()

    return Round(train)


def per_domain(traces: Callable[[], mixwell.Traces], workload: Workload, data: Data) -> Round:
    """Mixing with a backward pass for each domain."""
    model, mixer = _mixer(workload, traces())

    def train() -> None:
        for batch in data.steps:
            for name, part in zip(workload.names, data.split(batch), strict=True):
                with mixer.domain(name):
                    mean_loss(model, part).backward()
            mixer.step()

    return _round(train, model, mixer, data)


def mixed(traces: Callable[[], mixwell.Traces], workload: Workload, data: Data) -> Round:
    """Mixing with one batch of rows of all domains, and one backward pass."""
    model, mixer = _mixer(workload, traces())
    mixing: Any = mixer

    def train() -> None:
        for rows in data.steps:
            with mixing.batch(data.labels) as batch:
                batch.weigh(row_losses(model, rows)).backward()
            mixer.step()

    return _round(train, model, mixer, data)


def _mixer(workload: Workload, traces: mixwell.Traces) -> tuple[nn.Module, mixwell.Mixer]:
    model = workload.model()
    optimizer = workload.optimizer(model.parameters())
    signal = mixwell.Hypergradient(traces=traces)
    return model, mixwell.Mixer(model, optimizer, workload.names, horizon=workload.horizon, signal=signal)


def _round(train: Callable[[], None], model: nn.Module, mixer: mixwell.Mixer, data: Data) -> Round:
    scores: list[list[float]] = []

    def finish() -> None:
        with mixer.validation():
            mean_loss(model, data.validation).backward()
        scores.append(list(mixer.update().scores.values()))

    return Round(train, finish, scores, mixer.nbytes)


def projected(rank: int) -> mixwell.Traces:
    """Traces that one mixed batch can feed."""
    return getattr(mixwell, "ProjectedTraces")(rank=rank)  # noqa: B009


Build = Callable[[Workload, Data], Round]
PER_DOMAIN: dict[str, Build] = {
    "dense": partial(per_domain, mixwell.DenseTraces),
    "bfloat16": partial(per_domain, mixwell.BFloat16Traces),
    "sketched 4096": partial(per_domain, partial(mixwell.SketchedTraces, 4096)),
}
MIXED: dict[str, Build] = {
    f"projected {rank}": partial(mixed, partial(projected, rank)) for rank in (8, 16, 32)
}
SPLIT = "not mixed, split"
VARIANTS: dict[str, Build] = {PLAIN: plain, SPLIT: split, **PER_DOMAIN, **MIXED}


def available(names: Iterable[str]) -> list[str]:
    """Those of the variants that this version of mixwell has."""
    return [name for name in names if name not in MIXED or hasattr(mixwell.Mixer, "batch")]


def prepare(workload: Workload) -> Data:
    """The data, after a plain step on a few of them, so that libraries have loaded what they load."""
    data = workload.data()
    plain(workload, Data([data.validation], data.labels, data.validation)).run()
    return data


# ------------------------------------------------------------------------------------------------ models


def mlp(width: int = 1024) -> nn.Module:
    """256 inputs, two hidden layers, 10 classes."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(256, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    )


def cnn() -> nn.Module:
    """The paper's."""
    torch.manual_seed(0)
    return small_cnn(32)


def gpt(width: int = 384, layers: int = 6, heads: int = 6) -> nn.Module:
    """Of bytes and an end."""
    torch.manual_seed(0)
    return Gpt(257, context=256, layers=layers, heads=heads, width=width)


def sgd(parameters: Iterable[Tensor]) -> Optimizer:
    """Plain."""
    return torch.optim.SGD(parameters, lr=LEARNING_RATE)


def adamw(parameters: Iterable[Tensor]) -> Optimizer:
    """With PyTorch's settings."""
    return torch.optim.AdamW(parameters, lr=1e-3)


# -------------------------------------------------------------------------------------------------- data


def taught(domains: Iterable[int], rows: int, generator: torch.Generator) -> Batch:
    """Inputs of 256 numbers; each domain has a teacher of its own, which shares a part with the others'."""
    inputs, labels = [], []
    for domain in domains:
        x = torch.randn(rows, 256, generator=generator)
        inputs.append(x)
        labels.append((x @ teacher(domain)).argmax(1))
    return torch.cat(inputs), torch.cat(labels)


def teacher(domain: int) -> Tensor:
    """The linear map whose greatest output is the class."""

    def draw(seed: int) -> Tensor:
        return torch.randn(256, 10, generator=torch.Generator().manual_seed(seed))

    return draw(1000) + draw(1001 + domain)


def images(domains: Iterable[int], rows: int, generator: torch.Generator) -> Batch:
    """Random pixels and classes."""
    count = rows * len(list(domains))
    return (
        torch.randn(count, 1, 28, 28, generator=generator),
        torch.randint(0, 10, (count,), generator=generator),
    )


def tokens(length: int, domains: Iterable[int], rows: int, generator: torch.Generator) -> Batch:
    """Random tokens, each of which is to be told from those before."""
    drawn = torch.randint(0, 257, (rows * len(list(domains)), length + 1), generator=generator)
    return drawn[:, :-1], drawn[:, 1:]


MOST = (SPLIT, "dense", "sketched 4096", "projected 8", "projected 16", "projected 32")
ALL = (*MOST, "bfloat16")
WORKLOADS = {
    "mlp": Workload(mlp, sgd, taught, domains=3, rows=64, horizon=20, variants=ALL, turns=7),
    "mlp-adamw": Workload(mlp, adamw, taught, domains=3, rows=64, horizon=20, variants=ALL, turns=7),
    "cnn": Workload(cnn, sgd, images, domains=3, rows=256, horizon=20, variants=MOST, turns=3),
    "gpt": Workload(gpt, adamw, partial(tokens, 256), domains=4, rows=8, horizon=2, variants=MOST, turns=3),
    "gpt-m64": Workload(
        gpt,
        adamw,
        partial(tokens, 128),
        domains=64,
        rows=1,
        horizon=2,
        variants=("dense", "projected 8", "projected 16", "projected 32"),
        turns=3,
    ),
}
