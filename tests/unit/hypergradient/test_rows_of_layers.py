"""Layers with as many entries as there are rows, by accident; activation checkpointing; random numbers."""

from __future__ import annotations

import copy
import fnmatch
import gc
import warnings
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import mixwell
from helpers.layer_networks import LENGTH, TRACES, WIDTH, network, row_losses, train
from helpers.mixed_batches import SHUFFLED, last_scores, new_mixer
from mixwell import DenseTraces, ProjectedTraces

Draw = Callable[[int, int, torch.Generator], Tensor]


def compare_with_domains(
    model: nn.Module, traces: mixwell.Traces, *, labels: Tensor = SHUFFLED, **options: Draw
) -> None:
    """Parameters and scores are those of one pass per domain."""
    twin = copy.deepcopy(model)
    apart = train(model, labels, DenseTraces(), mixed=False, **options)
    mixed = train(twin, labels, traces, mixed=True, **options)
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-9, atol=1e-12)
    rounded = isinstance(traces, DenseTraces) and traces.dtype is not None
    rtol, atol = (0.03, 1e-3) if rounded else (1e-8, 0.0)
    np.testing.assert_allclose(last_scores(mixed), last_scores(apart), rtol=rtol, atol=atol)


def exact_traces(name: str) -> mixwell.Traces:
    """Return traces that leave nothing out."""
    return ProjectedTraces(10_000, unsupported="per_domain") if name == "projected" else TRACES[name]()


class LateExpert(nn.Module):
    """The tokens of an expert that is first used in the third step are not sorted by rows."""

    def __init__(self) -> None:
        super().__init__()
        self.all, self.expert = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, WIDTH)
        found = self.all(tokens)
        if float(x[0, 0, 0]) > 0:
            places = torch.arange(2 * len(x))
            found = found.index_add(0, places, torch.tanh(self.expert(tokens[places])))
        return found.view_as(x)


def expert_from_third_step(step: int, rows: int, random: torch.Generator) -> Tensor:
    x = torch.randn(rows, LENGTH, WIDTH, generator=random, dtype=torch.float64)
    x[0, 0, 0] = -1.0 if step < 2 else 1.0
    return x


@pytest.mark.parametrize("traces", TRACES)
def test_layer_that_is_first_run_in_a_later_batch(traces: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(LateExpert(), nn.Linear(WIDTH, 3)).double()
    with pytest.warns(
        UserWarning, match=r"expert\.weight \(is used where the first dimension is not the batch"
    ):
        compare_with_domains(model, exact_traces(traces), draw=expert_from_third_step)


class LinearExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, WIDTH)
        best, chosen = self.router(tokens).softmax(dim=-1).max(dim=-1)
        found = torch.zeros_like(tokens)
        for index, expert in enumerate(self.experts):
            (places,) = torch.where(chosen == index)
            if len(places):
                inner = torch.tanh(expert(tokens[places]))
                found = found.index_add(0, places, inner * best[places, None])
        return found.view_as(x)


@pytest.mark.parametrize("traces", TRACES)
def test_experts_of_linear_layers(traces: str) -> None:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the parameters that take a pass per domain
        compare_with_domains(network(LinearExperts()), exact_traces(traces))


class PositionsFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.randn(9, 1, WIDTH))
        self.inner = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        return self.inner(x + self.places[: len(x)]).transpose(0, 1)


@pytest.mark.parametrize("lengths", [(5, 6), (6, 5)])
@pytest.mark.parametrize("traces", TRACES)
def test_batches_with_as_many_positions_as_rows(lengths: tuple[int, int], traces: str) -> None:
    def draw(step: int, rows: int, random: torch.Generator) -> Tensor:
        return torch.randn(rows, lengths[step % 2], WIDTH, generator=random, dtype=torch.float64)

    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the parameters that take a pass per domain
        compare_with_domains(network(PositionsFirst()), exact_traces(traces), draw=draw)


class Checkpointed(nn.Module):
    """A linear layer, a parameter outside of layers and a layer that is run again, in a checkpoint."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(1, WIDTH))
        self.cell, self.reentrant = nn.GRUCell(WIDTH, WIDTH), reentrant

    def inner(self, x: Tensor) -> Tensor:
        x = self.linear(x) * self.scale
        return x + self.cell(x.flatten(0, 1)).view_as(x)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("traces", TRACES)
def test_activation_checkpointing(traces: str) -> None:
    torch.manual_seed(0)
    compare_with_domains(network(Checkpointed(reentrant=False)), TRACES[traces]())


def test_parameter_outside_of_layers_in_a_reentrant_checkpoint_raises() -> None:
    torch.manual_seed(0)
    model = network(Checkpointed(reentrant=True))
    with (
        pytest.warns(UserWarning, match="reentrant"),
        pytest.raises(ValueError, match=r"gradient of 2\.scale cannot be .* use_reentrant=False"),
    ):
        train(model, SHUFFLED, DenseTraces(), mixed=True)


class LoraWithDropout(nn.Linear):
    """At first the output is the same for all random numbers."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(2, WIDTH)), nn.Parameter(torch.zeros(WIDTH, 2))

    def forward(self, input: Tensor) -> Tensor:
        dropped = functional.dropout(input, 0.4, training=self.training)
        return super().forward(input) + functional.linear(functional.linear(dropped, self.down), self.up)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("traces", TRACES)
def test_dropout_before_a_zero(traces: str) -> None:
    torch.manual_seed(0)
    compare_with_domains(network(LoraWithDropout()), TRACES[traces]())


class Counting(nn.Module):
    """A layer whose output depends on the number of its forward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.count = nn.Parameter(torch.ones(WIDTH)), 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += self.training
        return x * self.scale


def test_layers_that_are_run_again_keep_their_attributes() -> None:
    layer = Counting()
    train(network(layer), SHUFFLED, DenseTraces(), mixed=True, steps=3)
    assert layer.count == 3


class AllKinds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.scale, self.shift = nn.Parameter(torch.randn(WIDTH)), nn.Parameter(torch.randn(WIDTH))
        self.recurrent = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.recurrent(self.linear(x) * (self.scale * self.shift))[0])


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("frozen", ["linear.weight", "norm.bias", "shift", "recurrent.*_ih_*", "recurrent.*"])
@pytest.mark.parametrize("traces", ["dense", "projected"])
def test_optimizer_with_frozen_parameters(frozen: str, traces: str) -> None:
    torch.manual_seed(0)
    layer = AllKinds()
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(not fnmatch.fnmatch(name, frozen))
    compare_with_domains(network(layer), TRACES[traces]())


@pytest.mark.parametrize("traces", ["dense", "projected"])
def test_a_batch_is_freed_when_it_ends(traces: str) -> None:
    """Without the garbage collector, which runs too rarely for the memory of an accelerator."""
    torch.manual_seed(0)
    inputs: list[weakref.ref[Tensor]] = []
    shape = len(SHUFFLED), LENGTH
    model = network(AllKinds())
    model[2].recurrent.register_forward_pre_hook(lambda _, args: inputs.append(weakref.ref(args[0])))
    mixer = new_mixer(model, traces=TRACES[traces](), horizon=9)
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            x = torch.randn(*shape, WIDTH, dtype=torch.float64)
            with mixer.batch(SHUFFLED) as scope:
                scope.weighted_loss(row_losses(model, x)).backward()
            mixer.step()
        alive = sum(type(one) is Tensor and one.shape[:2] == shape for one in gc.get_objects())
    finally:
        gc.enable()
    assert not any(reference() is not None for reference in inputs)
    assert alive == 1  # x
