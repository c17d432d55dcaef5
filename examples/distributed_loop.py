"""A custom training loop on several ranks, with DistributedDataParallel or FSDP2.

torchrun --standalone --nproc-per-node 2 examples/distributed_loop.py
torchrun --standalone --nproc-per-node 2 examples/distributed_loop.py --fsdp
python examples/distributed_loop.py
"""

import os
import sys

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import mixwell

BUDGET = 300
if "RANK" in os.environ:
    torch.distributed.init_process_group("gloo")
first = os.environ.get("RANK", "0") == "0"


def main() -> None:
    torch.manual_seed(0)
    truth = {"clean": torch.randn(20, 5), "shifted": torch.randn(20, 5)}

    def rows(source: str, count: int = 4096) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows of one domain, the same on all ranks; the labels of "noisy" are random."""
        x = torch.randn(count, 20)
        return x, torch.randn(count, 5) * 2 if source == "noisy" else torch.tanh(x @ truth[source])

    domains = {name: rows(name) for name in ("clean", "shifted", "noisy")}
    wanted = rows("shifted", 512)

    model: nn.Module = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 5))
    if torch.distributed.is_initialized():
        model = fully_shard(model) if "--fsdp" in sys.argv else DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    mixer = mixwell.Mixer(model, optimizer, list(domains), budget=BUDGET, constraints=[mixwell.Floor(0.01)])

    # All ranks draw the same 97 rows of a step, and each gets its own rows of them.
    for batch in mixwell.MixtureLoader(domains, 97).follow(mixer):
        for part in batch.by_domain():
            x, y = part.rows
            with mixer.domain(part) as scope:
                # Ranks can have different numbers of rows of a domain, so their losses are scaled.
                scope.scaled_loss(nn.functional.mse_loss(model(x), y)).backward()
        mixer.step()
        if mixer.validation_due:
            own = slice(int(os.environ.get("RANK", 0)), None, int(os.environ.get("WORLD_SIZE", 1)))
            with mixer.validation():
                nn.functional.mse_loss(model(wanted[0][own]), wanted[1][own]).backward()
        record = mixer.round_ended
        if first and record is not None:
            shown = "  ".join(f"{name} {weight:.3f}" for name, weight in record.new_weights.items())
            print(f"step {mixer.steps_done:4d}  {shown}")

    assert max(mixer.weights.last, key=mixer.weights.__getitem__) == "shifted"


main()
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
