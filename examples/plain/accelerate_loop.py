"""A training loop with Accelerate: three domains of regression data; the target is like one of them."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils import data

STEPS = 600
torch.manual_seed(0)
truth = {"clean": torch.randn(20, 5), "shifted": torch.randn(20, 5)}


def draw(source: str, rows: int) -> list[dict[str, torch.Tensor]]:
    """Rows of one domain; the labels of "noisy" are random."""
    x = torch.randn(rows, 20)
    y = torch.randn(rows, 5) * 2 if source == "noisy" else torch.tanh(x @ truth[source])
    return [{"x": one, "y": other} for one, other in zip(x, y, strict=True)]


def row_losses(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return (model(batch["x"]) - batch["y"]).square().mean(dim=1)


sources = {name: draw(name, 1000) for name in ("clean", "shifted", "noisy")}
validation = data.DataLoader(draw("shifted", 256), batch_size=128)
test = next(iter(data.DataLoader(draw("shifted", 1000), batch_size=1000)))

accelerator = Accelerator(cpu=True)
model = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 5))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
rows = data.ConcatDataset(list(sources.values()))
loader = data.DataLoader(rows, batch_size=48, sampler=data.RandomSampler(rows, num_samples=48 * STEPS))
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

for batch in loader:
    accelerator.backward(row_losses(model, batch).mean())
    optimizer.step()
    optimizer.zero_grad()

print(f"loss on the target: {row_losses(model, test).mean():.3f}")
