"""A plain PyTorch loop: three domains of regression data; the target is like one of them.

python examples/custom_loop.py
"""

import torch
from torch import nn

import mixwell

BUDGET = 600
torch.manual_seed(0)
truth = {"clean": torch.randn(20, 5), "shifted": torch.randn(20, 5)}


def draw(source: str, rows: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch of one domain; the labels of "noisy" are random."""
    x = torch.randn(rows, 20)
    y = torch.randn(rows, 5) * 2 if source == "noisy" else torch.tanh(x @ truth[source])
    return x, y


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


domains = ["clean", "shifted", "noisy"]
model = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 5))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
mixer = mixwell.Mixer(model, optimizer, domains, budget=BUDGET, constraints=[mixwell.Floor(0.01)])

for _ in range(BUDGET):
    for domain in domains:
        with mixer.domain(domain) as scope:
            # Rows in proportion to the weights give less noise than equal numbers.
            value = loss(model, draw(domain, rows=max(1, round(96 * mixer.weights[domain]))))
            scope.record_loss(value)
            value.backward()
    mixer.step()
    if mixer.validation_due:
        with mixer.validation():
            loss(model, draw("shifted", rows=mixer.validation_rows(96))).backward()
    record = mixer.round_ended
    if record is not None:
        shown = "  ".join(f"{name} {weight:.3f}" for name, weight in record.new_weights.items())
        print(f"step {mixer.steps_done:4d}  {shown}")

print("average:", {name: round(weight, 3) for name, weight in mixer.weights.average.items()})
assert max(mixer.weights.last, key=mixer.weights.__getitem__) == "shifted"
