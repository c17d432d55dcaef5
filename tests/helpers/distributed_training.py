"""Work for the tests of several processes, in a module that they can import."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import socket
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.multiprocessing.spawn import start_processes
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from mixwell import (
    DenseTraces,
    ForwardModeTraces,
    Hypergradient,
    Mixer,
    MixtureBatch,
    MixtureLoader,
    ProjectedTraces,
    SketchedTraces,
    distributed,
)
from mixwell.data.rank_batches import shard_batch
from mixwell.hypergradient.traces import Traces
from mixwell.training.models.gpt import Gpt

DOMAINS = ["a", "b", "c"]
PROCESSES = 2
STEPS, ROUNDS = 4, 5
# Rows of each domain in every step: as many in both processes, or not; one has no row of the second.
EVEN = [4, 2, 6]
UNEVEN = [4, 1, 5]
PRELOADED = ["torch.distributed.fsdp", "torch.nn.parallel", "mixwell", "mixwell.training.run"]


@dataclass(frozen=True)
class Case:
    """One training in several processes."""

    way: str  # ddp, fsdp, or alone
    optimizer: str
    traces: str
    mixed: bool
    dtype: str = "float64"
    uneven: bool = False
    rounds: int = ROUNDS

    @property
    def name(self) -> str:
        return "-".join(str(value) for value in asdict(self).values())


def new_traces(kind: str) -> Traces:
    made: dict[str, Traces] = {
        "dense": DenseTraces(),
        "bfloat16": DenseTraces(dtype=torch.bfloat16),
        "sketched": SketchedTraces(200),
        "carried": ForwardModeTraces(),
        "projected": ProjectedTraces(3),
    }
    return made[kind]


def all_rows(case: Case) -> tuple[list[dict[str, Tensor]], list[Tensor]]:
    """Of every step the rows of each domain, and those of the validation set after it, of all processes."""
    generator = torch.Generator().manual_seed(0)

    def some(number: int) -> Tensor:
        return torch.randint(0, 11, (number, 9), generator=generator)

    numbers = dict(zip(DOMAINS, UNEVEN if case.uneven else EVEN, strict=True))
    steps = [{name: some(number) for name, number in numbers.items()} for _ in range(STEPS * case.rounds)]
    return steps, [some(12) for _ in steps]


def row_losses(model: nn.Module, batch: Tensor) -> Tensor:
    scores = model(batch[:, :-1])
    losses = functional.cross_entropy(scores.flatten(0, 1), batch[:, 1:].flatten(), reduction="none")
    return losses.view(len(batch), -1).mean(dim=1)


def new_model(case: Case) -> nn.Module:
    torch.manual_seed(0)
    return Gpt(11, context=8, layers=2, heads=2, width=8).to(getattr(torch, case.dtype))


def wrapped(model: nn.Module, way: str) -> nn.Module:
    if way == "ddp":
        return DistributedDataParallel(model)
    if way == "fsdp":
        from torch.distributed.fsdp import fully_shard

        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        for block in model.blocks:  # type: ignore[union-attr]
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def new_mixer(case: Case, model: nn.Module) -> Mixer:
    kinds: dict[str, Any] = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.5),
        "sgd0": lambda p: torch.optim.SGD(p, lr=0.05),
        "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    }
    optimizer = kinds[case.optimizer](model.parameters())
    signal = Hypergradient(traces=new_traces(case.traces))
    return Mixer(model, optimizer, DOMAINS, horizon=STEPS, signal=signal, update=30.0, clip_norm=0.5)


def take_step(case: Case, model: nn.Module, mixer: Mixer, parts: dict[str, Tensor]) -> None:
    """A step on this process's rows of a batch."""
    places = {name: np.arange(len(part)) for name, part in parts.items()}
    own = shard_batch(places, rank=distributed.rank(), world_size=distributed.world_size())
    [chosen] = own.micro_batches
    equal = mixer.requires_equal_forward_passes
    if equal and not case.mixed:
        chosen |= {name: one[:1] for name, one in places.items() if name not in chosen}
    labels = [DOMAINS.index(name) for name in chosen if own.step.local[name] for _ in chosen[name]]
    rows = {name: parts[name][one] for name, one in chosen.items()}
    batch = MixtureBatch(tuple(DOMAINS), torch.tensor(labels), own.step, None, rows, equal)
    if case.mixed:
        with mixer.batch(batch) as scope:
            scope.weighted_loss(row_losses(model, batch.rows)).backward()
    else:
        for part in batch.by_domain():
            with mixer.domain(part) as scope:
                scope.scaled_loss(row_losses(model, part.rows).mean()).backward()
    mixer.step()


