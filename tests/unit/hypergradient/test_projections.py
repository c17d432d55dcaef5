"""Random projections: unbiased, exact along aligned directions, and small."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

import mixwell
from helpers.mixed_batches import (
    DOMAINS,
    LABELS,
    ImageModel,
    draw_steps,
    images,
    last_scores,
    new_mixer,
    tokens,
    train_by_domain,
    train_mixed,
    train_steps,
    validate,
)
from mixwell import Hypergradient, Mixer, ProjectedTraces
from mixwell.hypergradient.capture.projections import Projections
from mixwell.hypergradient.parameters import Parameters
from mixwell.training.models.gpt import Gpt

pytestmark = pytest.mark.filterwarnings("error", "ignore:the rows of a step do not follow the weights")


def test_projections_are_unbiased_and_improve_with_rank() -> None:
    model = Gpt(11, context=8, layers=1, heads=2, width=24).double()
    steps, validation = draw_steps(tokens, 3)
    start = copy.deepcopy(model)
    exact = train_by_domain(model, torch.optim.SGD(model.parameters(), lr=0.1), steps, validation, LABELS)

    def estimates(rank: int) -> np.ndarray:
        found = []
        for seed in range(60):
            twin = copy.deepcopy(start)
            traces = ProjectedTraces(rank, seed=seed)
            optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
            found.append(last_scores(train_mixed(twin, optimizer, steps, validation, LABELS, traces)))
        return np.array(found)

    small, large = estimates(2), estimates(8)
    for found in (small, large):
        error = found.std(axis=0) / np.sqrt(len(found))
        assert (abs(found.mean(axis=0) - last_scores(exact)) < 4 * error).all()
    assert (large.std(axis=0) < small.std(axis=0) / 1.5).all()


def test_projections_are_resampled_per_round_and_parameter() -> None:
    model = nn.Linear(40, 40)
    traces = ProjectedTraces(4)
    Mixer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        DOMAINS,
        horizon=2,
        signal=Hypergradient(traces=traces),
    )
    first = traces._projections.each[0].matrix("inputs", torch.float32)
    assert first is not None
    first = first.clone()
    traces.reset(1)
    second = traces._projections.each[0].matrix("inputs", torch.float32)
    assert second is not None
    assert not torch.equal(first, second)
    assert not torch.equal(second, traces._projections.each[0].matrix("outputs", torch.float32))
    traces.reset(0)
    assert torch.equal(first, traces._projections.each[0].matrix("inputs", torch.float32))


def test_leading_validation_directions_are_exact() -> None:
    """Where the validation gradient is of low rank and stays the same, its inner products have no error."""
    torch.manual_seed(0)
    rank, size = 8, 60
    parameter = nn.Parameter(torch.zeros(size, size, dtype=torch.float64))
    parameters = Parameters(("x",), (parameter,), (0,))
    wanted = torch.randn(size, 3).double() @ torch.randn(3, size).double()
    other = torch.randn(size, size).double()
    errors = []
    for aligned in (False, True):
        found = []
        for seed in range(100):
            projections = Projections(parameters, rank, seed)
            if aligned:
                projections.each[0].align(wanted)
            projections.resample(0)
            found.append(float(projections.project([wanted]) @ projections.project([other])))
        errors.append(np.array(found) - float((wanted * other).sum()))
    assert abs(errors[1]).max() < 1e-9 * abs(errors[0]).max()
    assert abs(errors[0].mean()) < 4 * errors[0].std() / 10


def test_exact_directions_keep_the_rest_unbiased() -> None:
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.zeros(30, 40, dtype=torch.float64))
    parameters = Parameters(("x",), (parameter,), (0,))
    left, right, align = (torch.randn(30, 40).double() for _ in range(3))
    found = []
    for seed in range(400):
        projections = Projections(parameters, 6, seed)
        projections.each[0].align(align)
        projections.resample(0)
        found.append(float(projections.project([left]) @ projections.project([right])))
    assert abs(np.mean(found) - float((left * right).sum())) < 4 * np.std(found) / 20


@pytest.mark.parametrize("rank", [1, 2, 3, 7])
def test_any_rank_over_several_rounds(rank: int) -> None:
    model = ImageModel()
    mixer = new_mixer(model, traces=ProjectedTraces(rank))
    for _ in range(3):
        train_steps(mixer, model, [(x.float(), y) for x, y in draw_steps(images, 2)[0]])
        validate(mixer, model, (torch.randn(5, 3, 8, 12), torch.randint(0, 5, (5,))))
        assert np.isfinite(last_scores(mixer)).all()


def test_first_step_of_long_round_sets_exact_directions() -> None:
    # All gradients have rank one and the same directions, so that nothing is random from the second step on.
    x, y = torch.randn(1, 40).expand(len(LABELS), 40).double(), torch.rand(len(LABELS), 30).double()
    found = []
    for traces, horizon, warmup in ((ProjectedTraces(4), 11, 0), (mixwell.DenseTraces(), 10, 1)):
        torch.manual_seed(0)
        model = nn.Linear(40, 30, bias=False).double()
        mixer = new_mixer(model, traces=traces, horizon=horizon, warmup=warmup)
        for _ in range(11):
            with mixer.batch(LABELS) as batch:
                batch.weighted_loss(y.square().sum(1) * model(x).mean(1)).backward()
            mixer.step()
        with mixer.validation():
            model(x).mean().backward()
        found.append(last_scores(mixer))
    np.testing.assert_allclose(found[0], found[1], rtol=1e-9)


def test_memory_does_not_hold_a_copy_of_the_parameters() -> None:
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    size = sum(p.nbytes for p in model.parameters())
    mixer = new_mixer(model, traces=ProjectedTraces(8))
    batch = torch.randn(6, 256)
    with mixer.batch(LABELS) as rows:
        rows.weighted_loss(model(batch).square().mean(dim=1)).backward()
    mixer.step()
    assert mixer.nbytes < 0.17 * size


# Preconditioned gradients.


def preconditioned(rank: int, seed: int = 0) -> tuple[Projections, tuple[torch.Tensor, torch.Tensor]]:
    """Return projections of a 30 x 40 matrix and a bias with scales."""
    tensors = tuple(nn.Parameter(torch.zeros(*shape, dtype=torch.float64)) for shape in ((30, 40), (7,)))
    projections = Projections(Parameters(("x", "b"), tensors, (0, 0)), rank, seed, preconditioned=True)
    generator = torch.Generator().manual_seed(1)
    scales = tuple(torch.rand(n, generator=generator).double() + 0.1 for n in (30, 40))
    projections.precondition(0, scales)
    projections.precondition(1, (torch.arange(1.0, 8).double(),))
    return projections, scales  # type: ignore[return-value]


@pytest.mark.parametrize("rank", [6, 30, 35], ids=["both sides", "one", "one, too"])
def test_inner_products_of_preconditioned_gradients(rank: int) -> None:
    """``<V, r c^T * G>`` is exact for V in the exact directions, whatever sides are projected."""
    projections, (rows, columns) = preconditioned(rank)
    torch.manual_seed(0)
    low = torch.randn(30, 2).double() @ torch.randn(2, 40).double()
    other, bias, of_bias = torch.randn(30, 40).double(), torch.randn(7).double(), torch.randn(7).double()
    projections.each[0].align(low)
    projections.resample(0)
    assert projections.factors is not None
    found = projections.project([other, bias]) * projections.factors
    wanted = (low * torch.outer(rows, columns) * other).sum() + (of_bias * torch.arange(1.0, 8) * bias).sum()
    torch.testing.assert_close(found @ projections.project_vectors([low, of_bias]), wanted)


def test_preconditioner_of_rank_one_is_followed() -> None:
    """With a second moment ``R C^T`` that changes in every step, projected traces are those of dense ones."""
    generator = torch.Generator().manual_seed(2)
    x, y = torch.randn(1, 12, generator=generator), torch.rand(len(LABELS), 10, generator=generator)
    moments = [torch.outer(*(torch.rand(n, generator=generator) + 0.1 for n in (10, 12))) for _ in range(6)]

    def scores(traces: mixwell.Traces) -> np.ndarray:
        torch.manual_seed(0)
        model = nn.Linear(12, 10, bias=False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        signal = Hypergradient(traces=traces, points=1)
        mixer = Mixer(model, optimizer, DOMAINS, horizon=5, warmup=1, signal=signal)
        for step in range(6):
            if step:
                optimizer.state[model.weight]["exp_avg_sq"].copy_(moments[step])
            with mixer.batch(LABELS) as batch:
                batch.weighted_loss(y.square().sum(1) * model(x.expand(len(LABELS), 12)).mean(1)).backward()
            mixer.step()
        optimizer.state[model.weight]["exp_avg_sq"].copy_(moments[0])
        with mixer.validation():
            model(x).mean().backward()
        return last_scores(mixer)

    drawn = np.stack([scores(ProjectedTraces(6, seed=seed, check=False)) for seed in range(60)])
    error = drawn.std(axis=0, ddof=1) / 60**0.5
    assert (abs(drawn.mean(axis=0) - scores(mixwell.DenseTraces())) < 4 * error + 1e-6).all()
