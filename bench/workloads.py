"""What is trained in the benchmarks, plainly and with mixwell.

A round is T steps; a mixed one ends with a validation gradient on a batch of one domain's size and the update of
the weights. The plain loop takes the same rows in one batch, with the same optimizer, and has no validation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice
from typing import Any

import torch
from domains import TARGET, Batch, images, taught, tokens
from measure import PLAIN, Round, Seconds, peak_growth, take_turns
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

import mixwell
from mixwell.training.models.cnn import small_cnn
from mixwell.training.models.gpt import Gpt

# Longer rounds than this see batches again, so that their data do not fill the memory.
DISTINCT = 64
LEARNING_RATE = 0.05  # of SGD


@dataclass(frozen=True)
class Workload:
    """A model and its data.

    Args:
        model: makes it, of a given width or its own; with the same parameters every time.
        optimizer: makes it.
        draw: ``draw(domain, rows, generator)`` makes a batch of a domain, or of the target.
        domains: the number m.
        rows: of each domain in a step.
        horizon: T, the steps of a round.
        variants: names of :data:`VARIANTS`.
        turns: how often each variant is timed.
        update: alpha of the weights' update; by default it is self-tuned.
    """

    model: Callable[..., nn.Module]
    optimizer: Callable[[Iterable[Tensor]], Optimizer]
    draw: Callable[[int, int, torch.Generator], Batch]
    domains: int
    rows: int
    horizon: int
    variants: tuple[str, ...]
    turns: int = 5
    update: float | None = None

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
        labels = torch.arange(self.domains).repeat_interleave(self.rows)
        order = torch.randperm(len(labels), generator=generator)
        steps: list[Batch] = []
        parts: list[list[Batch]] = []
        for _ in range(min(self.horizon, DISTINCT)):
            parts.append([self.draw(domain, self.rows, generator) for domain in range(self.domains)])
            x, y = (torch.cat(every) for every in zip(*parts[-1], strict=True))
            steps.append((x[order], y[order]))
        return Data(
            list(islice(cycle(steps), self.horizon)),
            labels[order],
            list(islice(cycle(parts), self.horizon)),
            self.draw(TARGET, self.rows, generator),
        )


@dataclass(frozen=True)
class Data:
    """Of one round.

    Args:
        steps: a batch per step, its rows in random order.
        labels: the domain of each row; the same in all steps.
        parts: the same rows, in a batch per domain, for each step.
        validation: a batch.
    """

    steps: list[Batch]
    labels: Tensor
    parts: list[list[Batch]]
    validation: Batch


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
        for parts in data.parts:
            optimizer.zero_grad()
            for part in parts:
                (mean_loss(model, part) / workload.domains).backward()
            optimizer.step()

    return Round(train)


def per_domain(traces: Callable[[], mixwell.Traces], workload: Workload, data: Data) -> Round:
    """Mixing with a backward pass for each domain."""
    model, optimizer, mixer = _mixer(workload, traces())

    def train() -> None:
        for parts in data.parts:
            for name, part in zip(workload.names, parts, strict=True):
                with mixer.domain(name):
                    mean_loss(model, part).backward()
            mixer.step()

    return _round(train, (model, optimizer), mixer, data)


def mixed(traces: Callable[[], mixwell.Traces], workload: Workload, data: Data) -> Round:
    """Mixing with one batch of rows of all domains, and one backward pass."""
    model, optimizer, mixer = _mixer(workload, traces())

    def train() -> None:
        for rows in data.steps:
            with mixer.batch(data.labels) as batch:
                batch.weighted_loss(row_losses(model, rows)).backward()
            mixer.step()

    return _round(train, (model, optimizer), mixer, data)


def _mixer(workload: Workload, traces: mixwell.Traces) -> tuple[nn.Module, Optimizer, mixwell.Mixer]:
    model = workload.model()
    optimizer = workload.optimizer(model.parameters())
    signal = mixwell.Hypergradient(traces=traces, points=1)  # as those that it is compared with
    mixer = mixwell.Mixer(
        model, optimizer, workload.names, horizon=workload.horizon, signal=signal, update=workload.update
    )
    return model, optimizer, mixer


def _round(
    train: Callable[[], None], trained: tuple[nn.Module, Optimizer], mixer: mixwell.Mixer, data: Data
) -> Round:
    scores: list[list[float]] = []

    def finish() -> None:
        with mixer.validation():
            mean_loss(trained[0], data.validation).backward()
        scores.append(list(mixer.rounds[-1].scores.values()))

    return Round(train, finish, scores, mixer.nbytes, trained)


Build = Callable[[Workload, Data], Round]
PER_DOMAIN: dict[str, Build] = {
    "dense": partial(per_domain, mixwell.DenseTraces),
    "bfloat16": partial(per_domain, partial(mixwell.DenseTraces, dtype=torch.bfloat16)),
    "sketched 4096": partial(per_domain, partial(mixwell.SketchedTraces, 4096)),
}
MIXED: dict[str, Build] = {
    "mixed dense": partial(mixed, mixwell.DenseTraces),
    "mixed bfloat16": partial(mixed, partial(mixwell.DenseTraces, dtype=torch.bfloat16)),
    **{f"projected {rank}": partial(mixed, partial(mixwell.ProjectedTraces, rank)) for rank in (8, 16, 32)},
}
SPLIT = "not mixed, split"
VARIANTS: dict[str, Build] = {PLAIN: plain, SPLIT: split, **PER_DOMAIN, **MIXED}


def prepare(workload: Workload, build: Build) -> Data:
    """The data, after a plain step on a few of them and two rounds of a variant with a small model.

    So libraries have loaded what they load: the code of QR alone takes megabytes, whatever the model.
    """
    data = workload.data()
    plain(workload, replace(data, steps=[data.validation])).run()
    small = replace(workload, model=partial(workload.model, width=96), horizon=1)
    first = build(small, replace(data, steps=data.steps[:1], parts=data.parts[:1]))
    first.run()
    first.run()
    return data


def seconds(workload: Workload, builds: Mapping[str, Build], *, label: str) -> Seconds:
    """The times of variants on the same data."""
    data = workload.data()
    rounds = {name: build(workload, data) for name, build in builds.items()}
    return take_turns(rounds, workload.turns, label=label)


def memory(workload: Workload, build: Build, *, rounds: int = 1) -> dict[str, int]:
    """The growth of the peak while a variant runs, and what it says it holds."""
    return peak_growth(partial(prepare, workload, build), partial(build, workload), rounds=rounds)


# ------------------------------------------------------------------------------------------------ models


def mlp(width: int = 1024) -> nn.Module:
    """256 inputs, two hidden layers, 10 classes."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(256, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    )


