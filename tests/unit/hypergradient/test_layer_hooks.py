"""Layer hooks with checkpointing, autocast and compilation; unsupported parameters; rows that are mixed."""

from __future__ import annotations

import copy
import warnings

import numpy as np
import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import mixwell
from helpers.mixed_batches import (
    EXACT,
    LABELS,
    SHUFFLED,
    TokenModel,
    draw_steps,
    last_scores,
    new_mixer,
    row_losses,
    tokens,
    train_by_domain,
    train_mixed,
    train_steps,
)
from mixwell import Hypergradient, ProjectedTraces
from mixwell.reference.comparison import tangent_cosine
from mixwell.training.models.gpt import Gpt

pytestmark = pytest.mark.filterwarnings("error")


class Checkpointed(nn.Module):
    def __init__(self, inner: TokenModel, *, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner.embedding(x)
        body = nn.Sequential(self.inner.first, self.inner.shared, nn.Tanh(), self.inner.second)
        return self.inner.head(checkpoint(body, x, use_reentrant=self.reentrant))


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_changes_nothing(reentrant: bool) -> None:
    inner = TokenModel().double()
    del inner.bend
    plain, checked = Straight(copy.deepcopy(inner)), Checkpointed(inner, reentrant=reentrant)
    steps, validation = draw_steps(tokens, 3)
    left = train_mixed(plain, torch.optim.SGD(plain.parameters(), lr=0.1), steps, validation, LABELS)
    optimizer = torch.optim.SGD(checked.parameters(), lr=0.1)
    if reentrant:
        with pytest.warns(UserWarning, match="reentrant"):
            right = train_mixed(checked, optimizer, steps, validation, LABELS)
    else:
        right = train_mixed(checked, optimizer, steps, validation, LABELS)
    np.testing.assert_allclose(last_scores(right), last_scores(left), rtol=1e-9)


class Straight(Checkpointed):
    def __init__(self, inner: TokenModel) -> None:
        super().__init__(inner, reentrant=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner.embedding(x)
        return self.inner.head(self.inner.second(torch.tanh(self.inner.shared(self.inner.first(x)))))


def test_autocast_to_bfloat16() -> None:
    torch.manual_seed(0)
    model = Gpt(64, context=16, layers=2, heads=2, width=64)
    start = copy.deepcopy(model)
    labels = torch.arange(3).repeat_interleave(8)
    drawn = [torch.randint(20 * j, 20 * j + 20, (8, 17)) for j in range(3)]
    steps = [(t[:, :-1], t[:, 1:]) for t in [torch.cat(drawn)] * 5]
    validation = (drawn[1][:, :-1], drawn[1][:, 1:])
    left = train_by_domain(model, torch.optim.SGD(model.parameters(), lr=0.1), steps, validation, labels)
    found = []
    for rank in (EXACT, 16):
        twin = copy.deepcopy(start)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
            right = train_mixed(twin, optimizer, steps, validation, labels, ProjectedTraces(rank))
        found.append(tangent_cosine(last_scores(right), last_scores(left)))
    assert found[0] > 0.99
    assert found[1] > 0.98


@pytest.mark.parametrize("traces", [lambda: ProjectedTraces(EXACT), mixwell.DenseTraces])
def test_a_compiled_model_is_captured(traces) -> None:
    """It runs eagerly where hooks look at its layers, and compiled everywhere else."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Gpt(11, context=8, layers=2, heads=2, width=8)
    twin = copy.deepcopy(model)
    steps, validation = draw_steps(tokens, 4)
    results = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the compiler
        for one, seen in ((model, model), (twin, torch.compile(twin, backend="aot_eager"))):
            assert isinstance(seen, nn.Module)
            row_losses(seen, steps[0])  # compiled before there are hooks
            optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
            results.append(last_scores(train_mixed(seen, optimizer, steps, validation, SHUFFLED, traces())))
    np.testing.assert_allclose(results[1], results[0], rtol=1e-4)


def test_model_run_outside_block_raises() -> None:
    model = nn.Linear(4, 3)
    mixer = new_mixer(model, traces=ProjectedTraces(2))
    losses = model(torch.randn(6, 4)).square().mean(1)
    with pytest.raises(ValueError, match=r"no layer of the model was run: call it inside `with mixer.batch"):
        with mixer.batch(LABELS) as batch:
            batch.weighted_loss(losses).backward()


def test_steps_that_are_not_traced_run_compiled_code() -> None:
    """Nothing is compiled anew after a traced step, in which the same model runs eagerly with hooks."""
    torch._dynamo.reset()
    graphs: list[int] = []

    def backend(module: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        def counted(*args: torch.Tensor) -> object:
            graphs.append(len(args))
            return module(*args)

        return counted  # type: ignore[return-value]

    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    compiled = torch.compile(model, backend=backend)
    assert isinstance(compiled, nn.Module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    signal = Hypergradient(traces=ProjectedTraces(2), trace_every=3)
    mixer = mixwell.Mixer(compiled, optimizer, ["a", "b", "c"], horizon=12, signal=signal)
    x, used = torch.randn(6, 4), []
    for _ in range(12):
        before = len(graphs)
        traced = mixer.trace_due
        with mixer.batch(LABELS) as batch:
            batch.weighted_loss(compiled(x).square().mean(1)).backward()
        mixer.step()
        used.append((traced, len(graphs) - before))
        if mixer.validation_due:
            with mixer.validation():
                compiled(x).square().mean().backward()
    assert {traced for traced, _ in used} == {True, False}
    assert all(runs == (0 if traced else 1) for traced, runs in used)


def test_model_is_not_modified() -> None:
    model = TokenModel()
    steps, _ = draw_steps(tokens, 1)
    train_steps(new_mixer(model), model, steps)
    assert not any(module._forward_hooks for module in model.modules())
    copy.deepcopy(model)


class Loose(nn.Module):
    """A tied head, and a table outside of layers that is changed in place, which is not followed."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.position = nn.Parameter(torch.randn(5, 8) * 0.1)
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        sums = self.position.expand(len(x), -1, -1).clone()
        sums += self.embedding(x)
        return functional.linear(torch.tanh(self.linear(sums)), self.embedding.weight)


@pytest.mark.parametrize("check", [True, False])
def test_unsupported_parameters_are_named_and_ignored(check: bool) -> None:
    model = Loose().double()
    twin = copy.deepcopy(model)
    steps, validation = draw_steps(tokens, 3)
    left = train_by_domain(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        steps,
        validation,
        LABELS,
        signal=Hypergradient(traces=mixwell.DenseTraces(only=["linear.*", "embedding.*"])),
    )
    traces = ProjectedTraces(EXACT, check=check)
    with pytest.warns(UserWarning, match="of the parameters are") as caught:
        right = train_mixed(
            twin, torch.optim.SGD(twin.parameters(), lr=0.1), steps, validation, LABELS, traces
        )
    np.testing.assert_allclose(last_scores(right), last_scores(left), rtol=1e-9)
    assert set(traces.unsupported) == {"position"}
    (text,) = [str(one.message) for one in caught]
    assert "position (is part of a tensor that an operation changes in place" in text
    assert "unsupported='per_domain'" in text


@pytest.mark.parametrize(
    "traces",
    [ProjectedTraces(EXACT, unsupported="per_domain"), mixwell.DenseTraces()],
    ids=["projected", "dense"],
)
def test_unsupported_parameters_by_one_pass_per_domain(traces: mixwell.Traces) -> None:
    model = Loose().double()
    twin = copy.deepcopy(model)
    steps, validation = draw_steps(tokens, 3)
    left = train_by_domain(model, torch.optim.SGD(model.parameters(), lr=0.1), steps, validation, LABELS)
    with pytest.warns(UserWarning, match="one more pass per domain"):
        right = train_mixed(
            twin, torch.optim.SGD(twin.parameters(), lr=0.1), steps, validation, LABELS, traces
        )
    np.testing.assert_allclose(last_scores(right), last_scores(left), rtol=1e-9)


@pytest.mark.parametrize(
    "make_traces", [lambda: ProjectedTraces(4), mixwell.DenseTraces], ids=["projected", "dense"]
)
def test_unsupported_parameters_are_known_after_resuming_in_mid_round(tmp_path, make_traces) -> None:
    steps, validation = draw_steps(tokens, 5)

    def start() -> tuple[nn.Module, mixwell.Mixer]:
        torch.manual_seed(0)
        model = Loose()
        return model, new_mixer(model, traces=make_traces(), horizon=5)

    model, undisturbed = start()
    first, stopped = start()
    second, resumed = start()
    with pytest.warns(UserWarning, match="of the parameters are"):
        train_steps(undisturbed, model, steps, validation)
    with pytest.warns(UserWarning, match="of the parameters are"):
        train_steps(stopped, first, steps[:3], validation)
    stopped.save(tmp_path / "mixer.safetensors")
    second.load_state_dict(first.state_dict())
    resumed.load(tmp_path / "mixer.safetensors")
    with pytest.warns(UserWarning, match="of the parameters are"):
        train_steps(resumed, second, steps[3:], validation)
    assert resumed.rounds == undisturbed.rounds


class LengthFirst(nn.Module):
    """Has the positions first and the rows second, as recurrent networks often do."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.linear = nn.Linear(8, 11)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(torch.tanh(self.embedding(x.t()))).transpose(0, 1)


class Normalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)))


def test_rows_in_second_dimension_raise() -> None:
    model = LengthFirst()
    mixer = new_mixer(model)
    drawn = torch.randint(0, 11, (6, 7))
    with (
        pytest.raises(ValueError, match="rows of a batch are not independent in layer"),
        mixer.batch(LABELS) as rows,
    ):
        rows.weighted_loss(row_losses(model, (drawn[:, :-1], drawn[:, 1:])))


def test_batch_norm_raises_unless_accepted() -> None:
    model = Normalized()
    mixer = new_mixer(model)
    batch = torch.randn(6, 4), torch.randint(0, 3, (6,))
    with (
        pytest.warns(UserWarning, match="belongs to a BatchNorm1d, which mixes the rows"),
        pytest.raises(ValueError, match=r"not independent in layer first .*BatchNorm"),
        mixer.batch(LABELS) as rows,
    ):
        rows.weighted_loss(row_losses(model, batch))
    assert all(p.grad is None for p in model.parameters())
    mixer = new_mixer(model, traces=ProjectedTraces(check=False))
    with pytest.warns(UserWarning, match=r"norm.weight \(belongs to a BatchNorm1d"):
        train_steps(mixer, model, [batch])


def test_model_without_supported_layers_raises() -> None:
    model = nn.BatchNorm1d(4)
    with (
        pytest.raises(
            ValueError, match=r"no layer of the model is supported.*weight \(belongs to a BatchNorm1d"
        ),
        new_mixer(model).batch(LABELS),
    ):
        pass


class CountingScale(nn.Module):
    """A layer without a rule of its own that counts its forward passes and draws a random number in each."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("passes", torch.zeros(()))
        self.passes: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        torch.rand(1)
        return x * self.scale


def test_recomputed_layers_change_neither_buffers_nor_random_numbers() -> None:
    model = nn.Sequential(nn.Linear(3, 4), CountingScale(), nn.Linear(4, 5))
    mixer = new_mixer(model, horizon=20)
    torch.manual_seed(0)
    for step in range(3):
        with mixer.batch(LABELS) as scope:
            scope.weighted_loss(row_losses(model, (torch.randn(6, 3), torch.randint(5, (6,))))).backward()
        mixer.step()
        assert int(model[1].passes) == step + 1
    drawn = torch.rand(1)
    torch.manual_seed(0)
    for _ in range(3):
        drawn_again = torch.randn(6, 3), torch.randint(5, (6,)), torch.rand(1)
        del drawn_again
    assert drawn == torch.rand(1)


class UsedTwice(nn.Module):
    """Uses a bias also outside of its layer, which only the comparison with the gradient shows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        sums = self.first.bias.expand(len(x), -1).clone()
        sums *= x.sum(dim=1, keepdim=True)
        return self.last(torch.tanh(self.first(x))) + sums.sum(dim=1, keepdim=True)


def test_unsupported_parameters_of_unverified_batches_are_known_after_resuming() -> None:
    """Micro-batches of one domain each are never verified, and the comparison is made once in a round."""

    def start() -> tuple[nn.Module, mixwell.Mixer]:
        torch.manual_seed(0)
        model = UsedTwice()
        return model, new_mixer(model, traces=ProjectedTraces(3), horizon=5)

    def train(model: nn.Module, mixer: mixwell.Mixer, steps: range) -> None:
        for step in steps:
            random = torch.Generator().manual_seed(step)
            for name in mixer.weights.names:
                with mixer.batch([name] * 2, expected_counts=dict.fromkeys(mixer.weights.names, 2)) as scope:
                    losses = model(torch.randn(2, 4, generator=random)).square().mean(dim=1)
                    scope.weighted_loss(losses).backward()
            mixer.step()
            if mixer.validation_due:
                with mixer.validation():
                    model(torch.randn(4, 4, generator=random)).square().mean().backward()

    model, undisturbed = start()
    first, stopped = start()
    second, resumed = start()
    with pytest.warns(UserWarning, match=r"first\.bias"):
        train(model, undisturbed, range(5))
    with pytest.warns(UserWarning, match=r"first\.bias"):
        train(first, stopped, range(2))
    second.load_state_dict(first.state_dict())
    resumed.load_state_dict(copy.deepcopy(stopped.state_dict()))
    with pytest.warns(UserWarning, match=r"first\.bias"):
        train(second, resumed, range(2, 5))
    assert resumed.rounds == undisturbed.rounds
