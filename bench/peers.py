"""Other libraries and methods on the MLP workload (SGD): cost relative to plain training, for two horizons.

Where a method estimates the same hypergradient, its tangent cosine with the exact one (TorchOpt's, or else that
of forward mode) is printed: the median and the worst over several draws of the data, from the same initial model.
What each computes and leaves out is in recipes.py.

    python bench/peers.py [--only mixwell-dense torchopt] [--again]

TorchOpt is installed by `pip install -e '.[peers]'`; Betty by
`pip install --no-deps --ignore-requires-python betty-ml==0.2.1`.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec

import numpy as np
import recipes
import workloads
from measure import MEGABYTE, PLAIN, Results, Seconds, parser, ratio, say
from workloads import VARIANTS, WORKLOADS, Build

from mixwell.reference.comparison import tangent_cosine

HORIZONS = (20, 50)
TURNS = {20: 7, 50: 4}
SEEDS = 5
TORCHOPT = "pip install -e '.[peers]'"
BETTY = "pip install --no-deps --ignore-requires-python betty-ml==0.2.1"


@dataclass(frozen=True)
class Peer:
    """A way to learn weights.

    Args:
        build: makes its round.
        computes: what it computes, in a few words.
        estimates: whether that is a hypergradient.
        package: that must be there.
        install: how it gets there.
    """

    build: Build
    computes: str
    estimates: bool = True
    package: str = "torch"
    install: str = ""


PEERS = {
    PLAIN: Peer(VARIANTS[PLAIN], "no weights", estimates=False),
    "mixwell-dense": Peer(VARIANTS["dense"], "hypergradient of T steps"),
    "mixwell-mixed-dense": Peer(VARIANTS["mixed dense"], "the same from one batch"),
    "mixwell-projected": Peer(VARIANTS["projected 32"], "estimated at rank 32"),
    "torchopt": Peer(recipes.unroll, "exact, reverse mode", package="torchopt", install=TORCHOPT),
    "forward-mode": Peer(recipes.forward_mode, "exact, forward mode"),
    "betty-darts": Peer(
        partial(recipes.betty, "darts"), "the last step only", package="betty", install=BETTY
    ),
    "betty-neumann": Peer(
        partial(recipes.betty, "neumann"), "T terms at the end", package="betty", install=BETTY
    ),
    "doge": Peer(recipes.doge, "alignment at every step", estimates=False),
    "doremi": Peer(recipes.doremi, "excess loss at every step", estimates=False),
}
EXACT = ("torchopt", "forward-mode")


def present(names: list[str]) -> dict[str, Peer]:
    """Those that can run here; of the others a line says why not."""
    found = {PLAIN: PEERS[PLAIN]}
    for name in names:
        peer = PEERS[name]
        if find_spec(peer.package) is None:
            say(f"{name} is left out, as {peer.package} is not installed: {peer.install}")
        else:
            found[name] = peer
    return found


def timed(horizon: int, peers: Mapping[str, Peer]) -> Seconds:
    workload = replace(WORKLOADS["mlp"], horizon=horizon, turns=TURNS[horizon])
    builds = {name: peer.build for name, peer in peers.items()}
    return workloads.seconds(workload, builds, label=f"T = {horizon}")


def peak(horizon: int, peer: Peer) -> int:
    return workloads.memory(replace(WORKLOADS["mlp"], horizon=horizon), peer.build)["peak"]


def estimates(horizon: int, peers: Mapping[str, Peer], seed: int) -> dict[str, list[float]]:
    """The hypergradients of a first round on data of their own, of those that have one."""
    workload = replace(WORKLOADS["mlp"], horizon=horizon)
    data = workload.data(seed)
    found: dict[str, list[float]] = {}
    for name, peer in peers.items():
        if not peer.estimates or (name == EXACT[1] and EXACT[0] in peers and seed > 1):
            continue  # one exact one is enough; that both agree is seen with the first seed
        one = peer.build(workload, data)
        one.run()
        found[name] = one.scores[0]
    say(f"T = {horizon}: hypergradients of seed {seed} of {SEEDS}")
    return found


def alike(found: list[dict[str, list[float]]], name: str) -> str:
    """Median and worst tangent cosine with the exact hypergradient; nothing where there is none."""
    exact = next((one for one in EXACT if one in found[0]), None)
    if exact is None:
        return ""
    cosines = [tangent_cosine(np.array(f[name]), np.array(f[exact])) for f in found if name in f]
    return f"{statistics.median(cosines):.4f} / {min(cosines):.3f} ({len(cosines)})" if cosines else ""


def main() -> None:
    options = parser(__doc__, "peers.json", list(PEERS)[1:]).parse_args()
    results = Results(options.out, "bench/peers.py", again=options.again)
    peers = present(options.only)
    for horizon in HORIZONS:
        at = f"T={horizon}"
        seconds = results.get(
            f"{at}/time",
            partial(timed, horizon, peers),
            fits=lambda found: set(peers) - {PLAIN} <= set(found),
        )
        wanted = {name for name, peer in peers.items() if peer.estimates and name != EXACT[1]}
        found = [
            results.get(
                f"{at}/hypergradients/{seed}",
                partial(estimates, horizon, peers, seed),
                fits=lambda found: wanted <= set(found),  # noqa: B023
            )
            for seed in range(1, SEEDS + 1)
        ]
        print(f"\nT = {horizon}; MLP of 1.32 M parameters, 3 domains of 64 rows, SGD")
        print(f"  {'':21}{'computes':30}{'time':>22}{'peak growth':>14}{'cosine with exact':>24}")
        for name, peer in peers.items():
            memory = results.get(f"{at}/memory/{name}", partial(peak, horizon, peer)) / MEGABYTE
            taken = ratio(seconds, name) if name != PLAIN else ""
            measured = f"{taken!s:>22}{memory:11.0f} MB{alike(found, name):>24}"
            print(f"  {name:21}{peer.computes:30}{measured}", flush=True)


if __name__ == "__main__":
    main()