def cnn(width: int = 32) -> nn.Module:
    """The paper's."""
    torch.manual_seed(0)
    return small_cnn(width)


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


PROJECTED = ("projected 8", "projected 16", "projected 32")
FEW = (SPLIT, "dense", "mixed dense", "projected 16", "projected 32")
WIDE = ("dense", "mixed dense", "projected 32")
MOST = (SPLIT, "dense", "sketched 4096", "mixed dense", *PROJECTED)
ALL = (*MOST, "bfloat16", "mixed bfloat16")
WORKLOADS = {
    "mlp": Workload(mlp, sgd, taught, domains=3, rows=64, horizon=20, variants=ALL, turns=15),
    "mlp-adamw": Workload(mlp, adamw, taught, domains=3, rows=64, horizon=20, variants=MOST, turns=15),
    "cnn": Workload(cnn, sgd, images, domains=3, rows=256, horizon=20, variants=MOST, turns=3),
    # A step takes seconds here, so that rounds are short.
    "gpt": Workload(gpt, adamw, partial(tokens, 256), domains=4, rows=8, horizon=2, variants=FEW, turns=2),
    "gpt-m64": Workload(
        gpt, adamw, partial(tokens, 128), domains=64, rows=1, horizon=2, variants=WIDE, turns=2
    ),
}
