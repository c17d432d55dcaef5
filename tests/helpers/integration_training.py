"""Work for the tests of integrations in several processes, in a module that they can import.

Every case trains the same small regression in float64 and keeps what each process ran, so that a plain loop in one
process can do the same on the rows of both.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from helpers.regression_data import SOURCES, draw
from mixwell import DenseTraces, Hypergradient, Mixer, ProjectedTraces, distributed
from mixwell.data.mixture_dataset import MixtureDataset

HORIZON, STEPS, ROWS, WANTED = 4, 12, 8, 10
POINTS = 2  # validation gradients of a round, after its third and its fourth step
STOP = HORIZON + 3  # between the two
CLIP = 0.5
PROCESSES = 2


@dataclass(frozen=True)
class Case:
    """One training through an integration."""

    integration: str  # accelerate, lightning, trainer, streams (of a trainer), or flat
    way: str  # ddp, fsdp, or tensors (of each of which both processes have a part)
    traces: str  # dense or projected
    mixed: bool = True
    accumulation: int = 1

    @property
    def clip_norm(self) -> float | None:
        # Lightning clips once more what the mixer has clipped, which the plain loop does not.
        return None if self.integration == "lightning" else CLIP

    @property
    def name(self) -> str:
        kind = "mixed" if self.mixed else "domains"
        return f"{self.integration}-{self.way}-{self.traces}-{kind}-{self.accumulation}"


@dataclass(frozen=True)
class Ran:
    """A batch that a process ran: rows, and by domain how many a process has on average (none in validation)."""

    x: Tensor
    y: Tensor
    labels: list[str] | None = None
    counts: dict[str, float] | None = None


class Regression(nn.Module):
    """Two layers, in float64."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 16, dtype=torch.float64)
        self.last = nn.Linear(16, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


def source(name: str, rows: int = 90) -> list[dict[str, Tensor]]:
    return [{key: value.double() for key, value in row.items()} for row in draw(name, rows)]


def sources() -> dict[str, list[dict[str, Tensor]]]:
    return {name: source(name) for name in SOURCES}


def row_losses(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    return (model(batch["x"]) - batch["y"]).square().mean(dim=1)


def settings(case: Case) -> dict[str, Any]:
    traces = DenseTraces() if case.traces == "dense" else ProjectedTraces(3)
    return {"horizon": HORIZON, "signal": Hypergradient(traces=traces), "update": 5.0}


def new_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)


def sharded(model: Any, mesh: Any = None) -> Any:
    from torch.distributed.fsdp import fully_shard

    mesh = mesh or torch.distributed.device_mesh.init_device_mesh("cpu", (distributed.world_size(),))
    for layer in (model.first, model.last):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def own_rows() -> MixtureDataset:
    return MixtureDataset(sources(), rank=distributed.rank(), world_size=distributed.world_size())


def own_wanted() -> DataLoader[Any]:
    """Validation batches of this process."""
    rows: Any = source("shifted", 60)[distributed.rank() :: distributed.world_size()]
    return DataLoader(rows, batch_size=WANTED)


def mixed_batch(batch: Mapping[str, Any], rows: MixtureDataset) -> Ran:
    return Ran(batch["x"], batch["y"], list(batch["domain"]), rows.expected_counts(len(batch["x"])))


Outcome = tuple[Mixer, nn.Module, list[Ran], list[Ran]]


class Watched:
    """The losses of rows; keeps the validation batches."""

    def __init__(self) -> None:
        self.wanted: list[Ran] = []

    def __call__(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        if not model.training:
            self.wanted.append(Ran(batch["x"], batch["y"]))
        return row_losses(model, batch)


# ----------------------------------------------------------------------------------------------- Accelerate


def new_accelerator(case: Case) -> Any:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    accumulation = case.accumulation
    if case.way == "ddp":
        return Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    # Accelerate takes up FSDP on accelerators only; all but the name of the device is as there.
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Linear"]
    )
    return Accelerator(cpu=True, gradient_accumulation_steps=accumulation, fsdp_plugin=plugin)


def with_flat_parameters(case: Case, folder: Path) -> Outcome:
    """FSDP1, as Accelerate's plugin and Lightning's strategy of that name still wrap."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(Regression(), device_id=torch.device("cpu"))
    return by_domain(case, model, new_optimizer(model), torch.Tensor.backward)


def with_accelerate(case: Case, folder: Path, *, resumed: bool = False) -> Outcome:
    from mixwell.integrations.loops import MixerLoop

    accelerator = new_accelerator(case)
    model: Any = Regression()
    model, optimizer = accelerator.prepare(model, new_optimizer(model))
    if not case.mixed:
        return by_domain(case, model, optimizer, accelerator.backward)
    losses, trained = Watched(), list[Ran]()
    rows = own_rows()
    loader = DataLoader(rows, batch_size=ROWS)
    chosen = {**settings(case), "budget": STEPS, "clip_norm": case.clip_norm}
    loop = MixerLoop(loader, model, optimizer, own_wanted(), losses, mixer=chosen)
    parts = {"model": model, "optimizer": optimizer, "loop": loop}
    checkpoint = folder / f"{case.name}.saved.{distributed.rank()}"
    if resumed:
        saved = torch.load(checkpoint, weights_only=False)
        # In one process the model has no wrapper; the loop is looked at first, and refuses.
        for name in ("loop", "model", "optimizer"):
            parts[name].load_state_dict(saved[name])
    for batch in loop:
        trained.append(mixed_batch(batch, rows))
        with accelerator.accumulate(model):
            accelerator.backward(loop.weighted_loss(losses(model, batch)))
            optimizer.step()
            optimizer.zero_grad()
        if len(trained) == STOP * case.accumulation and not resumed:
            torch.save({name: part.state_dict() for name, part in parts.items()}, checkpoint)
    return loop.mixer, model, trained, losses.wanted


def by_domain(case: Case, model: nn.Module, optimizer: Any, backward: Callable[[Tensor], None]) -> Outcome:
    """A loop over domains with a plain mixer, on this process's rows."""
    trained, wanted = list[Ran](), list[Ran]()
    mixer = Mixer(model, optimizer, SOURCES, clip_norm=case.clip_norm, **settings(case))
    rank, count = distributed.rank(), distributed.world_size()
    for step in range(STEPS):
        for name, rows in sources().items():
            some: Any = rows[6 * step : 6 * step + 6][rank::count]
            batch = torch.utils.data.default_collate(some)
            with mixer.domain(name) as scope:
                backward(scope.scaled_loss(row_losses(model, batch).mean()))
            trained.append(Ran(batch["x"], batch["y"], [name] * len(batch["x"])))
        mixer.step()
        if mixer.validation_due:
            batches = list(own_wanted())
            batch = batches[len(wanted) % len(batches)]
            with mixer.validation() as scope:
                backward(scope.scaled_loss(row_losses(model, batch).mean()))
            wanted.append(Ran(batch["x"], batch["y"]))
    return mixer, model, trained, wanted


# ----------------------------------------------------------------------------------------------- Lightning


def with_lightning(case: Case, folder: Path, *, resumed: bool = False) -> Outcome:
    import lightning
    from lightning.pytorch.strategies import ModelParallelStrategy

    from mixwell.integrations.lightning import MixerCallback

    losses, trained = Watched(), list[Ran]()
    rows = own_rows()

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Regression()

        def configure_model(self) -> None:
            if case.way != "ddp" and not hasattr(self.net, "reshard"):
                assert self.device_mesh is not None
                sharded(self.net, self.device_mesh["data_parallel"])

        def training_step(self, batch: dict[str, Any], index: int) -> Tensor:
            if self.training:
                trained.append(mixed_batch(batch, rows))
            return mixing.weighted_loss(losses(self.net, batch))

        def configure_optimizers(self) -> Any:
            return new_optimizer(self)

    class Saving(lightning.Callback):
        def on_train_batch_end(
            self, trainer: lightning.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            if batch_idx + 1 == STOP * case.accumulation:
                trainer.save_checkpoint(folder / f"{case.name}.ckpt")

    mixing = MixerCallback(rows, own_wanted(), mixer=settings(case))
    strategy: Any = "auto"
    if distributed.world_size() > 1:
        sizes = {"data_parallel_size": distributed.world_size(), "tensor_parallel_size": 1}
        sizes = {} if case.way == "tensors" else sizes  # by default all processes share each layer
        strategy = "ddp" if case.way == "ddp" else ModelParallelStrategy(**sizes)
    trainer = lightning.Trainer(
        max_steps=STEPS,
        accumulate_grad_batches=case.accumulation,
        gradient_clip_val=case.clip_norm,
        accelerator="cpu",
        devices=distributed.world_size(),
        strategy=strategy,
        default_root_dir=folder,
        callbacks=[mixing] if resumed else [mixing, Saving()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module()
    loader = DataLoader(rows, batch_size=ROWS)
    path = folder / f"{case.name}.ckpt" if resumed else None
    trainer.fit(module, loader, ckpt_path=path, weights_only=False)
    return mixing.mixer, module.net, trained, losses.wanted


# ----------------------------------------------------------------------------------------------- transformers


def collate(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return torch.utils.data.default_collate(rows)


class Streamed(IterableDataset[Any]):
    """Rows that come in one order only."""

    def __init__(self, rows: list[Any]) -> None:
        self._rows = rows

    def __iter__(self) -> Iterator[Any]:
        return iter(self._rows)


def with_trainer(case: Case, folder: Path, *, resumed: bool = False) -> Outcome:
    """transformers; where the case says so, with streams of which each process reads its own part."""
    from transformers import TrainingArguments

    from mixwell.integrations.transformers import MixerTrainer

    losses, trained = Watched(), list[Ran]()
    streams = case.integration == "streams"

    class Keeping(MixerTrainer):
        def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any) -> Tensor:
            batch = self._batches[0]
            labels = [SOURCES[place] for place in batch.labels.tolist()]
            trained.append(Ran(inputs["x"], inputs["y"], labels, batch.expected_counts))
            return super().training_step(model, inputs, *args)

    step_rows = PROCESSES * ROWS * case.accumulation
    arguments = TrainingArguments(
        output_dir=str(folder / case.name),
        max_steps=STEPS,
        per_device_train_batch_size=step_rows // (distributed.world_size() * case.accumulation),
        gradient_accumulation_steps=case.accumulation,
        learning_rate=0.01,
        max_grad_norm=case.clip_norm,
        weight_decay=0.0,
        lr_scheduler_type="constant",
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no" if resumed else "steps",
        save_steps=STOP,
        dataloader_pin_memory=False,
        remove_unused_columns=False,
    )
    trainer = Keeping(
        model=Regression(),
        args=arguments,
        train_dataset={name: Streamed(rows) for name, rows in sources().items()} if streams else sources(),
        validation_dataset=source("shifted", 60),
        validation_rows=PROCESSES * WANTED,
        row_losses=losses,
        data_collator=collate,
        mixer=settings(case),
    )
    saved = folder / case.name / f"checkpoint-{STOP}"
    trainer.train(resume_from_checkpoint=str(saved) if resumed else None)
    return trainer.mixer, trainer.model, trained, losses.wanted  # type: ignore[return-value]


# ----------------------------------------------------------------------------------------------- all of them

INTEGRATIONS: dict[str, Callable[..., Outcome]] = {
    "accelerate": with_accelerate,
    "lightning": with_lightning,
    "trainer": with_trainer,
    "streams": with_trainer,
    "flat": with_flat_parameters,
}


def described(mixer: Mixer, model: nn.Module) -> dict[str, Any]:
    """What came out, as plain values."""
    return {
        "scores": [list(record.scores.values()) for record in mixer.rounds],
        "points": [record.points for record in mixer.rounds],
        "losses": [record.losses for record in mixer.rounds],
        "weights": mixer.weights.values.tolist(),
        "parameters": [distributed.full_tensor(p.detach()).flatten().tolist() for p in model.parameters()],
    }


def quiet() -> None:
    import logging
    import warnings

    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "transformers", "accelerate"):
        logging.getLogger(name).setLevel(logging.ERROR)


def prepare_process() -> None:
    """Where there are several, tell the integrations' libraries which process this is, and keep them quiet."""
    rank, count = distributed.rank(), distributed.world_size()
    places = {
        "LOCAL_RANK": rank,
        "RANK": rank,
        "WORLD_SIZE": count,
        "LOCAL_WORLD_SIZE": count,
        "NODE_RANK": 0,
    }
    if count > 1:
        quiet()
        os.environ |= {name: str(value) for name, value in places.items()}


def train_plans(plans: Sequence[tuple[Sequence[Case], bool, str]]) -> None:
    """Train cases, or go on with those that a folder has, and write what each found and ran, or its message."""
    rank, count = distributed.rank(), distributed.world_size()
    prepare_process()
    for cases, resumed, folder in plans:
        for case in cases:
            name = written(case, resumed=resumed, count=count, rank=rank)
            train: Any = partial(INTEGRATIONS[case.integration], resumed=True) if resumed else None
            try:
                found = (train or INTEGRATIONS[case.integration])(case, Path(folder))
            except ValueError as error:
                Path(folder, f"{name}.json").write_text(json.dumps({"error": str(error)}))
                continue
            mixer, model, *ran = found
            Path(folder, f"{name}.json").write_text(json.dumps(described(mixer, model)))
            torch.save(ran, Path(folder, f"{name}.pt"))


def written(case: Case, *, resumed: bool, count: int, rank: int) -> str:
    """The name of what a process wrote of a case."""
    return f"{case.name}.{'resumed' if resumed else 'whole'}.{count}.{rank}"


def together(parts: Sequence[Ran]) -> Ran:
    """The batches that processes ran at the same time, as one."""
    labels = [name for part in parts for name in part.labels or []]
    counts = {name: len(parts) * value for name, value in (parts[0].counts or {}).items()}
    return Ran(torch.cat([part.x for part in parts]), torch.cat([part.y for part in parts]), labels, counts)


def alone(case: Case, ran: Sequence[Sequence[list[Ran]]]) -> dict[str, Any]:
    """A plain loop with a mixer in one process, on what processes ran."""
    trained = [together(parts) for parts in zip(*(one[0] for one in ran), strict=True)]
    wanted = [together(parts) for parts in zip(*(one[1] for one in ran), strict=True)]
    often = len(wanted) * HORIZON // (STEPS * POINTS)  # parts of a validation batch
    given = 0
    model = Regression()
    mixer = Mixer(model, new_optimizer(model), SOURCES, clip_norm=case.clip_norm, **settings(case))
    counted = case.integration in ("trainer", "streams")  # the counts are those of a whole step
    divisor = 1 if counted else case.accumulation
    per_step = case.accumulation if case.mixed else len(SOURCES)
    for number, batch in enumerate(trained):
        if case.mixed:
            with mixer.batch(batch.labels or [], expected_counts=batch.counts) as mixed:
                losses = row_losses(model, {"x": batch.x, "y": batch.y})
                (mixed.weighted_loss(losses) / divisor).backward()
        else:
            with mixer.domain((batch.labels or [])[0]) as scope:
                scope.scaled_loss(row_losses(model, {"x": batch.x, "y": batch.y}).mean()).backward()
        if (number + 1) % per_step:
            continue
        mixer.step()
        if mixer.validation_due:
            batch = together(wanted[given * often :][:often])
            given += 1
            with mixer.validation() as scope:
                scope.scaled_loss(row_losses(model, {"x": batch.x, "y": batch.y}).mean()).backward()
    return described(mixer, model)
