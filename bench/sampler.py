"""How many rows a second one core chooses: python bench/sampler.py

Every step computes the expected count of each domain and draws the indices of a batch, as training does; the
weights change every 84 steps. Everything counts from the first step of a new sampler on, including the orders that
it looks ahead; reading the rows themselves does not. `--rows` is the size of the domains: the larger, the more
rounds the shuffle has. Median and range of several repeats, by the processor's time of one thread.
"""

import time

import numpy as np
from measure import plain_parser, summarize, write_results

from mixwell.data.sampler import Rule, Sampler

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
    parser = plain_parser(__doc__, out="sampler.json")
    parser.add_argument("--samples", type=int, default=1_000_000, help="at least; per domain 32,768")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 1_000_000])
    options = parser.parse_args()
    found: list[dict[str, object]] = []
    for rows in options.rows:
        print(f"domains of {rows:,} rows; millions of rows a second, median [min, max]")
        for domains in DOMAINS:
            for batch in BATCHES:
                line = f"  m={domains:<3} batch {batch:<5}"
                samples = max(options.samples, domains << 15)
                for rule in RULES:
                    rates = summarize(
                        [
                            rate(rows, domains, batch, rule, samples=samples, seed=seed)
                            for seed in range(options.repeats)
                        ]
                    )
                    line += f"   {rule} {rates['median']:.2f} [{rates['min']:.2f}, {rates['max']:.2f}]"
                    setup = {"rows": rows, "domains": domains, "batch": batch, "rule": rule}
                    found.append({**setup, "million_rows_per_second": rates})
                print(line, flush=True)
    content = {"samples": options.samples, "repeats": options.repeats, "results": found}
    write_results(options.out, "bench/sampler.py", **content)


if __name__ == "__main__":
    main()
