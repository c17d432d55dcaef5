"""How long a user waits before anything happens: python bench/startup.py

The wall time of whole processes of one thread, files in the page cache: `mixwell --help`, the help of commands,
`--version`, and `mixwell init`. Then of imports, each in a process of its own: `import torch`, and what mixwell
takes once torch is there: the bare package, the mixer, all public names. Median and range of several repeats; the
processor's time is printed too, which other work on the machine changes less.
"""

import os
import resource
import subprocess
import sys
import tempfile
import time

from measure import plain_parser, summarize, write_results

COMMANDS = (
    "--help",
    "--version",
    "run --help",
    "plan --help",
    "report --help",
    "reproduce --help",
    "reproduce mnist --help",
    "init",
)
IMPORTS = {
    "import torch": ("pass", "import torch"),
    "import mixwell, after torch": ("import torch", "import mixwell"),
    "mixwell.Mixer, after torch": ("import torch", "import mixwell; mixwell.Mixer"),
    "all names, after torch": ("import torch", "from mixwell import *"),
}
TIMED = """
{}
import time
begun, used = time.perf_counter(), time.process_time()
{}
print(time.perf_counter() - begun, time.process_time() - used)
"""


def output(words: list[str]) -> str:
    # elsewhere, so that what a command writes goes away
    paths = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    places = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        return subprocess.run(
            [sys.executable, *words], cwd=folder, env=places, stdout=subprocess.PIPE, text=True, check=True
        ).stdout


def of_command(command: str) -> tuple[float, float]:
    def used() -> float:
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        return children.ru_utime + children.ru_stime

    begun, before = time.perf_counter(), used()
    output(["-m", "mixwell", *command.split()])
    return time.perf_counter() - begun, used() - before


def of_import(name: str) -> tuple[float, float]:
    wall, processor = output(["-c", TIMED.format(*IMPORTS[name])]).split()
    return float(wall), float(processor)


def main() -> None:
    parser = plain_parser(__doc__, out="startup.json")
    parser.add_argument("--repeats", type=int, default=11)
    options = parser.parse_args()
    timed = [(f"mixwell {command}", of_command, command) for command in COMMANDS]
    timed += [(name, of_import, name) for name in IMPORTS]
    wall: dict[str, dict[str, float]] = {}
    processor: dict[str, dict[str, float]] = {}
    for what, measure, argument in timed:
        measure(argument)  # fills the page cache, and writes compiled files
        times = [measure(argument) for _ in range(options.repeats)]
        wall[what], processor[what] = (summarize(part) for part in zip(*times, strict=True))
        shown = "   ".join(
            f"{name} {one['median']:.3f} s [{one['min']:.3f}, {one['max']:.3f}]"
            for name, one in (("wall", wall[what]), ("processor", processor[what]))
        )
        print(f"{what:32} {shown}", flush=True)
    content = {"repeats": options.repeats, "wall_seconds": wall, "processor_seconds": processor}
    write_results(options.out, "bench/startup.py", **content)


if __name__ == "__main__":
    main()
