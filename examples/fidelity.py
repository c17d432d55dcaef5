"""Compare the estimated hypergradient with the exact one, for several horizons.

python examples/fidelity.py
"""

import torch
from torch import nn

import mixwell

torch.manual_seed(0)
maps = {name: torch.randn(10, 4) for name in ("a", "b", "c")}
model = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)


def draw(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(32, 10)
    return x, torch.tanh(x @ maps[name])


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


for _ in range(20):  # the first updates of Adam are only signs, so train a little first
    optimizer.zero_grad()
    sum(loss(model, draw(name)) for name in maps).backward()
    optimizer.step()
for horizon in (1, 10, 50):
    batches = [{name: draw(name) for name in maps} for _ in range(horizon)]
    print(mixwell.measure_fidelity(model, optimizer, loss, batches, draw("b")), end="\n\n")
