"""Steps that are skipped leave nothing in the traces and sums of a round."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import mixwell
from mixwell import DenseTraces, Hypergradient, Mixer, ProjectedTraces, SketchedTraces
from mixwell.hypergradient.traces.base import Traces
from mixwell.signals.influence import Influence
from mixwell.simplex.updates import SoftmaxWeights

RATE, GAMMA, STEPS = 0.1, 0.3, 6
TRACES: dict[str, tuple[Callable[[], Traces], bool]] = {
    "dense": (DenseTraces, False),
    "dense, mixed": (DenseTraces, True),
    "bfloat16": (lambda: DenseTraces(dtype=torch.bfloat16), False),
    "bfloat16, mixed": (lambda: DenseTraces(dtype=torch.bfloat16), True),
    "sketched": (lambda: SketchedTraces(10_000), False),  # exact: more buckets than parameters
    "projected": (lambda: ProjectedTraces(100), False),
    "projected, mixed": (lambda: ProjectedTraces(100), True),
}
SPOILS = {"overflow": 1e25, "infinite": float("inf")}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def rows(step: int, domain: str) -> Tensor:
    seed = 10 * step + "abv".index(domain)
    return torch.randn(5, 3, generator=torch.Generator().manual_seed(seed))


def losses(net: nn.Module, domain: str, x: Tensor) -> Tensor:
    wanted = -x[:, 0] if domain == "b" else x.sum(1)
    return (net(x).squeeze(1) - wanted).square()


def trained(
    signal: Callable[[], mixwell.Signal],
    *,
    factor: float,
    at: int,
    mixed: bool = False,
    reload_after: int | None = None,
) -> Mixer:
    """Train one round, in which the losses of "b" are multiplied in one step so that it is skipped."""
    net = model()

    def make() -> Mixer:
        own = signal()
        return Mixer(
            net,
            torch.optim.SGD(net.parameters(), lr=RATE),
            ["a", "b"],
            horizon=STEPS,
            signal=own,
            update=SoftmaxWeights() if isinstance(own, Influence) else 1.0,
            clip_norm=1e6,  # high, but a norm that overflows is above it
            on_nonfinite="skip",
        )

    mixer = make()
    for step in range(STEPS):
        scale = factor if step == at else 1.0
        if mixed:
            with mixer.batch([0] * 5 + [1] * 5) as scope:
                x = torch.cat([rows(step, "a"), rows(step, "b")])
                wanted = torch.cat([x[:5].sum(1), -x[5:, 0]])
                each = (net(x).squeeze(1) - wanted).square()
                scope.weighted_loss(each * torch.tensor([1.0] * 5 + [scale] * 5)).backward()
        else:
            for d in "ab":
                with mixer.domain(d):
                    (losses(net, d, rows(step, d)).mean() * (scale if d == "b" else 1.0)).backward()
        mixer.step()
        while mixer.validation_due:
            with mixer.validation():
                losses(net, "v", rows(STEPS, "v")).mean().backward()
        if step == reload_after:
            saved = mixer.state_dict()
            mixer = make()
            mixer.load_state_dict(saved)
    return mixer


def gradients(skipped: int, *, first: int) -> tuple[list[dict[str, Tensor]], Tensor]:
    """Return the flat gradients of the domains in the steps from ``first`` on, and that of validation."""
    net, found = model(), list[dict[str, Tensor]]()

    def gradient(domain: str, step: int) -> Tensor:
        parts = torch.autograd.grad(losses(net, domain, rows(step, domain)).mean(), list(net.parameters()))
        return torch.cat([one.flatten() for one in parts])

    for step in range(STEPS):
        if step == skipped:
            continue
        one = {d: gradient(d, step) for d in "ab"}
        if step >= first:
            found.append(one)
        with torch.no_grad():
            flat = nn.utils.parameters_to_vector(net.parameters()) - RATE * (one["a"] + one["b"]) / 2
            nn.utils.vector_to_parameters(flat, net.parameters())
    return found, gradient("v", STEPS)


@pytest.mark.parametrize("spoil", SPOILS)
@pytest.mark.parametrize("kind", TRACES)
@pytest.mark.filterwarnings("ignore:.*(overflowed|non-finite).*:UserWarning")
def test_traces_are_those_of_the_steps_after_a_skipped_one(kind: str, spoil: str) -> None:
    make, mixed = TRACES[kind]
    if spoil == "infinite" and not mixed:
        pytest.skip("a domain that is not finite is not added")
    mixer = trained(lambda: Hypergradient(GAMMA, make(), points=1), factor=SPOILS[spoil], at=2, mixed=mixed)
    assert mixer.rounds[0].skipped == {"combined gradient" if spoil == "overflow" else "b": 1}
    # Projected traces forget the step alone; the others begin again.
    steps, validation = gradients(2, first=0 if "projected" in kind else 3)
    for name in "ab":
        trace = torch.zeros_like(validation)
        for one in steps:
            trace = (1 - RATE * GAMMA) * trace + RATE * one[name]
        tolerance = 0.05 if "bfloat16" in kind else 1e-3
        assert mixer.rounds[0].scores[name] == pytest.approx(float(-trace @ validation), rel=tolerance)


@pytest.mark.filterwarnings("ignore:.*overflowed.*:UserWarning")
def test_tikmix_measures_the_steps_after_a_skipped_one() -> None:
    record = trained(lambda: Influence(0.1), factor=1e25, at=2).rounds[0]
    steps, validation = gradients(2, first=3)
    fisher = torch.stack([((one["a"] + one["b"]) / 2).square() for one in steps]).mean(0)
    direction = validation / (fisher / fisher.mean() + 0.1)
    influence = [float(torch.stack([one[d] for one in steps]).mean(0) @ direction) for d in "ab"]
    assert record.measured["influence_most"] == pytest.approx(max(influence), rel=1e-3)
    assert record.measured["influence"] == pytest.approx(np.mean(influence), rel=1e-3)


@pytest.mark.parametrize("kind", ["dense", "bfloat16, mixed", "sketched"])
@pytest.mark.filterwarnings("ignore:.*overflowed.*:UserWarning")
def test_a_round_with_nothing_but_a_skipped_step_at_its_end_keeps_the_weights(kind: str) -> None:
    make, mixed = TRACES[kind]
    mixer = trained(lambda: Hypergradient(GAMMA, make(), points=1), factor=1e25, at=STEPS - 1, mixed=mixed)
    record = mixer.rounds[0]
    assert record.scores == {}
    assert record.new_weights == record.weights
    assert mixer.weights.last == {"a": 0.5, "b": 0.5}


@pytest.mark.filterwarnings("ignore:.*overflowed.*:UserWarning")
def test_a_state_after_a_skipped_step_resumes_as_without_a_stop() -> None:
    whole = trained(lambda: Hypergradient(GAMMA, points=2, span=1.0), factor=1e25, at=3)
    assert whole.rounds[0].points == 2
    resumed = trained(lambda: Hypergradient(GAMMA, points=2, span=1.0), factor=1e25, at=3, reload_after=3)
    assert resumed.rounds == whole.rounds
