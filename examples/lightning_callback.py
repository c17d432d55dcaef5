"""A Lightning module: three domains of regression data; the target is like one of them."""

import lightning
import torch
from torch import nn
from torch.utils import data

from mixwell.integrations.lightning import MixerCallback, MixtureLoader

torch.manual_seed(0)
truth = {"clean": torch.randn(20, 5), "shifted": torch.randn(20, 5)}


def draw(source: str, rows: int) -> list[dict[str, torch.Tensor]]:
    """Rows of one domain; the labels of "noisy" are random."""
    x = torch.randn(rows, 20)
    y = torch.randn(rows, 5) * 2 if source == "noisy" else torch.tanh(x @ truth[source])
    return [{"x": one, "y": other} for one, other in zip(x, y, strict=True)]


class Regression(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 5))

    def row_losses(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return (self.net(batch["x"]) - batch["y"]).square().mean(dim=1)

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        return mixing.weighted_loss(self.row_losses(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


sources = {name: draw(name, 1000) for name in ("clean", "shifted", "noisy")}
validation = data.DataLoader(draw("shifted", 256), batch_size=128)
test = next(iter(data.DataLoader(draw("shifted", 1000), batch_size=1000)))

model = Regression()
loader = (mixing := MixerCallback(MixtureLoader(sources, batch_size=48), validation)).batches
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
trainer = lightning.Trainer(max_steps=400, callbacks=[mixing], **quiet)
trainer.fit(model, loader)
print(f"loss on the target: {model.row_losses(test).mean():.3f}")
print("average weights:", {name: round(weight, 3) for name, weight in mixing.mixer.weights.average.items()})
