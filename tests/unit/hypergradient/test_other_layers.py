"""Layers without a rule of their own: parameters and scores of mixed batches are those of one batch per domain."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, prune

from helpers.layer_networks import LENGTH, TRACES, WIDTH, network, row_losses, train
from helpers.mixed_batches import DOMAINS, LABELS, SHUFFLED, last_scores, new_mixer
from mixwell import DenseTraces, Hypergradient, Mixer

pytestmark = pytest.mark.filterwarnings("error")

VOCABULARY = 11


class LoraLinear(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.down, self.up = nn.Parameter(torch.randn(2, WIDTH)), nn.Parameter(torch.randn(WIDTH, 2))

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + functional.linear(functional.linear(input, self.down), self.up)


class MaskedLinear(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("mask", torch.ones(WIDTH, WIDTH).tril())
        self.mask: Tensor

    def forward(self, input: Tensor) -> Tensor:
        return functional.linear(input, self.weight * self.mask, self.bias)


class CosineLinear(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        return functional.linear(
            functional.normalize(input, dim=-1), functional.normalize(self.weight, dim=-1)
        )


class DropoutScale(nn.Module):
    """Draws other random numbers when it is run again."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(x, 0.5, training=self.training) * self.scale


class Recurrent(nn.Module):
    def __init__(self, kind: Any, *, batch_first: bool) -> None:
        super().__init__()
        self.inner, self.batch_first = kind(WIDTH, WIDTH, num_layers=2, batch_first=batch_first), batch_first

    def forward(self, x: Tensor) -> Tensor:
        found, last = self.inner(x if self.batch_first else x.transpose(0, 1))
        hidden = last[0] if isinstance(last, tuple) else last
        found = found if self.batch_first else found.transpose(0, 1)
        return found + hidden[-1].unsqueeze(1)


class Cells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        state: Any = None
        found = []
        for step in x.unbind(1):
            state = self.cell(step, state)
            found.append(state[0])
        return torch.stack(found, dim=1)


class Attention(nn.Module):
    def __init__(self, *, batch_first: bool = True) -> None:
        super().__init__()
        self.inner, self.batch_first = nn.MultiheadAttention(WIDTH, 2, batch_first=batch_first), batch_first

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        if self.batch_first:
            return self.inner(x, x, x, attn_mask=mask, need_weights=False)[0]
        t = x.transpose(0, 1)
        return self.inner(t, key=t, value=t, attn_mask=mask)[0].transpose(0, 1)


