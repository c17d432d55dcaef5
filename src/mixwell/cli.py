"""The command line: parse, call, print. Nothing heavy is imported before a command runs."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from mixwell.lab.cli import Reproduced, reproduce
from mixwell.lab.problems import list_problems
from mixwell.training.command_options import (
    DEFAULT_CONFIG,
    ConfigFile,
    EngineName,
    Overrides,
    RayAddress,
    Report,
    RunFolder,
    TrialsEngine,
    Workers,
    make_engine,
)
from mixwell.training.interrupts import interruptible
from mixwell.utils import memory
from mixwell.utils.command_help import CONTEXT, HelpCommand, examples

app = typer.Typer(
    name="mixwell",
    help="Learn how much of each training domain a model should see, while it trains.",
    epilog=examples(
        "mixwell init              write mixwell.yaml, to be filled in",
        "mixwell plan              what the run of mixwell.yaml will cost",
        "mixwell run               train, learn the mixture, write runs/mixwell",
        "mixwell compare demo      compare methods on a small problem",
        "mixwell COMMAND -h        options and examples of a command",
    ),
    context_settings=CONTEXT,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    # rich would take half of the time of --help, and [default: ...] for markup, which it leaves out
    rich_markup_mode=None,
)


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
) -> None:
    if version:
        from mixwell import __version__

        typer.echo(f"mixwell {__version__}")
        raise typer.Exit


@app.command("init", cls=HelpCommand, epilog=examples("mixwell init", "mixwell init configs/text.yaml"))
def init_command(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="The file to write.")] = DEFAULT_CONFIG,
) -> None:
    """Write a commented config file to start from."""
    from mixwell.training import template

    template.write_template(path)


@app.command(
    "plan",
    cls=HelpCommand,
    epilog=examples(
        "mixwell plan",
        "mixwell plan text.yaml --set batch.rows=64",
        "mixwell plan text.yaml --processes 8",
    ),
)
def plan_command(
    config: ConfigFile = DEFAULT_CONFIG,
    overrides: Overrides = None,
    processes: Annotated[
        int, typer.Option(metavar="N", help="In how many processes it will train (torchrun).")
    ] = 1,
) -> None:
    """Show what a run will cost. Parameters, memory, weight updates, time per step (measured on a few)."""
    from mixwell.training import command

    command.show_plan(config, overrides=overrides or (), processes=processes)


@app.command(
    "run",
    cls=HelpCommand,
    epilog=examples(
        "mixwell run",
        "mixwell run text.yaml --out runs/first --set steps=4000",
        "torchrun --nproc-per-node 2 -m mixwell run text.yaml",
    ),
)
def run_command(
    config: ConfigFile = DEFAULT_CONFIG,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="The run's directory. [default: runs/ and the config's name]"),
    ] = None,
    overrides: Overrides = None,
    engine: TrialsEngine = "local",
    ray_address: RayAddress = None,
    report: Report = True,
) -> None:
    """Train a model and learn the mixture. Ctrl-C stops and saves; `mixwell resume` continues."""
    from mixwell.training import command

    command.run(
        config,
        out=out,
        overrides=overrides or (),
        engine=make_engine(engine, ray_address),
        after=_write_report if report else None,
    )


@app.command(
    "compare",
    cls=HelpCommand,
    epilog=examples(
        "mixwell compare",
        "mixwell compare demo --methods mixwell,uniform --seeds 5",
        "mixwell compare text.yaml --methods mixwell,doremi,regmix --set steps=1000",
    )
    + list_problems(),
)
def compare_command(
    problem: Annotated[
        str,
        typer.Argument(metavar="CONFIG", help="A YAML or TOML file, or the name of an embedded problem."),
    ] = str(DEFAULT_CONFIG),
    method_names: Annotated[
        str,
        typer.Option(
            "--methods", metavar="NAMES", help="Comma-separated names; `mixwell methods` lists them."
        ),
    ] = "all",
    seeds: Annotated[int, typer.Option(metavar="N", help="Runs of each method.")] = 3,
    horizons: Annotated[
        str,
        typer.Option(
            "--horizons",
            "-T",
            metavar="N,N,...",
            help="T of the online methods: own (its authors'), long, or numbers.",
        ),
    ] = "own",
    equal: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="What is equal for all methods: compute, or steps (of the last run)."
        ),
    ] = "compute",
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Folder for everything. [default: runs/compare- and the config's name]"
        ),
    ] = None,
    workers: Workers = None,
    engine: EngineName = "local",
    ray_address: RayAddress = None,
    overrides: Overrides = None,
    figures: Annotated[bool, typer.Option(help="Draw the figures and write the report page.")] = True,
) -> None:
    """Compare methods on a problem. Same seeds, data and compute; call it again to resume."""
    with interruptible():
        from mixwell.lab.compare import command

        compared = command.main(
            problem,
            names=[one.strip() for one in method_names.split(",") if one.strip()],
            seeds=seeds,
            horizons=horizons,
            equal=equal,
            out=out,
            workers=workers,
            engine=make_engine(engine, ray_address),
            overrides=overrides or (),
        )
    if figures and compared.rows:
        _write_report(compared.folder)
    compared.raise_error()


@app.command("methods", cls=HelpCommand, epilog=examples("mixwell methods", "mixwell methods doremi"))
def methods_command(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Show all about this one.")] = None,
) -> None:
    """List the methods. What each does, what it needs, and the paper."""
    from mixwell.methods import listing

    listing.show(name)


@app.command("resume", cls=HelpCommand, epilog=examples("mixwell resume runs/mixwell"))
def resume_command(
    folder: RunFolder,
    engine: TrialsEngine = "local",
    ray_address: RayAddress = None,
    report: Report = True,
) -> None:
    """Continue a run that was stopped, as if nothing had happened. It may also have been killed or cut off."""
    from mixwell.training import command

    command.resume(
        folder,
        engine=make_engine(engine, ray_address),
        after=_write_report if report else None,
    )


@app.command(
    "export",
    cls=HelpCommand,
    epilog=examples(
        "mixwell export runs/mixwell --to megatron --path web=/data/web",
        "mixwell export runs/mixwell --to yaml --out mixture.yaml",
        "mixwell export --list",
    ),
)
def export_command(
    mixture: Annotated[
        Path | None,
        typer.Argument(metavar="MIXTURE", help="A mixture.json, or the directory of a run that has one."),
    ] = None,
    to: Annotated[
        str | None, typer.Option("--to", metavar="FORMAT", help="The format; --list names them.")
    ] = None,
    weights: Annotated[str, typer.Option(metavar="NAME", help="Which weights: average or last.")] = "average",
    path: Annotated[
        list[str] | None,
        typer.Option("--path", metavar="NAME=PATH", help="The tool's own name of a domain; repeatable."),
    ] = None,
    paths: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A YAML file of such names, `domain: path`.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The file to write. [default: standard output]")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file, if it is there.")] = False,
    formats: Annotated[bool, typer.Option("--list", help="Name the formats and stop.")] = False,
) -> None:
    """Write a learned mixture for another tool. As static weights: Megatron-LM, torchtitan, datasets, ..."""
    from mixwell.integrations.exporters import command

    if formats:
        command.show_formats()
        return
    if mixture is None or to is None:
        raise ValueError("give a mixture and a format: mixwell export MIXTURE --to FORMAT; --list names them")
    command.export_mixture(
        mixture, to=to, weights=weights, words=path or (), paths=paths, out=out, force=force
    )


@app.command(
    "fidelity",
    cls=HelpCommand,
    epilog=examples(
        "mixwell fidelity runs/mixwell",
        "mixwell fidelity runs/mixwell --steps 50 --replicates 0",
    ),
)
def fidelity_command(
    folder: RunFolder,
    steps: Annotated[int, typer.Option(metavar="N", help="Training steps of the comparison.")] = 20,
    replicates: Annotated[
        int,
        typer.Option(
            metavar="N", help="Number of repetitions with other rows; 0 for the exact comparison only."
        ),
    ] = 3,
) -> None:
    """Compare the hypergradient with finite differences. Repeats some steps with each weight changed."""
    from mixwell.training import command

    command.measure_fidelity(folder, steps=steps, replicates=replicates, after=_write_report)


@app.command("demo", cls=HelpCommand, epilog=examples("mixwell demo", "mixwell demo --steps 200 --seeds 3"))
def demo_command(
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder for text, runs and report.")] = Path(
        "runs/demo"
    ),
    steps: Annotated[
        int | None, typer.Option(metavar="N", help="Steps of each run. [default: as in demo.yaml]")
    ] = None,
    seeds: Annotated[int, typer.Option(metavar="N", help="Number of pairs of runs.")] = 1,
    workers: Workers = None,
    engine: EngineName = "local",
    ray_address: RayAddress = None,
    figures: Annotated[bool, typer.Option(help="Write the report page.")] = True,
) -> None:
    """Learn a mixture of text that is on this machine. Compares it with uniform weights; no download."""
    with interruptible():
        from mixwell.lab.compare import command

        compared = command.main(
            "demo",
            names=["mixwell", "uniform"],
            seeds=seeds,
            equal="steps",
            out=out,
            workers=workers,
            engine=make_engine(engine, ray_address),
            overrides=[] if steps is None else [f"steps={steps}"],
        )
    if figures and compared.rows:
        from mixwell.report import runs

        for run in sorted((out / "runs").iterdir()):
            typer.echo(f"weights over training: {runs.write_report([run], run)[-1]}")
        _write_report(out)
    compared.raise_error()


@app.command(
    "tokenizer",
    cls=HelpCommand,
    epilog=examples(
        "mixwell tokenizer",
        "mixwell tokenizer text.yaml --size 16384",
    ),
)
def tokenizer_command(
    config: ConfigFile = DEFAULT_CONFIG,
    size: Annotated[int, typer.Option(metavar="N", help="Tokens of the vocabulary.")] = 8192,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="The file to write. [default: tokenizer.json in the folder of the config]"
        ),
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Train a tokenizer (byte-level BPE) on a config's text domains."""
    from mixwell.training import command

    command.train_tokenizer(config, size=size, out=out, overrides=overrides or ())


