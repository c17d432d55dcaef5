"""Adapters of PEFT in mixed batches: parameters and scores are those of one batch per domain."""

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

import mixwell
from mixwell import DenseTraces, Hypergradient, Mixer, ProjectedTraces

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

DOMAINS = ["a", "b", "c"]
LABELS = torch.tensor([2, 0, 1, 2, 0, 2])
VOCABULARY, LENGTH = 32, 7


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=16,
        n_embd=16,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return transformers.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=16,
    )
    return transformers.LlamaForCausalLM(config)


def lora(**options: Any) -> Any:
    # B is zero at first; with random values both matrices have gradients in the first step.
    return peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=2,
        lora_alpha=4,
        target_modules=["q_proj", "v_proj"],
        init_lora_weights=False,
        **options,
    )


ADAPTERS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "lora": (llama, lora),
    "lora on gpt-2": (
        gpt2,
        lambda: peft.LoraConfig(
            task_type="CAUSAL_LM",
            r=2,
            target_modules=["c_attn"],
            init_lora_weights=False,
            fan_in_fan_out=True,
        ),
    ),
    "lora on embeddings": (
        llama,
        lambda: peft.LoraConfig(
            task_type="CAUSAL_LM", r=2, target_modules=["embed_tokens"], init_lora_weights=False
        ),
    ),
    "dora": (llama, lambda: lora(use_dora=True)),
    "ia3": (
        llama,
        lambda: peft.IA3Config(
            task_type="CAUSAL_LM", target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]
        ),
    ),
    "prefix tuning": (gpt2, lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)),
    "prefix tuning with projection": (
        gpt2,
        lambda: peft.PrefixTuningConfig(
            task_type="CAUSAL_LM", num_virtual_tokens=3, prefix_projection=True, encoder_hidden_size=8
        ),
    ),
}


def row_losses(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(input_ids=tokens).logits[:, :-1]
    losses = functional.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")
    return losses.mean(dim=1)


def train(model: nn.Module, traces: mixwell.Traces, *, mixed: bool) -> Mixer:
    random = torch.Generator().manual_seed(0)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    mixer = Mixer(model, optimizer, DOMAINS, horizon=8, signal=Hypergradient(traces=traces), update=1.0)
    for _ in range(8):
        tokens = torch.randint(VOCABULARY, (len(LABELS), LENGTH), generator=random)
        if mixed:
            with mixer.batch(LABELS) as scope:
                scope.weighted_loss(row_losses(model, tokens)).backward()
        else:
            for place, name in enumerate(DOMAINS):
                with mixer.domain(name):
                    row_losses(model, tokens[torch.eq(LABELS, place)]).mean().backward()
        mixer.step()
        if mixer.validation_due:
            with mixer.validation():
                tokens = torch.randint(VOCABULARY, (4, LENGTH), generator=random)
                row_losses(model, tokens).mean().backward()
    return mixer


@pytest.mark.parametrize("traces", [DenseTraces, lambda: ProjectedTraces(10_000)], ids=["dense", "projected"])
@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters_in_mixed_batches(name: str, traces: Callable[[], mixwell.Traces]) -> None:
    torch.manual_seed(0)
    make, config = ADAPTERS[name]
    model = peft.get_peft_model(make().double(), config()).double()
    twin = copy.deepcopy(model)
    apart = train(model, DenseTraces(), mixed=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*of the parameters are")
        mixed = train(twin, traces(), mixed=True)
    for (key, one), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(
            other, one, rtol=1e-4, atol=1e-6, msg=lambda text, key=key: f"{key}: {text}"
        )
    scores = [np.array(list(one.rounds[-1].scores.values())) for one in (mixed, apart)]
    np.testing.assert_allclose(scores[0], scores[1], rtol=1e-4, atol=1e-7)  # norms are in float32