class Bags(nn.Module):
    """An EmbeddingBag over bags of different sizes, which begin at offsets."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.EmbeddingBag(VOCABULARY, WIDTH, mode="mean")

    def forward(self, x: Tensor) -> Tensor:
        rows = len(x)
        tokens = (x.abs().sum(dim=-1) * 7).long() % VOCABULARY
        sizes = torch.arange(rows) % 3 + 1
        flat = torch.cat([one[:size] for one, size in zip(tokens, sizes.tolist(), strict=True)])
        return x + self.inner(flat, sizes.cumsum(0) - sizes).unsqueeze(1)


class Positions(nn.Module):
    """A table of positions as GPT-2 (one row), nanoGPT (no rows) and vision transformers (a parameter) have it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        if kind == "parameter":
            self.places = nn.Parameter(torch.randn(1, 9, WIDTH))
            self.start = nn.Parameter(torch.randn(1, 1, WIDTH))
            self.linear = nn.Linear(WIDTH, WIDTH)
        else:
            self.table = nn.Embedding(9, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "parameter":
            x = torch.cat([self.start.expand(len(x), -1, -1), x], dim=1)
            return self.linear(torch.tanh(x + self.places[:, : x.shape[1]]))[:, 1:]
        places = torch.arange(x.shape[1])
        return torch.tanh(x + self.table(places if self.kind == "vector" else places.unsqueeze(0)))


class Functional(nn.Module):
    """Parameters next to submodules, and layers whose weights are used without calling them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.decay = nn.Parameter(torch.randn(WIDTH))
        self.factors = nn.ParameterDict({"one": nn.Parameter(torch.randn(1, WIDTH))})
        self.matrix = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x) * torch.exp(-self.decay.exp()) * self.factors["one"].flatten()
        return torch.tanh(functional.linear(x, self.matrix)) + x @ (self.matrix * 0.5)


class NotCalled(nn.Module):
    """Layers that hold weights for functions, as in Mamba, and a table that is also the head's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.inner = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.convolution = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x.abs().sum(dim=-1) * 7).long() % VOCABULARY
        x = x + self.table(tokens)
        mixed = functional.conv1d(
            x.transpose(1, 2), self.convolution.weight, self.convolution.bias, padding=1, groups=WIDTH
        )
        x = x + torch.tanh(mixed.transpose(1, 2) @ self.inner.weight.t() + self.inner.bias)
        return x + functional.linear(x, self.table.weight).softmax(dim=-1)[..., :WIDTH]


class Experts(nn.Module):
    """Tokens are sent to the experts of a parameter with three dimensions; one of them has no tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        self.experts = ExpertWeights()

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, WIDTH)
        scores = torch.softmax(self.router(tokens), dim=-1)
        best, chosen = scores[:, :2].max(dim=-1)
        return self.experts(tokens, chosen, top_k_weights=best).view_as(x)


class ExpertWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(3, WIDTH, WIDTH) / 3)
        self.activation = nn.SiLU()

    def forward(self, x: Tensor, chosen: Tensor, top_k_weights: Tensor) -> Tensor:
        found = torch.zeros_like(x)
        for expert in chosen.unique().tolist():
            (places,) = torch.where(chosen == expert)
            inner = self.activation(functional.linear(x[places], self.weights[expert]))
            found.index_add_(0, places, inner * top_k_weights[places, None])
        return found


class SeesOtherThanRows(nn.Module):
    """A linear layer that is also applied to a table without rows, and to an identity without any effect."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.table = nn.Embedding(7, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        norm = self.inner(torch.eye(WIDTH, dtype=x.dtype)).norm().detach()
        return torch.tanh(self.inner(x) / norm + self.inner(self.table(torch.arange(7))).mean(dim=0))


class Swapped(nn.Linear):
    """The forward pass of the instance is its own, and must be there after training."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.forward = self.doubled

    def doubled(self, input: Tensor) -> Tensor:
        return 2 * functional.linear(input, self.weight, self.bias)

    def __deepcopy__(self, memo: dict) -> Swapped:
        twin = Swapped().to(self.weight.dtype)
        twin.load_state_dict(self.state_dict())
        return twin


class PrunedLinear(nn.Module):
    """Pruned anew in every copy: PyTorch cannot copy a pruned layer after a forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        mask = torch.ones(WIDTH, WIDTH).tril()
        prune.custom_from_mask(self.inner, "weight", mask)
        self.inner.weight = self.inner.weight.detach()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class FirstState(nn.Module):
    """A recurrent network that begins in a state that is a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.state = (
            nn.GRU(WIDTH, WIDTH, batch_first=True),
            nn.Parameter(torch.randn(1, 1, WIDTH)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, self.state.expand(-1, len(x), -1).contiguous())[0]


class Pooling(nn.Module):
    """Attention with a parameter as the query, as in vision transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.randn(1, 2, WIDTH))
        self.inner = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.query.expand(len(x), -1, -1), x, x)[0].mean(dim=1, keepdim=True)


class Queries(nn.Module):
    """A decoder of learned queries, as for detection: its first layer sees no rows."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Embedding(4, WIDTH)
        self.inner = nn.TransformerDecoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        queries = self.queries.weight.unsqueeze(0).expand(len(x), -1, -1)
        return x + self.inner(queries, x).mean(dim=1, keepdim=True)


class PositionsFromOutside(nn.Module):
    def __init__(self, places: Callable[[int], Tensor]) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(9, WIDTH), places

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x + self.table(self.places(x.shape[1])))


class PositionsOfAttribute(nn.Module):
    """The indices are neither a parameter nor a buffer, and as many as there are rows."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(9, WIDTH), torch.arange(len(LABELS))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x + self.table(self.places)[: x.shape[1]])