@app.command(
    "report",
    cls=HelpCommand,
    epilog=examples(
        "mixwell report runs/mixwell",
        "mixwell report runs/a runs/b --out runs/both",
    ),
)
def report_command(
    folders: Annotated[
        list[Path],
        typer.Argument(
            metavar="FOLDER", help="Runs, or folders that `mixwell compare`, `demo` or `reproduce` wrote."
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Output folder. [default: the only folder, or report/ next to several]"
        ),
    ] = None,
) -> None:
    """Draw the figures and the HTML report. Several runs, or folders of MNIST runs, share one page."""
    from mixwell.report import folders as reports

    common = folders[0] if len(folders) == 1 else folders[0].resolve().parent / "report"
    for path in reports.write_report(folders, out or common):
        typer.echo(path)


def _write_report(folder: Path) -> None:
    """Write the report page of a run that is safe whatever happens here."""
    from rich.console import Console

    from mixwell.report import folders
    from mixwell.utils.terminal import say

    console = Console()
    try:
        written = folders.write_report([folder], folder)
    except KeyboardInterrupt:
        say(console, f"no report: interrupted; `mixwell report {folder}` writes it")
    except (ValueError, OSError) as error:  # such as a missing matplotlib
        say(console, f"no report: {error}")
    else:
        # The page, or the figure of a report that has no page.
        say(console, f"look at {next((path for path in written if path.suffix == '.html'), written[-1])}")


