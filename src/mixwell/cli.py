"""The command line: parse, call, print. Nothing heavy is imported before a command runs."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from mixwell.lab.cli import Reproduced, reproduce
from mixwell.lab.problems import PROBLEMS
from mixwell.training.command_options import EngineName, RayAddress, Workers, make_engine
from mixwell.training.interrupts import interruptible

app = typer.Typer(
    name="mixwell",
    help="Learn how much of each training domain a model should see, while it trains.",
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


ConfigFile = Annotated[Path, typer.Argument(help="A config file; `mixwell init` writes one.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", help="Replace a setting: key=value, as in optimizer.lr=0.001.")
]
TrialsEngine = Annotated[
    str, typer.Option("--engine", help="Backend for the trials of a method: local or ray.")
]
Report = Annotated[bool, typer.Option(help="Write the report page at the end.")]


@app.command("init")
def init_command(
    path: Annotated[Path, typer.Argument(help="The file to write.")] = Path("mixwell.yaml"),
) -> None:
    """Write a commented config file to start from."""
    from mixwell.training import template

    template.write_template(path)


@app.command("plan")
def plan_command(
    config: ConfigFile,
    overrides: Overrides = None,
    processes: Annotated[int, typer.Option(help="In how many processes it will train (torchrun).")] = 1,
) -> None:
    """Tell what a run will cost. Parameters, memory, weight updates, time per step (measured on a few)."""
    from mixwell.training import command

    command.show_plan(config, overrides=overrides or (), processes=processes)


@app.command("run")
def run_command(
    config: ConfigFile,
    out: Annotated[
        Path | None, typer.Option(help="The run's directory. [default: runs/ and the config's name]")
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
    epilog="\b\nEmbedded problems:\n"
    + "\n".join(f"  {name:<12}{problem.description}" for name, problem in PROBLEMS.items()),
)
def compare_command(
    problem: Annotated[
        str,
        typer.Argument(metavar="CONFIG", help="A YAML or TOML file, or the name of an embedded problem."),
    ],
    method_names: Annotated[
        str, typer.Option("--methods", help="Comma-separated names; `mixwell methods` lists them.")
    ] = "all",
    seeds: Annotated[int, typer.Option(help="Runs of each method.")] = 3,
    horizons: Annotated[
        str,
        typer.Option(
            "--horizons", "-T", help="T of the online methods: own (its authors'), long, or numbers."
        ),
    ] = "own",
    equal: Annotated[
        str, typer.Option(help="What is equal for all methods: compute, or steps (of the last run).")
    ] = "compute",
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for everything. [default: runs/compare- and the config's name]"),
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


@app.command("methods")
def methods_command(
    name: Annotated[str | None, typer.Argument(help="Tell all about this one.")] = None,
) -> None:
    """List the methods. What each does, what it needs, and the paper."""
    from mixwell.methods import listing

    listing.show(name)


@app.command("resume")
def resume_command(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The run's directory.")],
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


@app.command("export")
def export_command(
    mixture: Annotated[
        Path | None,
        typer.Argument(metavar="MIXTURE", help="A mixture.json, or the directory of a run that has one."),
    ] = None,
    to: Annotated[str | None, typer.Option("--to", help="The format; --list names them.")] = None,
    weights: Annotated[str, typer.Option(help="Which weights: average or last.")] = "average",
    path: Annotated[
        list[str] | None,
        typer.Option("--path", metavar="NAME=PATH", help="The tool's own name of a domain; repeatable."),
    ] = None,
    paths: Annotated[Path | None, typer.Option(help="A YAML file of such names, `domain: path`.")] = None,
    out: Annotated[Path | None, typer.Option(help="The file to write. [default: standard output]")] = None,
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


@app.command("fidelity")
def fidelity_command(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The run's directory.")],
    steps: Annotated[int, typer.Option(help="Training steps of the comparison.")] = 20,
    replicates: Annotated[
        int,
        typer.Option(help="Number of repetitions with other rows; 0 for the exact comparison only."),
    ] = 3,
) -> None:
    """Compare the hypergradient with finite differences. Repeats some steps with each weight changed."""
    from mixwell.training import command

    command.measure_fidelity(folder, steps=steps, replicates=replicates, after=_write_report)


@app.command("demo")
def demo_command(
    out: Annotated[Path, typer.Option(help="Folder for text, runs and report.")] = Path("runs/demo"),
    steps: Annotated[int | None, typer.Option(help="Steps of each run. [default: as in demo.yaml]")] = None,
    seeds: Annotated[int, typer.Option(help="Number of pairs of runs.")] = 1,
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


@app.command("tokenizer")
def tokenizer_command(
    config: ConfigFile,
    size: Annotated[int, typer.Option(help="Tokens of the vocabulary.")] = 8192,
    out: Annotated[
        Path | None,
        typer.Option(help="The file to write. [default: tokenizer.json in the folder of the config]"),
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Train a tokenizer (byte-level BPE) on a config's text domains."""
    from mixwell.training import command

    command.train_tokenizer(config, size=size, out=out, overrides=overrides or ())


@app.command("report")
def report_command(
    folders: Annotated[
        list[Path],
        typer.Argument(help="Runs, or folders that `mixwell compare`, `demo` or `reproduce` wrote."),
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="Output folder. [default: the only folder, or report/ next to several]"),
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
        app()
    except (ValueError, OSError, FloatingPointError) as error:
        stopped = isinstance(error, InterruptedError)
        # Of several processes the first one says what all do.
        process = os.environ.get("RANK", "0")
        if not (getattr(error, "already_reported", False) or (stopped and process != "0")):
            who = "mixwell" if process == "0" else f"mixwell, process {process}"
            print(f"{who}: {error}", file=sys.stderr)
        sys.exit(130 if stopped else 2)


if __name__ == "__main__":
    main()