POSITIONS = [torch.arange(count) for count in range(LENGTH + 1)]


def changed_output(_: nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor:
    return 1.03 * output


def hooked() -> nn.Module:
    layer = nn.Linear(WIDTH, WIDTH)
    layer.register_forward_hook(changed_output)
    return layer


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "lora": LoraLinear,
    "masked": MaskedLinear,
    "cosine": CosineLinear,
    "forward of the instance": Swapped,
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH)),
    "pruned": PrunedLinear,
    "embedding bag with offsets": Bags,
    "lstm": lambda: Recurrent(nn.LSTM, batch_first=True),
    "lstm, positions first": lambda: Recurrent(nn.LSTM, batch_first=False),
    "gru": lambda: Recurrent(nn.GRU, batch_first=True),
    "lstm cell": Cells,
    "attention": Attention,
    "attention, positions first": lambda: Attention(batch_first=False),
    "encoder layer": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True),
    "positions, one row": lambda: Positions("row"),
    "positions, no rows": lambda: Positions("vector"),
    "positions, parameter": lambda: Positions("parameter"),
    "functional": Functional,
    "layers that are not called": NotCalled,
    "experts": Experts,
    "other than rows": SeesOtherThanRows,
    "output changed by a hook": hooked,
    "first state": FirstState,
    "pooling": Pooling,
    "queries": Queries,
    "positions from outside": lambda: PositionsFromOutside(POSITIONS.__getitem__),
    "positions of an attribute": PositionsOfAttribute,
}


@pytest.mark.parametrize("labels", [LABELS, SHUFFLED], ids=["sorted", "shuffled"])
@pytest.mark.parametrize("traces", TRACES)
@pytest.mark.parametrize("name", LAYERS)
def test_parameters_and_scores_are_those_of_one_batch_per_domain(
    name: str, traces: str, labels: Tensor
) -> None:
    torch.manual_seed(0)
    model = network(LAYERS[name]())
    twin = copy.deepcopy(model)
    forward = vars(twin[2]).get("forward")
    apart = train(model, labels, DenseTraces(), mixed=False)
    mixed = train(twin, labels, TRACES[traces](), mixed=True)
    for (key, one), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(
            other, one, rtol=1e-9, atol=1e-12, msg=lambda text, key=key: f"{key}: {text}"
        )
    assert vars(twin[2]).get("forward") == forward
    tolerance: dict[str, Any] = {"rtol": 0.03, "atol": 1e-3} if traces == "bfloat16" else {"rtol": 1e-8}
    np.testing.assert_allclose(last_scores(mixed), last_scores(apart), **tolerance)


@pytest.mark.parametrize("traces", ["dense", "projected"])
@pytest.mark.parametrize(
    "make",
    [DropoutScale, lambda: parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))],
    ids=["dropout", "spectral norm"],
)
def test_layers_that_would_not_repeat(make: Callable[[], nn.Module], traces: str) -> None:
    """One more pass would draw other numbers, or iterate once more; compared with one graph for all domains."""
    torch.manual_seed(0)
    model = network(make())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    signal = Hypergradient(0.0, TRACES[traces](), points=1)
    mixer = Mixer(model, optimizer, DOMAINS, horizon=4, signal=signal, update=1.0)
    twin = copy.deepcopy(model)
    parameters = list(model.parameters())
    wanted = torch.zeros(3, sum(p.numel() for p in parameters), dtype=torch.float64)
    for step in range(4):
        x = torch.randn(len(SHUFFLED), LENGTH, WIDTH, dtype=torch.float64)
        torch.manual_seed(step)
        losses = row_losses(twin, x)
        for domain in range(3):
            own = losses[torch.eq(SHUFFLED, domain)].mean()
            found = torch.autograd.grad(own, list(twin.parameters()), retain_graph=True)
            wanted[domain] += 0.05 * torch.cat([one.flatten() for one in found])
        torch.manual_seed(step)
        with mixer.batch(SHUFFLED) as scope:
            scope.weighted_loss(row_losses(model, x)).backward()
        mixer.step()
        with torch.no_grad():
            for one, other in zip(twin.parameters(), parameters, strict=True):
                one.copy_(other)
    model.eval()
    x = torch.randn(4, LENGTH, WIDTH, dtype=torch.float64)
    with mixer.validation():
        row_losses(model, x).mean().backward()
    gradient = torch.autograd.grad(row_losses(model, x).mean(), parameters)
    expected = -(wanted @ torch.cat([one.flatten() for one in gradient])).numpy()
    np.testing.assert_allclose(last_scores(mixer), expected, rtol=1e-5)


