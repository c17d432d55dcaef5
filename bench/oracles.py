"""How good could weights be? The best static mixture and the best two-phase schedule that a search finds.

Half of the static mixtures are drawn at random (Dirichlet, with more and less concentration), half around the
best so far (by the validation loss). Two-phase schedules have one mixture in the first part of the steps and
another after it, both drawn around the best static one, uniform weights and each other. All runs have the
seed 0; the best of each kind is run again with other seeds, since the best of many runs is partly luck.
Everything is kept in a table, so that a search that was stopped continues.

    python bench/oracles.py fashion --static 30 --phases 20 --seeds 5 --out results/oracles
    python bench/oracles.py --defaults results/problems --out results/oracles

Printed: the test loss of the best static mixture and of the best schedule, less that of uniform weights, by seed.
Without a problem, all tables of the folder are read and compared with the default method at equal compute (its
runs by `bench/defaults.py` are in the folder --defaults): `regret.csv` has the paired differences with their 95%
intervals.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from measure import plain_parser
from numpy.typing import NDArray
from rich.console import Console

from mixwell.lab import problems, tables
from mixwell.lab.compare.results import RUNS
from mixwell.training import config_io, randomness
from mixwell.training.config import Config
from mixwell.training.run import Run
from mixwell.training.trainer import Trainer
from mixwell.utils.intervals import interval

Array = NDArray[np.float64]
SPLITS = (0.25, 0.5, 0.75)


def losses(config: Config, first: Array, second: Array, split: float, seed: int) -> dict[str, float]:
    """Validation and test loss of a run with one mixture, then another."""
    plain = config.model_dump(mode="json")
    names = list(config.domains)
    plain["seed"] = seed
    plain["mixer"] |= {
        "method": "fixed",
        "weights": dict(zip(names, first.tolist(), strict=True)),
        "options": {},
    }
    made = config_io.validate_config(plain, where="oracle")
    randomness.seed(seed)
    trainable, data = Run(made, Path("oracle"), console=Console(quiet=True)).load()
    trainer = Trainer(made, trainable, data.domains, data.validation)
    switch = int(split * made.steps)
    while not trainer.finished:
        if trainer.steps_done == switch:
            trainer.mixer.weights.advance(np.log(second), steps=switch)
        trainer.step()
    most = made.output.evaluate_rows
    found = {"validation": data.validation, "test": data.test}
    return {name: trainer.evaluate(rows, at_most=most) for name, rows in found.items() if rows is not None}


class Table:
    """Runs that were done, in a CSV file."""

    def __init__(self, path: Path) -> None:
        self.path, self.rows = path, tables.read(path)

    def run(self, config: Config, kind: str, first: Array, second: Array, split: float, seed: int) -> float:
        """Return the validation loss of a run, from the table if it was done before."""
        key: tables.Row = {
            "kind": kind,
            "seed": seed,
            "split": split,
            "first": json.dumps(first.round(4).tolist()),
            "second": json.dumps(second.round(4).tolist()),
        }
        known = [row for row in self.rows if all(row[name] == value for name, value in key.items())]
        if not known:
            found = losses(config, first, second, split, seed)
            row = {**key, **{name: round(value, 6) for name, value in found.items()}}
            self.rows.append(row)
            tables.write(self.path, self.rows)
            print(
                f"{len(self.rows):4d} {kind:8} {row['first']} {row['second']} {split:g}: {found}", flush=True
            )
            known = [row]
        return float(known[0]["validation"])

    def tried(self, kind: str) -> int:
        """How many runs of a kind the search has done."""
        return sum(row["kind"] == kind and row["seed"] == 0 for row in self.rows)

    def best(self, kind: str) -> tuple[Array, Array, float]:
        """The mixtures and the split of the best run of a kind, of seed 0."""
        own = [row for row in self.rows if row["kind"] == kind and row["seed"] == 0]
        row = min(own, key=lambda one: float(one["validation"]))
        first, second = (np.array(json.loads(str(row[part]))) for part in ("first", "second"))
        return first, second, float(row["split"])

    def tests(self, kind: str, chosen: tuple[Array, Array, float]) -> dict[int, float]:
        """The test losses of all runs of a mixture, by seed."""
        first, second = (json.dumps(one.round(4).tolist()) for one in chosen[:2])
        return {
            int(row["seed"]): float(row["test"])
            for row in self.rows
            if (row["kind"], row["first"], row["second"]) == (kind, first, second)
            and float(row["split"]) == chosen[2]
        }


def around(random: np.random.Generator, mixture: Array, size: float) -> Array:
    moved = np.maximum(mixture, 1e-3) * np.exp(size * random.standard_normal(len(mixture)))
    return moved / moved.sum()


def search(given: argparse.Namespace) -> None:
    """Search one problem, and run the best mixtures with all seeds."""
    folder = given.out / Path(given.problem).stem
    config = config_io.read_config(problems.find(given.problem, folder, Console()), given.set)
    table, m = Table(folder / f"oracles-{config.steps}.csv"), len(config.domains)
    uniform = np.full(m, 1 / m)
    table.run(config, "uniform", uniform, uniform, 0.5, 0)
    # Later draws are around the best so far, so a search that continues must not draw again what it has drawn.
    for k in range(table.tried("static"), given.static):
        random = np.random.default_rng((0, k))
        wide = random.dirichlet(np.full(m, (0.5, 1.0, 3.0)[k % 3]))
        mixture = (
            wide if k < given.static // 2 else around(random, table.best("static")[0], (0.7, 0.3)[k % 2])
        )
        mixture = np.maximum(mixture, 1e-4) / np.maximum(mixture, 1e-4).sum()
        table.run(config, "static", mixture, mixture, 0.5, 0)
    best = table.best("static")
    for k in range(table.tried("phases"), given.phases):
        random = np.random.default_rng((1, k))
        if k < given.phases // 2:
            first, second = (around(random, (uniform, best[0])[k % 2], 0.5), around(random, best[0], 0.5))
            split = SPLITS[k % 3]
        else:
            one, other, split = table.best("phases")
            first, second = around(random, one, 0.4), around(random, other, 0.4)
        table.run(config, "phases", first, second, split, 0)
    chosen = {"static": best, "phases": table.best("phases")} if given.phases else {"static": best}
    for seed in range(given.seeds):
        table.run(config, "uniform", uniform, uniform, 0.5, seed)
        for kind, one in chosen.items():
            table.run(config, kind, *one, seed)
    plain = table.tests("uniform", (uniform, uniform, 0.5))
    for kind, one in chosen.items():
        differences = {seed: loss - plain[seed] for seed, loss in table.tests(kind, one).items()}
        shown = ", ".join(f"{d:+.4f}" for d in differences.values())
        print(f"{kind}: {one[0].round(3)}, then {one[1].round(3)} after {one[2]:g} of the steps")
        print(f"  test loss to uniform weights: {shown}; mean {np.mean(list(differences.values())):+.4f}")


def compare(path: Path, defaults: Path) -> tables.Row | None:
    """The default against the best mixtures of a table, by seed; ``None`` where it was not run."""
    table, problem, steps = Table(path), path.parent.name, int(path.stem.split("-")[1])
    folders = [defaults / f"{problem}-{steps}", defaults / problem]
    runs = [row for folder in folders if (folder / RUNS).exists() for row in tables.read(folder / RUNS)]
    own = {
        variant: {
            int(row["seed"]): float(row["test_loss"])
            for row in runs
            if row["variant"] == variant and round(float(row["budget"])) == steps
        }
        for variant in ("uniform", "mixwell")
    }
    if not own["mixwell"]:
        return None
    row: tables.Row = {"problem": problem, "steps": steps, "tried": len(table.rows)}
    best: dict[int, float] = {}
    for kind in ("static", "phases"):
        losses = table.tests(kind, table.best(kind))
        seeds = sorted(losses.keys() & own["uniform"].keys())
        row[kind] = round(float(np.mean([losses[s] - own["uniform"][s] for s in seeds])), 4)
        best = losses if not best or np.mean(list(losses.values())) < np.mean(list(best.values())) else best
    seeds = sorted(best.keys() & own["mixwell"].keys())
    row["default"] = round(float(np.mean([own["mixwell"][s] - own["uniform"][s] for s in seeds])), 4)
    regret = interval([own["mixwell"][seed] - best[seed] for seed in seeds])
    values = {"regret": regret.mean, "low": regret.low, "high": regret.high}
    return {**row, "seeds": len(seeds), **{name: round(value, 4) for name, value in values.items()}}


def main() -> None:
    parser = plain_parser(__doc__)
    parser.add_argument("problem", nargs="?", help="search it; none: compare with the default")
    parser.add_argument("--static", type=int, default=30)
    parser.add_argument("--phases", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--set", action="append", default=[], help="key=value")
    parser.add_argument("--defaults", type=Path, default=Path("results/problems"))
    parser.add_argument("--out", type=Path, default=Path("runs/oracles"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.problem:
        search(given)
        return
    found = [compare(path, given.defaults) for path in sorted(given.out.glob("*/oracles-*.csv"))]
    rows = [row for row in found if row is not None]
    print(
        "test loss less that of uniform weights: best static, best of two phases, default; default less the best"
    )
    for row in rows:
        print(
            f"{row['problem']:12}{row['steps']:5}  static {row['static']:+.4f}  phases {row['phases']:+.4f}  "
            f"default {row['default']:+.4f}  regret {row['regret']:+.4f} [{row['low']:+.4f}, {row['high']:+.4f}], "
            f"{row['seeds']} seeds, {row['tried']} runs"
        )
    tables.write(given.out / "regret.csv", rows)


if __name__ == "__main__":
    main()