def _show_reproduced(done: Reproduced) -> None:
    """Write the figures and the report of ``mixwell reproduce ...``; exit with 1 where a check failed."""
    if done.figures:
        if done.examples is not None:
            from mixwell.report import mnist

            mnist.draw_examples(done.examples(), done.folder)
        _write_report(done.folder)
    if not done.passed:
        raise typer.Exit(1)


app.add_typer(reproduce, result_callback=_show_reproduced)


def main() -> None:
    """Run the command line; what a user did wrong becomes one line and exit status 2."""
    try:
        app(prog_name="mixwell")
    except (ValueError, OSError, FloatingPointError) as error:
        stopped = isinstance(error, InterruptedError)
        # Of several processes the first one says what all do.
        process = os.environ.get("RANK", "0")
        if not (getattr(error, "already_reported", False) or (stopped and process != "0")):
            who = "mixwell" if process == "0" else f"mixwell, process {process}"
            print(f"{who}: {error}", file=sys.stderr)
        sys.exit(130 if stopped else 2)
    except SystemExit as end:
        if end.code == 130:  # Ctrl-C before a run began, of which typer says nothing
            print("mixwell: interrupted", file=sys.stderr)
        raise
    except (MemoryError, RuntimeError) as error:
        if not memory.is_out_of_memory(error):
            raise
        print(f"mixwell: {memory.out_of_memory_message(error)}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
