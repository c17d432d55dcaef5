"""How close the cheaper hypergradients are to that of dense float32 traces, over the same steps.

Domains really differ here: teachers of their own, turned images and random classes, kinds of text. Every variant
begins each round with the model and optimizer that the dense one had there; the weights stay uniform. Printed is
the tangent cosine over all rounds and draws of the data: the median and the worst. The settings of the projections
were chosen on other draws of the tasks mlp, mlp-adamw and text; cnn and mlp-m16 had no part in it.

    python bench/quality.py [--only mlp text] [--again]
"""

from __future__ import annotations

import copy
import statistics
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from domains import images, taught, text
from measure import Results, Round, parser, say
from workloads import MOST, SPLIT, VARIANTS, Workload, adamw, cnn, gpt, mlp, sgd

from mixwell.reference.comparison import tangent_cosine

REFERENCE = "dense"
COMPARED = tuple(name for name in MOST if name not in (REFERENCE, SPLIT))
FIRST_DRAW = 101
SMALL = partial(gpt, width=96, layers=3, heads=3)


@dataclass(frozen=True)
class Task:
    """What is compared on.

    Args:
        workload: the model and its data.
        seeds: draws of the data.
        rounds: of each.
    """

    workload: Workload
    seeds: int
    rounds: int


def task(*what: Any, seeds: int, rounds: int, more: tuple[str, ...] = (), **numbers: int) -> Task:
    # The weights hardly move, so that all variants train on the same mixture.
    return Task(Workload(*what, **numbers, variants=(*COMPARED, *more), update=1e-9), seeds, rounds)


TASKS = {
    "mlp": task(mlp, sgd, taught, domains=3, rows=64, horizon=20, seeds=3, rounds=5, more=("bfloat16",)),
    "mlp-adamw": task(mlp, adamw, taught, domains=3, rows=64, horizon=20, seeds=3, rounds=3),
    "mlp-m16": task(mlp, sgd, taught, domains=16, rows=12, horizon=20, seeds=2, rounds=3),
    "cnn": task(cnn, sgd, images, domains=3, rows=32, horizon=20, seeds=2, rounds=4),
    "text": task(SMALL, adamw, partial(text, 64), domains=4, rows=4, horizon=20, seeds=3, rounds=4),
}


def state(one: Round) -> tuple[dict[str, Any], dict[str, Any]]:
    assert one.trained is not None
    model, optimizer = one.trained
    return copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())


def set_back(one: Round, states: tuple[dict[str, Any], dict[str, Any]]) -> None:
    assert one.trained is not None
    for thing, kept in zip(one.trained, states, strict=True):
        thing.load_state_dict(copy.deepcopy(kept))


def cosines(chosen: Task, seed: int) -> dict[str, list[float]]:
    """By variant, one for each round."""
    workload = chosen.workload
    data = workload.data(seed)
    reference = VARIANTS[REFERENCE](workload, data)
    starts = []
    for _ in range(chosen.rounds):
        starts.append(state(reference))
        reference.run()
    found: dict[str, list[float]] = {}
    for name in workload.variants:
        variant = VARIANTS[name](workload, data)
        for start in starts:
            set_back(variant, start)
            variant.run()
        pairs = zip(variant.scores, reference.scores, strict=True)
        found[name] = [tangent_cosine(np.array(own), np.array(dense)) for own, dense in pairs]
    return found


def main() -> None:
    options = parser(__doc__, "quality.json", list(TASKS)).parse_args()
    results = Results(options.out, "bench/quality.py", again=options.again)
    for name in options.only:
        chosen = TASKS[name]
        found = []
        for draw in range(chosen.seeds):
            seed = FIRST_DRAW + draw
            found.append(results.get(f"{name}/{seed}", partial(cosines, chosen, seed)))
            say(f"{name}: draw {draw + 1} of {chosen.seeds}")
        workload = chosen.workload
        print(
            f"\n{name}: {workload.parameter_bytes / 4e6:.2f} M parameters, m = {workload.domains}, "
            f"T = {workload.horizon}; {chosen.rounds} rounds of each of {chosen.seeds} draws"
        )
        print(f"  {'variant':17}{'median':>8}{'worst':>9}   tangent cosine with dense float32 traces")
        for variant in workload.variants:
            every = [cosine for one in found for cosine in one[variant]]
            print(f"  {variant:17}{statistics.median(every):8.4f}{min(every):9.4f}", flush=True)


if __name__ == "__main__":
    main()
