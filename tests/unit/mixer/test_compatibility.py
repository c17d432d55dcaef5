"""The mixer around the kinds of model and training that people have."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mixwell
from helpers.toy_problems import names, train

VOCABULARY, WIDTH, LENGTH = 11, 16, 9


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.dropout(self.out(mixed.transpose(1, 2).flatten(2)))


class Gpt(nn.Module):
    """A tiny language model with default (flash) attention and a head tied to the embedding."""

    def __init__(self, *, dropout: float = 0.0, checkpointing: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.checkpointing = checkpointing

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x)
        return self.head(x)


def token_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def token_batches(steps: int) -> tuple[list[dict[str, Tensor]], Tensor]:
    generator = torch.Generator().manual_seed(0)

    def draw(low: int, high: int) -> Tensor:
        return torch.randint(low, high, (8, LENGTH), generator=generator)

    return [{"d0": draw(0, 4), "d1": draw(4, 8), "d2": draw(0, 11)} for _ in range(steps)], draw(4, 8)


def run(model: nn.Module, *, optimizer=None, loss=token_loss, **settings) -> tuple[mixwell.Mixer, np.ndarray]:
    batches, validation = token_batches(12)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = optimizer or torch.optim.AdamW(trained, lr=3e-3)
    mixer = mixwell.Mixer(model, optimizer, names(3), horizon=6, **settings)
    train(mixer, model, batches, validation, loss)  # pyright: ignore[reportArgumentType]
    assert np.isfinite(mixer.weights.log).all()
    return mixer, np.array([list(r.scores.values()) for r in mixer.rounds])


def seeded(**settings) -> Gpt:
    torch.manual_seed(0)
    return Gpt(**settings)


def test_flash_attention_and_tied_weights() -> None:
    model = seeded()
    mixer, scores = run(model)
    assert mixer.weights["d1"] > mixer.weights["d0"]
    # The tied matrix is one parameter with one trace.
    assert sum("weight" in name and "embedding" in name for name in mixer.state_dict()["tensors"]) == 3
    assert not any("head" in name for name in mixer.state_dict()["tensors"])
    assert np.isfinite(scores).all()


def test_activation_checkpointing_changes_nothing() -> None:
    np.testing.assert_allclose(run(seeded(checkpointing=True))[1], run(seeded())[1], rtol=1e-4)


def test_compiled_model_gives_the_same_scores() -> None:
    model = seeded()
    plain = run(copy.deepcopy(model))
    compiled = torch.compile(model, backend="aot_eager")
    assert isinstance(compiled, nn.Module)
    mixer, scores = run(compiled)
    np.testing.assert_allclose(scores, plain[1], rtol=1e-3)
    assert plain[0].state_dict()["settings"] == mixer.state_dict()["settings"]


def test_dropout() -> None:
    _, scores = run(seeded(dropout=0.2))
    assert np.abs(scores).min() > 0


def test_bfloat16_autocast() -> None:
    def loss(model: nn.Module, tokens: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return token_loss(model, tokens)

    _, scores = run(seeded(), loss=loss)
    _, reference = run(seeded())
    centerd, expected = (s - s.mean(1, keepdims=True) for s in (scores, reference))
    cosine = (centerd * expected).sum() / np.sqrt((centerd**2).sum() * (expected**2).sum())
    assert cosine > 0.99
    assert not np.array_equal(scores, reference)


def test_bfloat16_parameters_have_float32_traces() -> None:
    mixer, _ = run(seeded().bfloat16())
    traces = {n: t for n, t in mixer.state_dict()["tensors"].items() if n.startswith("signal.traces")}
    assert {t.dtype for t in traces.values()} == {torch.float32}


@pytest.mark.parametrize("in_optimizer", [True, False])
def test_frozen_parameters_are_unchanged_and_ignored(in_optimizer: bool) -> None:
    model = seeded()
    model.embedding.weight.requires_grad_(False)
    before = model.embedding.weight.clone()
    params = [p for p in model.parameters() if p.requires_grad or in_optimizer]
    mixer, scores = run(model, optimizer=torch.optim.AdamW(params, lr=3e-3))
    assert torch.equal(model.embedding.weight, before)
    assert np.isfinite(scores).all()
    assert any("embedding" in n for n in mixer.state_dict()["tensors"]) == in_optimizer


class Experts(nn.Module):
    """One expert per domain: each domain leaves the others without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(3, 3)
        self.experts = nn.ModuleList(nn.Linear(3, 1) for _ in range(3))
        self.unused = nn.Linear(3, 3)

    def forward(self, x: Tensor, expert: int) -> Tensor:
        return self.experts[expert](torch.tanh(self.shared(x)))


@pytest.mark.parametrize(
    "signal", [mixwell.Hypergradient, lambda: mixwell.Hypergradient(traces=mixwell.ForwardModeTraces())]
)
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_parameters_without_gradient_in_some_domain(kind, signal) -> None:
    model = Experts()
    before = copy.deepcopy(model.unused.state_dict())
    mixer = mixwell.Mixer(
        model, kind(model.parameters(), lr=0.05, weight_decay=0.1), names(3), horizon=4, signal=signal()
    )
    for _ in range(40):
        for index in range(3):
            with mixer.domain(f"d{index}"):
                model(torch.randn(4, 3), index).square().mean().backward()
        mixer.step()
        if mixer.validation_due:
            with mixer.validation():
                model(torch.randn(16, 3), 1).square().mean().backward()
    # Validation asks for the second expert, on which the second domain alone acts directly.
    sizes = {name: sum(abs(record.scores[name]) for record in mixer.rounds) for name in names(3)}
    assert max(sizes, key=lambda name: sizes[name]) == "d1"
    for name, value in model.unused.state_dict().items():
        assert torch.equal(value, before[name])  # no gradient anywhere: the optimizer leaves it alone


def test_channels_last_convolutions() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3))
    reference = copy.deepcopy(model)
    model = model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    images = torch.randn(2, 6, 1, 8, 8)

    def scores(net: nn.Module) -> list[float]:
        mixer = mixwell.Mixer(net, torch.optim.SGD(net.parameters(), lr=0.1), names(2), horizon=2)
        for _ in range(2):
            for index in range(2):
                with mixer.domain(f"d{index}"):
                    batch = images[index].to(memory_format=torch.channels_last)
                    net(batch)[:, index].mean().backward()
            mixer.step()
        with mixer.validation():
            net(images[0])[:, 0].square().mean().backward()
        return list(mixer.rounds[-1].scores.values())

    assert scores(model) == pytest.approx(scores(reference), rel=1e-4)
