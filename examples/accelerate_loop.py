"""A training loop with Accelerate: three domains of regression data; the target is like one of them."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils import data

from mixwell.integrations.loops import MixerLoop, MixtureLoader

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
loader = MixtureLoader(sources, batch_size=48)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
loader = MixerLoop(loader, model, optimizer, validation, row_losses, mixer={"budget": STEPS})

for batch in loader:
    accelerator.backward(loader.weighted_loss(row_losses(model, batch)))
    optimizer.step()
    optimizer.zero_grad()

print(f"loss on the target: {row_losses(model, test).mean():.3f}")
print("average weights:", {name: round(weight, 3) for name, weight in loader.mixer.weights.average.items()})
