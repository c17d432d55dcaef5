"""The derivative of gradient clipping in all kinds of traces, on a small transformer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import mixwell
from mixwell.hypergradient.parameters import Parameters
from mixwell.hypergradient.traces import clipping
from mixwell.hypergradient.traces.base import Combined
from mixwell.reference.comparison import tangent_cosine

VOCABULARY, WIDTH, LENGTH, ROWS = 17, 12, 8, 8
NAMES = ("d0", "d1", "d2", "d3")
WEIGHTS = (0.4, 0.3, 0.2, 0.1)
STEPS, ROUNDS = 10, 3

OPTIMIZERS: dict[str, Callable[[Iterable[Tensor]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.3),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.03, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=3e-3),
}
TRACES: dict[str, tuple[Callable[[], mixwell.hypergradient.traces.Traces], bool]] = {
    "dense": (mixwell.DenseTraces, False),
    "dense, mixed batches": (mixwell.DenseTraces, True),
    "bfloat16": (lambda: mixwell.DenseTraces(dtype=torch.bfloat16), False),
    "projected": (lambda: mixwell.ProjectedTraces(64), False),
    "projected, mixed batches": (lambda: mixwell.ProjectedTraces(64), True),
    "sketched": (lambda: mixwell.SketchedTraces(1 << 14), False),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.first(x)).chunk(3, -1)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.down(nn.functional.gelu(self.up(self.second(x))))


def scores(kind: str, clip: float, signal: mixwell.Hypergradient, *, mixed: bool) -> list[np.ndarray]:
    """Return the scores of every round; weights are constant, so that all runs train the same model."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(VOCABULARY, WIDTH), Block(), Block(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)
    ).double()
    generator = torch.Generator().manual_seed(1)
    shape = len(NAMES) + 1, VOCABULARY, VOCABULARY
    chains = torch.softmax(2 * torch.randn(shape, generator=generator, dtype=torch.float64), -1)
    chains[-1] = 0.7 * chains[0] + 0.3 * chains[1]  # validation

    def rows(chain: Tensor, count: int) -> Tensor:
        x = torch.randint(VOCABULARY, (count, 1), generator=generator)
        for _ in range(LENGTH):
            x = torch.cat([x, torch.multinomial(chain[x[:, -1]], 1, generator=generator)], 1)
        return x

    def losses(x: Tensor) -> Tensor:
        output = model(x[:, :-1]).transpose(1, 2)
        return nn.functional.cross_entropy(output, x[:, 1:], reduction="none").mean(1)

    mixer = mixwell.Mixer(
        model,
        OPTIMIZERS[kind](model.parameters()),
        NAMES,
        horizon=STEPS,
        signal=signal,
        update=1e-12,
        clip_norm=clip,
        weights=WEIGHTS,
    )
    for _ in range(STEPS * ROUNDS):
        batches = [rows(chain, ROWS) for chain in chains[:-1]]
        if mixed:
            with mixer.batch(np.repeat(np.arange(len(NAMES)), ROWS)) as batch:
                batch.weighted_loss(losses(torch.cat(batches))).backward()
        else:
            for name, one in zip(NAMES, batches, strict=True):
                with mixer.domain(name):
                    losses(one).mean().backward(create_graph=signal.requirements.graph)
        mixer.step()
        while mixer.validation_due:
            with mixer.validation():
                losses(rows(chains[-1], 64)).mean().backward()
    return [np.array(list(record.scores.values())) for record in mixer.rounds]


@lru_cache
def exact(kind: str, clip: float) -> list[np.ndarray]:
    with sdpa_kernel(SDPBackend.MATH):
        return scores(kind, clip, mixwell.Hypergradient(mixwell.ExactCurvature(), points=1), mixed=False)


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
@pytest.mark.parametrize("traces", TRACES)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_direction_of_clipped_rounds_is_exact(kind: str, traces: str) -> None:
    make, mixed = TRACES[traces]
    found = scores(kind, 0.1, mixwell.Hypergradient(0.0, make(), points=1), mixed=mixed)
    cosines = [tangent_cosine(a, b) for a, b in zip(found, exact(kind, 0.1), strict=True)]
    # Adam's P is that of the step before: without clipping the cosine of the first round is .96.
    assert min(cosines) > (0.97 if kind == "adamw" else 0.99)


def test_sketched_products_are_those_of_gradients() -> None:
    """Beyond the size of a sketch, and with gradients that share structure, as those of layers do."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(900, 700), nn.Linear(700, 500, bias=False))
    parameters = Parameters.of(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert parameters.numel > 3 * clipping.SIZE
    shared = [torch.randn(p.shape[-1], generator=generator) for p in parameters.tensors]
    gradients = [
        [
            torch.randn(p.shape, generator=generator) + s
            for p, s in zip(parameters.tensors, shared, strict=True)
        ]
        for _ in range(3)
    ]
    combined = [sum(parts) / 3 for parts in zip(*gradients, strict=True)]
    norm = float(torch.cat([g.flatten() for g in combined]).norm())
    sketches = clipping.GradientSketches(parameters, 3)
    for domain, one in enumerate(gradients):
        for index, gradient in enumerate(one):
            middle = len(gradient) // 2
            sketches.add(domain, index, gradient[:middle], 1.0, slice(0, middle))
            sketches.add(domain, index, gradient[middle:], 1.0, slice(middle, len(gradient)))
    found = sketches.coefficients(Combined(combined, 0.5, norm), combined)
    expected = [
        sum(float((a * b).sum()) for a, b in zip(combined, one, strict=True)) / norm**2 for one in gradients
    ]
    assert sketches.nbytes == clipping.sketch_bytes(parameters.numel, 3)
    assert found == pytest.approx(expected, abs=0.01)
    assert sum(found or ()) / 3 == pytest.approx(1.0, rel=1e-4)


def test_gradients_are_not_sketched_without_clipping() -> None:
    model = nn.Linear(3, 2)
    parameters = Parameters.of(model, torch.optim.SGD(model.parameters(), lr=0.1))
    sketches = clipping.GradientSketches(parameters, 1)
    sketches.add(0, 0, torch.ones(2, 3), 1.0)
    assert sketches.nbytes > 0
    gradients = [torch.ones(2, 3), torch.ones(2)]
    assert sketches.coefficients(Combined(gradients), gradients) is None
    sketches.add(0, 0, torch.ones(2, 3), 1.0)
    assert sketches.nbytes == 0


@pytest.mark.parametrize("rank", [2, 64])
def test_clipped_steps_of_adam_only_turn(rank: int) -> None:
    """``sum_j w_j (g_j - a_j G) = 0``: where every step is clipped, a common weight changes nothing."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    signal = mixwell.Hypergradient(0.0, mixwell.ProjectedTraces(rank))
    chosen = {"horizon": 12, "signal": signal, "update": 1e-9, "clip_norm": 1e-3}
    mixer = mixwell.Mixer(model, optimizer, ["a", "b"], **chosen)
    while len(mixer.rounds) < 2:
        x, y = (torch.randn(8, n).double() for n in (6, 3))
        with mixer.batch(["a"] * 4 + ["b"] * 4) as scope:
            scope.weighted_loss((model(x) - y).square().mean(1)).backward()
        mixer.step()
        if mixer.validation_due:
            with mixer.validation():
                (model(x) - y).square().mean().backward()
    for record in mixer.rounds:
        found = np.array(list(record.scores.values()))
        assert abs(found.mean()) < 2e-3 * abs(found).max()