def train(case: Case, model: nn.Module, mixer: Mixer, *, until: int | None = None) -> dict[str, Any]:
    """Train to a step, or to the end."""
    steps, validation = all_rows(case)
    with torch.no_grad():  # after which fully_shard leaves the outermost layers whole
        row_losses(model, validation[0])
    while mixer.steps_done < (len(steps) if until is None else until):
        take_step(case, model, mixer, steps[mixer.steps_done])
        if mixer.validation_due:
            rows = validation[mixer.steps_done - 1][distributed.rank() :: distributed.world_size()]
            for batch in (rows, rows.flip(1)):
                with mixer.validation(fraction=0.5) as scope:
                    loss = row_losses(model, batch).mean()
                    loss.backward()
                    scope.record_loss(loss)
    return {
        "scores": [list(record.scores.values()) for record in mixer.rounds],
        "noise": [list(record.noise.values()) for record in mixer.rounds],
        "points": [record.points for record in mixer.rounds],
        "losses": [record.losses for record in mixer.rounds],
        "weights": mixer.weights.values.tolist(),
        "nbytes": mixer.nbytes,
    }


def alone(case: Case) -> dict[str, Any]:
    """The same training in one process, on the rows of all."""
    model = new_model(case)
    return train(case, model, new_mixer(case, model))


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def in_processes(work: Any, *args: Any, count: int = PROCESSES) -> None:
    """Run ``work(*args)`` in several processes.

    They are forked from a server that has imported the libraries, because importing takes longer than most work.
    """
    multiprocessing.set_forkserver_preload(PRELOADED)
    variables = dict(os.environ)  # the server has those of the moment when it started
    start_processes(
        _join, (free_port(), count, variables, work, args), nprocs=count, start_method="forkserver"
    )


def _join(
    rank: int, port: int, count: int, variables: dict[str, str], work: Any, args: tuple[Any, ...]
) -> None:
    os.environ.clear()
    os.environ.update(variables | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=count)
    try:
        work(*args)
    finally:
        # PyTorch may abort where a model of DistributedDataParallel is still there afterwards.
        gc.collect()
        torch.distributed.destroy_process_group()


def train_cases(cases: list[Case], folder: str) -> None:
    """Train all cases, and write what each found."""
    rank = distributed.rank()
    found: dict[str, Any] = {}
    for case in cases:
        model = wrapped(new_model(case), case.way)
        found[case.name] = train(case, model, new_mixer(case, model))
    Path(folder, f"{rank}.json").write_text(json.dumps(found))


def save_cases(cases: list[Case], until: int, folder: str) -> None:
    """Train all cases to a step, save, and go on to the end."""
    rank = distributed.rank()
    for case in cases:
        model = wrapped(new_model(case), case.way)
        mixer = new_mixer(case, model)
        train(case, model, mixer, until=until)
        mixer.save(Path(folder, case.name))
        whole = {name: distributed.full_tensor(t.detach()) for name, t in model.state_dict().items()}
        if rank == 0:
            torch.save(whole, Path(folder, f"{case.name}.model"))
        found = train(case, model, mixer)
        Path(folder, f"{case.name}.{rank}.json").write_text(json.dumps(found))


def resume_cases(cases: list[Case], folder: str) -> None:
    """Go on to the end, in any number of processes."""
    rank, count = distributed.rank(), distributed.world_size()
    for case in cases:
        model = new_model(case)
        saved = torch.load(Path(folder, f"{case.name}.model"), weights_only=True)
        model.load_state_dict({name.removeprefix("module."): t for name, t in saved.items()})
        if count > 1:
            model = wrapped(model, case.way)
        mixer = new_mixer(case, model)
        mixer.load(Path(folder, case.name))
        found = train(case, model, mixer)
        Path(folder, f"{case.name}.{count}.{rank}.json").write_text(json.dumps(found))