class RoundedWeight(nn.Parameter):
    """A weight with a product of its own, as quantized weights have it."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is functional.linear:
            x, weight, *rest = (one.as_subclass(Tensor) if isinstance(one, cls) else one for one in args)
            return functional.linear(x * 3, weight, *rest)
        return super().__torch_function__(func, types, args, kwargs or {})


def test_layer_that_must_not_be_fused_is_named() -> None:
    torch.manual_seed(0)
    model = network(nn.Linear(WIDTH, WIDTH, bias=False))
    model[2].weight = RoundedWeight(model.get_parameter("2.weight").detach())
    twin = network(nn.Linear(WIDTH, WIDTH, bias=False))
    twin.load_state_dict({name: value.as_subclass(Tensor) for name, value in model.state_dict().items()})
    twin[2].weight = RoundedWeight(twin.get_parameter("2.weight").detach())
    train(model, LABELS, DenseTraces(), mixed=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(twin, LABELS, DenseTraces(), mixed=True)
    assert any("layer 2 is not fused" in str(one.message) for one in caught)
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(other.as_subclass(Tensor), one.as_subclass(Tensor), rtol=1e-9, atol=1e-12)


class PositionsFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x.transpose(0, 1)))).transpose(0, 1)


def test_layers_with_positions_first_are_named() -> None:
    model = PositionsFirst().double()
    mixer = new_mixer(model)
    x = torch.randn(6, LENGTH, WIDTH, dtype=torch.float64)
    message = r"not the batch in layer first; use batch_first=True"
    with pytest.raises(ValueError, match=message), mixer.batch(LABELS) as scope:
        scope.weighted_loss(row_losses(model, x)).backward()


class Keys(nn.Module):
    """Attention: the bias of the keys adds the same to all scores of a query, so that its gradient is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).transpose(1, 2)
        return torch.softmax(scores, dim=-1) @ self.value(x)


@pytest.mark.parametrize("traces", TRACES)
def test_gradients_that_are_zero_but_for_rounding_are_no_reason(traces: str) -> None:
    torch.manual_seed(0)
    model = network(Keys()).float()
    mixer = new_mixer(model, traces=TRACES[traces]())
    for _ in range(2):
        with mixer.batch(LABELS) as scope:
            scope.weighted_loss(row_losses(model, torch.randn(6, LENGTH, WIDTH))).backward()
        mixer.step()


@pytest.mark.parametrize("traces", TRACES)
@pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0)])
def test_parameters_without_elements(shape: tuple[int, ...], traces: str) -> None:
    class Empty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.empty = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.zeros(shape))

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) + self.empty.sum()

    torch.manual_seed(0)
    model = network(Empty())
    twin = copy.deepcopy(model)
    apart = train(model, LABELS, DenseTraces(), mixed=False, steps=3)
    mixed = train(twin, LABELS, TRACES[traces](), mixed=True, steps=3)
    tolerance: dict[str, Any] = {"rtol": 0.03, "atol": 1e-3} if traces == "bfloat16" else {"rtol": 1e-8}
    np.testing.assert_allclose(last_scores(mixed), last_scores(apart), **tolerance)


@pytest.mark.parametrize("traces", TRACES)
def test_linear_layer_without_inputs(traces: str) -> None:
    class Narrow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.none, self.inner = nn.Linear(0, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) + self.none(x[..., :0])

    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the initialization of an empty tensor
        model = network(Narrow())
    twin = copy.deepcopy(model)
    train(model, LABELS, DenseTraces(), mixed=False, steps=3)
    train(twin, LABELS, TRACES[traces](), mixed=True, steps=3)
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-9, atol=1e-12)
