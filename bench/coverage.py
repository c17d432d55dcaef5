"""The share of a model's parameters whose gradients mixed batches do not separate by domain, for projected traces.

Run ``python bench/coverage.py``; it takes seconds on a CPU. Models are tiny ones of the configurations of
transformers, and of PyTorch's own layers.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

import mixwell

VOCABULARY, LENGTH, ROWS = 64, 12, 6


def small(config: type, model: type, **options: object) -> nn.Module:
    """Return a model of transformers with two layers."""
    common = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
    }
    return model(config(**{**common, **options}))


class Tokens(nn.Module):
    """Embeddings, a sequence layer and a head."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.embedding, self.inner, self.head = nn.Embedding(VOCABULARY, 32), inner, nn.Linear(32, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        found = self.inner(self.embedding(input_ids))
        return self.head(found[0] if isinstance(found, tuple) else found)


t = transformers
MODELS: dict[str, Callable[[], nn.Module]] = {
    "GPT-2": lambda: t.GPT2LMHeadModel(
        t.GPT2Config(vocab_size=VOCABULARY, n_positions=32, n_embd=32, n_layer=2, n_head=2)
    ),
    "OPT": lambda: small(t.OPTConfig, t.OPTForCausalLM, ffn_dim=48, word_embed_proj_dim=32),
    "Llama": lambda: small(t.LlamaConfig, t.LlamaForCausalLM),
    "Gemma 3": lambda: small(t.Gemma3TextConfig, t.Gemma3ForCausalLM, head_dim=16),
    "Mamba": lambda: t.MambaForCausalLM(
        t.MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, state_size=8)
    ),
    "Mixtral": lambda: small(t.MixtralConfig, t.MixtralForCausalLM, num_local_experts=4),
    "nn.LSTM": lambda: Tokens(nn.LSTM(32, 32, num_layers=2, batch_first=True)),
    "nn.TransformerEncoderLayer": lambda: Tokens(nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)),
}


def left_out(model: nn.Module) -> tuple[float, dict[str, str]]:
    """Return the share of parameters that are left out after two steps, and the reasons by name."""
    domains = ["a", "b", "c"]
    traces = mixwell.ProjectedTraces(8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    mixer = mixwell.Mixer(model, optimizer, domains, horizon=4, signal=mixwell.Hypergradient(traces=traces))
    labels = torch.arange(ROWS) % len(domains)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            tokens = torch.randint(1, VOCABULARY, (ROWS, LENGTH))
            with mixer.batch(labels) as scope:
                output = model(input_ids=tokens)
                logits = output if isinstance(output, Tensor) else output.logits
                losses = functional.cross_entropy(
                    logits[:, :-1].transpose(1, 2), tokens[:, 1:], reduction="none"
                )
                scope.weighted_loss(losses.mean(dim=1)).backward()
            mixer.step()
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    return sum(sizes[name] for name in traces.unsupported) / sum(sizes.values()), traces.unsupported


def main() -> None:
    """Print a table."""
    print(f"torch {torch.__version__}, transformers {transformers.__version__}")
    print(f"{'model':28} left out")
    for name, make in MODELS.items():
        torch.manual_seed(0)
        try:
            share, reasons = left_out(make())
        except Exception as error:  # one model must not hide the others
            print(f"{name:28} {type(error).__name__}: {error}")
            continue
        print(f"{name:28} {share:8.1%}")
        for parameter, reason in list(reasons.items())[:3]:
            print(f"    {parameter}: {reason}")


if __name__ == "__main__":
    main()
