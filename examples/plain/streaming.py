"""Two interleaved streams, interrupted and resumed without losing or repeating a row."""

import json
from typing import Any

import datasets
from torch.utils.data import DataLoader

STEPS, ROWS = 100, 32


def stream(name: str) -> datasets.IterableDataset:
    """Numbered rows of one dataset, in four shards."""
    rows = datasets.Dataset.from_dict({"text": [f"{name} {i}" for i in range(4000)]})
    return rows.to_iterable_dataset(num_shards=4)


def mixture() -> Any:
    streams = {"web": stream("web"), "code": stream("code")}
    return datasets.interleave_datasets(list(streams.values()), probabilities=[0.8, 0.2], seed=0)


def train(rows: Any, first: int, last: int) -> list[str]:
    """Return the texts of the training steps from first to last."""
    texts: list[str] = []
    for step, batch in zip(range(first, last), DataLoader(rows, ROWS), strict=False):
        texts += batch["text"]  # train on the batch here
        if step % 20 == 19:
            code = sum(text.startswith("code") for text in texts[-20 * ROWS :])
            print(f"step {step + 1:3d}: {code / ROWS / 20:.1%} of the last rows were code")
    return texts


print("uninterrupted:")
uninterrupted = train(mixture(), 0, STEPS)

print("interrupted and resumed:")
rows = mixture()
first_part = train(rows, 0, STEPS * 2 // 5)
saved = json.dumps(rows.state_dict())  # save it in a checkpoint; then, in a new process:
rows = mixture()
rows.load_state_dict(json.loads(saved))
resumed = train(rows, STEPS * 2 // 5, STEPS)

assert first_part + resumed == uninterrupted
assert len(set(uninterrupted)) == STEPS * ROWS
