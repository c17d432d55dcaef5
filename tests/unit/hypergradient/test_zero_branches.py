"""AdamW on a branch that a zero multiplies at first, as in LoRA: its second moment is zero in the second step."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import mixwell
from mixwell.hypergradient.parameters import Parameters
from mixwell.hypergradient.responses import response_for
from mixwell.reference.comparison import tangent_cosine

WIDTH, DOMAINS = 8, ("a", "b", "c")


class LowRank(nn.Module):
    """A frozen layer, and an added product of which the second factor starts at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.requires_grad_(False)
        self.a, self.b = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.frozen(x) + self.b(self.a(x))))


def train(signal: mixwell.Hypergradient, seed: int, *, steps: int, horizon: int) -> mixwell.Mixer:
    """Train with AdamW; the validation rows are those of domain a."""
    torch.manual_seed(seed)
    model = LowRank().double()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0)
    mixer = mixwell.Mixer(model, optimizer, DOMAINS, horizon=horizon, budget=steps, signal=signal)
    targets = torch.randn(len(DOMAINS), WIDTH, dtype=torch.float64)

    def loss(domain: int, rows: int) -> Tensor:
        x = torch.randn(rows, WIDTH, dtype=torch.float64)
        return nn.functional.mse_loss(model(x), torch.tanh(x @ targets[domain])[:, None])

    for _ in range(steps):
        for number, name in enumerate(DOMAINS):
            with mixer.domain(name):
                loss(number, 16).backward(create_graph=signal.requirements.graph)
        mixer.step()
        while mixer.validation_due:
            with mixer.validation():
                loss(0, 64).backward()
    return mixer


def centered(mixer: mixwell.Mixer) -> np.ndarray:
    scores = np.array(list(mixer.rounds[0].scores.values()))
    return scores - scores.mean()


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
def test_first_round_follows_exact_derivative() -> None:
    cosines: list[float] = []
    for seed in range(6):
        exact, dense = (
            centered(train(signal, seed, steps=30, horizon=30))
            for signal in (
                mixwell.Hypergradient(mixwell.ExactCurvature(), points=1),
                mixwell.Hypergradient(points=1),
            )
        )
        cosines.append(tangent_cosine(dense, exact))
        # It was larger by some ten thousand times where P was 1 / eps in the second step.
        assert np.linalg.norm(dense) < 10 * np.linalg.norm(exact)
    assert np.median(cosines) > 0.98


def test_step_size_of_first_round_fits_those_after() -> None:
    mixer = train(mixwell.Hypergradient(), 0, steps=60, horizon=6)
    sizes = [np.ptp(list(record.scores.values())) for record in mixer.rounds]
    assert sizes[0] < 10 * float(np.median(sizes))
    assert mixer.weights["a"] > 0.9


@pytest.mark.parametrize("amsgrad", [False, True])
def test_parameter_without_gradient_has_no_response(amsgrad: bool) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, amsgrad=amsgrad)
    model.weight.grad, model.bias.grad = torch.zeros(2, 3), torch.tensor([1.0, 0.0])
    optimizer.step()
    response = response_for(optimizer, Parameters.of(model, optimizer))
    weight, bias = (response.response(index, remaining=1) for index in range(2))
    assert torch.equal(weight.precondition(torch.ones(2, 3)), torch.zeros(2, 3))
    # The second element of the bias has seen none, but the first has.
    torch.testing.assert_close(bias.precondition(torch.ones(2)), torch.tensor([1.0, 10.0]))


def test_forward_mode_with_curvature_stays_finite() -> None:
    mixer = train(mixwell.Hypergradient(0.01, mixwell.ForwardModeTraces(), points=1), 1, steps=6, horizon=6)
    assert np.isfinite(centered(mixer)).all()
