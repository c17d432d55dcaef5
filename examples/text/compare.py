"""Learned weights beside uniform ones, proportional ones, and the target domain alone: same steps, same seeds.

Learned weights come in two ways: as they are, and with a limit on how often a row may be seen.

    python examples/text/fetch.py data/text
    python examples/text/compare.py results/text --seeds 3

It can be stopped with Ctrl-C and continues when it is called again.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from mixwell.lab import arms
from mixwell.lab.arms import Arm
from mixwell.report import arms as report
from mixwell.training import config_io

# As often as uniform weights show it, at most.
CAPPED = Arm("learned, at most 8 epochs", {"max_epochs": 8})
ALONE = Arm("drama alone", {"method": "fixed"}, domains=["drama"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for tables, figures and report")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=None, help="runs at a time; one per core")
    parser.add_argument("--set", action="append", default=[], help="key=value")
    given = parser.parse_args()
    base = config_io.read(Path(__file__).with_name("text.yaml"), given.set)
    compared = [arms.LEARNED, CAPPED, arms.UNIFORM, arms.PROPORTIONAL, ALONE]
    rows = arms.run(
        base, compared, seeds=given.seeds, out=given.out, workers=given.workers, console=Console()
    )
    for line in report.findings(rows):
        print(line)
    for path in report.write(given.out, given.out):
        print(path)


if __name__ == "__main__":
    main()
