"""How many rows a second one core chooses: python bench/sampler.py

Every step asks how often each domain is there and draws the indices of a batch, as training does; the weights
change every 84 steps. All is counted from the
first step of a new sampler on, the orders that it looks ahead included; reading the rows themselves is not.
`--rows` is the size of the domains: the larger, the more rounds the shuffle has. Median and range of several
repeats, by the processor's time of one thread.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import numpy as np

from mixwell.data.sampler import Rule, Sampler
from mixwell.utils import environment

RULES: tuple[Rule, ...] = ("weight", "equal")
BATCHES = (32, 256, 1024)
DOMAINS = (3, 16, 64)
HORIZON = 84


def rate(rows: int, domains: int, batch: int, rule: Rule, *, samples: int, seed: int) -> float:
    """Rows per second, in millions."""
    rng = np.random.default_rng(seed)
    sampler = Sampler({f"domain {i}": rows for i in range(domains)}, batch, rule=rule, seed=seed)
    steps = -(-samples // batch)
    weights = rng.dirichlet(np.full(domains, 2.0), size=steps // HORIZON + 1)
    begun = time.process_time()
    for step in range(steps):
        now = step // HORIZON
        sampler.inclusion(weights[now])
        sampler.draw(weights[now])
    return steps * batch / (time.process_time() - begun) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--samples", type=int, default=1_000_000, help="at least; per domain 32,768")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 1_000_000])
    parser.add_argument("--out", type=Path, default=Path("bench/results/sampler.json"))
    options = parser.parse_args()
    found: list[dict[str, object]] = []
    for rows in options.rows:
        print(f"domains of {rows:,} rows; millions of rows a second, median [min, max]")
        for domains in DOMAINS:
            for batch in BATCHES:
                told = f"  m={domains:<3} batch {batch:<5}"
                for rule in RULES:
                    rates = [
                        rate(
                            rows, domains, batch, rule, samples=max(options.samples, domains << 15), seed=seed
                        )
                        for seed in range(options.repeats)
                    ]
                    middle = statistics.median(rates)
                    told += f"   {rule} {middle:.2f} [{min(rates):.2f}, {max(rates):.2f}]"
                    found.append(
                        {
                            "rows": rows,
                            "domains": domains,
                            "batch": batch,
                            "rule": rule,
                            "million_rows_per_second": {
                                "median": middle,
                                "min": min(rates),
                                "max": max(rates),
                            },
                        }
                    )
                print(told, flush=True)
    result = {
        "environment": environment.describe(["python", "bench/sampler.py"]),
        "samples": options.samples,
        "repeats": options.repeats,
        "results": found,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
