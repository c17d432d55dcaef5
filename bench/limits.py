"""The least price of projected traces, by arithmetic: rank by size of the model, beside what was measured.

A linear layer with a inputs and b outputs takes ``6 a b`` operations for every position of its input (forward,
and both products of the backward pass). A traced step adds the lesser of two: ``2 r (a + b + r)`` for every
position (``X A``, ``dY B`` and their product), or ``2 m r a b`` in all (``B^T G_j A`` of the domains' gradients,
which together take the arithmetic of their sum). In a round of T steps one of every s is traced; the validation
gradients take 5% of the rows of these steps. Attention's own products and everything that is not arithmetic are
left out.

    python bench/limits.py
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from pathlib import Path

from mixwell.simplex.rounds import VALIDATION_FRACTION, trace_interval

RANKS = (8, 16, 32, 64)
POSITIONS = 8192  # tokens of a step on one device
Shapes = list[tuple[int, int]]


def gpt(width: int) -> Shapes:
    """Inputs and outputs of the layers of a block: queries, keys and values, their output, and the MLP."""
    return [(width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)]


MODELS: dict[str, Shapes] = {
    "GPT 10.7 M (width 384)": gpt(384),
    "GPT-2 124 M (width 768)": gpt(768),
    "Llama 7 B (width 4096)": [(4096, 4096)] * 4 + [(4096, 11008)] * 2 + [(11008, 4096)],
}


def traced_step(shapes: Iterable[tuple[int, int]], rank: int, domains: int) -> float:
    """The operations of a traced step in addition to a plain one, relative to it."""
    plain = extra = 0
    for inputs, outputs in shapes:
        plain += 6 * inputs * outputs * POSITIONS
        positions = 2 * rank * (inputs + outputs + rank) * POSITIONS
        extra += min(positions, 2 * domains * rank * inputs * outputs)
    return extra / plain


def measured(path: Path) -> dict[str, list[dict[str, list[float]]]]:
    if not path.exists():
        return {}
    return {name: one["value"] for name, one in json.loads(path.read_text())["results"].items()}


def main() -> None:
    for domains in (4, 64):
        print(f"\na traced step over a plain one, m = {domains}, {POSITIONS} tokens")
        print(f"{'':26}" + "".join(f"{f'rank {rank}':>10}" for rank in RANKS))
        for name, shapes in MODELS.items():
            ratios = (1 + traced_step(shapes, rank, domains) for rank in RANKS)
            print(f"{name:26}" + "".join(f"{ratio:10.4f}" for ratio in ratios))
    print("\na round over plain training, rank 32, m = 64: traces alone, and with validation gradients")
    print(" " * 16 + "".join(f"{name:>26}" for name in MODELS))
    for horizon in (84, 152, 304, 537, 1073):
        s = trace_interval(horizon)
        cells: list[str] = []
        for shapes in MODELS.values():
            traces = traced_step(shapes, 32, 64) / s
            cells.append(f"{1 + traces:.4f}, {1 + traces + VALIDATION_FRACTION / s:.4f}")
        print(f"T = {horizon:4}, s = {s:2}" + "".join(f"{cell:>26}" for cell in cells))
    found = measured(Path(__file__).parent / "results" / "price.json")
    for name in (one for one in found if one.startswith("gpt")):
        times = {kind: statistics.median(values) for kind, values in found[name][0].items() if values}
        line = ", ".join(f"{kind} {times[kind] / times['plain']:.3f}" for kind in ("traced", "untraced"))
        print(f"measured (bench/price.py) {name}: {line} of a plain step")


if __name__ == "__main__":
    main()