def train_runs(plans: list[tuple[dict[str, Any], str, int | None]]) -> list[Any]:
    """Begin runs, or resume those that are there; to a step, or to the end. Return the trainers that ended."""
    rank, count = distributed.rank(), distributed.world_size()
    from rich.console import Console

    from mixwell.training import config_io
    from mixwell.training.run import CONFIG, Run

    done: list[Any] = []
    for plain, folder, until in plans:
        # Asked of the run after every step; only the last process wants to stop.
        asked = iter(range(10**9))
        last = rank == count - 1

        def stopping(asked: Any = asked, until: int | None = until, last: bool = last) -> bool:
            return next(asked) >= (until or 10**9) and last

        run = Run(
            config_io.validate_config(plain), Path(folder), console=Console(quiet=True), stopping=stopping
        )
        try:
            done.append(
                run.resume() if distributed.run_on_rank_zero((Path(folder) / CONFIG).exists) else run.start()
            )
        except InterruptedError:
            assert until is not None
    return done


def differ(folder: str) -> None:
    """Train with other settings in one process, and write what is said about it."""
    rank = distributed.rank()
    case = Case("ddp", "sgd", "dense", mixed=False, rounds=1)
    model = wrapped(new_model(case), "ddp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    mixer = Mixer(model, optimizer, DOMAINS, horizon=STEPS, update=1.0 + rank)
    try:
        train(case, model, mixer)
        said = "nothing"
    except RuntimeError as error:
        said = str(error)
    Path(folder, f"{rank}.txt").write_text(said)


def lose(folder: str) -> None:
    """Train with a loss that is not finite in one process, in one step, and leave it out."""
    rank = distributed.rank()
    found: dict[str, Any] = {}
    for way in ("ddp", "fsdp"):
        case = Case(way, "sgd", "dense", mixed=False, rounds=2)
        model = wrapped(new_model(case), way)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        mixer = Mixer(model, optimizer, DOMAINS, horizon=STEPS, update=1.0, on_nonfinite="skip")
        steps, validation = all_rows(case)
        while mixer.steps_done < len(steps):
            for number, name in enumerate(DOMAINS):
                rows = steps[mixer.steps_done][name][rank::PROCESSES]
                bad = mixer.steps_done == 1 and number == 2 and rank == 1
                with warnings.catch_warnings(), mixer.domain(name):
                    warnings.simplefilter("ignore")
                    (row_losses(model, rows).mean() * (float("nan") if bad else 1.0)).backward()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                mixer.step()
            if mixer.validation_due:
                with mixer.validation():
                    rows = validation[mixer.steps_done - 1][rank::PROCESSES]
                    row_losses(model, rows).mean().backward()
        weights = mixer.weights.values.tolist()
        found[way] = {"weights": weights, "skipped": mixer.skipped, "first": mixer.rounds[0].skipped}
    Path(folder, f"{rank}.json").write_text(json.dumps(found))


def load_rows(workers: int, folder: str) -> None:
    """Follow a mixer with a loader, stop in the middle of a round, and go on with another."""
    rank, count = distributed.rank(), distributed.world_size()
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    model = DistributedDataParallel(model) if count > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    domains = {"a": torch.arange(40), "b": torch.arange(100, 117), "c": torch.arange(200, 205)}
    mixer = Mixer(model, optimizer, list(domains), horizon=4, budget=18, update=0.5)
    loader = MixtureLoader(domains, 9, least=1, seed=3, num_workers=workers)
    seen: list[dict[str, list[int]]] = []

    def go_on(loader: MixtureLoader, until: int) -> None:
        for batch in loader.follow(mixer):
            seen.append({part.domain: part.rows.tolist() for part in batch.by_domain()})
            for part in batch.by_domain():
                with mixer.domain(part) as scope:
                    scope.scaled_loss(model(part.rows[:, None].float() / 100).mean()).backward()
            mixer.step()
            if mixer.validation_due:
                with mixer.validation():
                    model(torch.ones(1, 1)).mean().backward()
            if mixer.steps_done == until:
                break

    go_on(loader, 6)
    second = MixtureLoader(domains, 9, least=1, seed=3, num_workers=workers)
    second.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    go_on(second, 18)
    weights = mixer.weights.values.tolist()
    Path(folder, f"{count}-{workers}-{rank}.json").write_text(json.dumps([seen, weights]))
