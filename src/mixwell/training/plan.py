"""The cost of a run, measured and counted before it begins."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor, nn

from mixwell import methods
from mixwell.data.datasets import IndexedDataset, TokenRows
from mixwell.distributed.communication import TrafficModel
from mixwell.hypergradient.parameters import Parameters
from mixwell.hypergradient.traces import TRACES
from mixwell.mixer.mixer import Mixer
from mixwell.simplex.rounds import round_count
from mixwell.training import builder, optimization
from mixwell.training.config import Config
from mixwell.training.data import Data
from mixwell.training.models.base import Trainable
from mixwell.training.trainer import Trainer

TIMED_STEPS = 3
MOST_BYTES = 1 << 44
"""Larger traces are not laid out to be counted."""


@final
@dataclass(frozen=True)
class DomainPlan:
    """The use of a domain in a run.

    Args:
        tokens: in its rows, where they are text.
        epochs: how often its rows are seen with the initial weights.
        epochs_alone: how often with all of the weight.
    """

    rows: int
    tokens: int | None
    epochs: float
    epochs_alone: float


@final
@dataclass(frozen=True)
class Plan:
    """The cost of a run.

    Args:
        parameters: the number of trained parameters.
        horizon: T.
        updates: the number of weight updates.
        memory: bytes in addition to plain training, by kind of traces, or by the method.
        extra_arithmetic: rows of validation gradients and of the method's other computations, over training rows.
        steps_before: the cost of runs before this one, in its training steps.
        seconds: of a step with the mixer, the mean over a round. Measured are steps that leave a trace, the least
            of three; the others count as plain ones.
        plain_seconds: of a step with fixed weights.
        advice: which kind of traces to take, and why.
        limits: the greatest initial weight of domains for which it is below 1.
    """

    parameters: int
    horizon: int
    updates: int
    memory: dict[str, int]
    extra_arithmetic: float
    steps_before: float
    domains: dict[str, DomainPlan]
    seconds: float
    plain_seconds: float
    steps: int
    advice: str
    limits: dict[str, float] = field(default_factory=dict[str, float])

    @property
    def total_seconds(self) -> float:
        """The time of all training steps, validation gradients and trials."""
        # With T = 1 every timed step has a validation gradient in it.
        more = self.extra_arithmetic * self.plain_seconds if self.horizon > 1 else 0.0
        here = self.steps * (self.seconds + more)
        return here + self.steps_before * self.plain_seconds


def make_plan(config: Config, trainable: Trainable, data: Data) -> Plan:
    """Time some training steps, which change the model, and count the rest."""
    trained = [p for p in trainable.model.parameters() if p.requires_grad]
    method = methods.find(config.mixer.method)
    still = {"method": "fixed", "options": {}}
    fixed = config.model_copy(update={"mixer": config.mixer.model_copy(update=still)})
    sizes = {name: len(rows) for name, rows in data.domains.items()}
    context = builder.method_context(config, sizes, None if data.validation is None else len(data.validation))
    learned = method.learns(context.options)
    # The weights that trials would find are not known yet, and there is no reference model.
    chosen = config if learned and not method.needs.reference else fixed
    trainer = Trainer(chosen, trainable, data.domains, data.validation)
    limits = trainer.mixer.limits
    horizon = builder.horizon(config)
    traced = len(trainer.mixer.signal.observed_steps(0, horizon)) / horizon
    timed, thinned = trainer, 0 < traced < 1
    if thinned:
        every = {"mixer": chosen.mixer.model_copy(update={"trace_every": 1})}
        timed = Trainer(chosen.model_copy(update=every), trainable, data.domains, data.validation)
    seconds, plain = _seconds([timed, Trainer(fixed, trainable, data.domains, data.validation)])
    if thinned:
        seconds = traced * seconds + (1 - traced) * plain
    updates = round_count(config.steps - config.mixer.warmup, horizon) if learned else 0
    extra = method.extra(context)
    held = trainer.extra_bytes
    if learned and method.needs.reference:
        held += sum(t.nbytes for t in (*trainable.model.parameters(), *trainable.model.buffers()))
    points = len(trainer.mixer.signal.validation_points(horizon))
    computed = updates * (points * trainer.validation_rows + extra.per_round * config.batch.rows)
    weights = trainer.mixer.weights.values
    shares = dict(zip(trainer.loader.sampler.names, trainer.loader.sampler.shares(weights), strict=True))
    needed = config.steps * config.batch.rows
    return Plan(
        parameters=sum(p.numel() for p in trained),
        horizon=horizon,
        updates=updates,
        memory=trace_memory(config, trained) if method.name == "mixwell" else {method.name: held},
        extra_arithmetic=extra.per_step + computed / needed,
        steps_before=extra.before,
        domains={
            name: DomainPlan(
                len(rows), _token_count(rows), needed * float(shares[name]) / len(rows), needed / len(rows)
            )
            for name, rows in data.domains.items()
        },
        seconds=seconds,
        plain_seconds=plain,
        steps=config.steps,
        advice=advice(config, trainable, data),
        limits={name: high for name, (_, high) in limits.items() if high < 1},
    )


def distributed_cost(
    config: Config, parameters: Sequence[Tensor], *, processes: int
) -> tuple[TrafficModel, dict[str, float]]:
    """Return the communication of several processes, and the bytes of traces on each rank, by kind."""
    shadows = _shadows(parameters)
    known = Parameters.of(shadows, optimization.build_optimizer(config.optimizer, list(shadows)))
    training = TrafficModel(
        config.parallel.strategy,
        size=sum(p.nbytes for p in parameters),
        tensors=len(parameters),
        domains=len(config.domains),
        world_size=processes,
        mixed=config.traces.takes_mixed_batches,
        projected=config.traces.projected_size(known),
        preconditioned=config.optimizer.preconditioned,
    )
    held: dict[str, float] = dict(trace_memory(config, parameters))
    if config.parallel.strategy == "fsdp":
        for kind, size in list(held.items()):
            match TRACES.get(kind).with_sharded_parameters:
                case "sharded":
                    held[kind] = size / processes
                case "unsupported":
                    del held[kind]
                case "replicated":
                    pass
    return training, held


def _shadows(parameters: Sequence[Tensor]) -> nn.ParameterList:
    """Return copies on the meta device, where tensors have a size but no memory."""
    return nn.ParameterList(nn.Parameter(torch.empty_like(p, device="meta")) for p in parameters)


def advice(config: Config, trainable: Trainable, data: Data) -> str:
    """Return a sentence on which kind of traces to take.

    Projected ones cost least in time and memory wherever layers can be hooked and the losses of rows are known.
    Dense ones are exact, and cost m copies of the parameters and a backward pass for each domain; bfloat16 ones
    are half of that.
    """
    if trainable.row_losses is None:
        return "with a function for the losses of rows, projected traces would be cheaper (traces: projected)"
    if any(
        isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d) for m in trainable.model.modules()
    ):
        return "BatchNorm mixes the rows of a batch: dense traces, or bfloat16 where their memory is short"
    if any(isinstance(m, nn.Conv1d | nn.Conv2d | nn.Conv3d) for m in trainable.model.modules()):
        return "dense traces are as fast for convolutions; projected ones where memory is short"
    if len(data.domains) > 8 or config.trace_kind == "projected":
        return "projected traces; dense ones to compare with (mixwell fidelity measures how good either is)"
    return "projected traces are cheaper (traces: projected); dense ones are exact"


def trace_memory(config: Config, parameters: Sequence[Tensor]) -> dict[str, int]:
    """Return the bytes that mixing takes in addition to plain training, by kind of traces, least first."""
    shadows = _shadows(parameters)
    optimizer = optimization.build_optimizer(config.optimizer, list(shadows))
    found: dict[str, int] = {}
    for kind in TRACES.names():
        chosen = config.model_copy(update={"mixer": config.mixer.model_copy(update={"traces": kind})})
        size = sum(p.numel() for p in parameters), len(config.domains)
        least = chosen.traces.least_bytes(*size)
        if least > MOST_BYTES:
            found[kind] = least
            continue
        signal = builder.hypergradient(chosen)
        found[kind] = Mixer(shadows, optimizer, tuple(config.domains), horizon=1, signal=signal).nbytes
        if not (signal.requirements.domain_batches or chosen.traces.takes_mixed_batches):
            # The mixer allocates the sum of the domains' gradients with the first of them.
            found[kind] += sum(p.nbytes for p in parameters)
        if config.optimizer.clip_norm is not None:
            # Allocated with the first gradient.
            found[kind] += chosen.traces.clipping_bytes(*size)
    return dict(sorted(found.items(), key=lambda item: item[1]))


def _seconds(trainers: Sequence[Trainer]) -> list[float]:
    """Return the least time of a step of each; they take turns, so that a busy machine slows all of them."""
    taken: list[list[float]] = [[] for _ in trainers]
    for _ in range(1 + TIMED_STEPS):
        for trainer, times in zip(trainers, taken, strict=True):
            if trainer.finished:
                continue
            begun = time.perf_counter()
            trainer.step()
            times.append(time.perf_counter() - begun)
    # The first step also allocates memory and compiles.
    return [min(times[1:] or times) for times in taken]


def _token_count(rows: IndexedDataset) -> int | None:
    return rows.tokenized.tokens if isinstance(rows, TokenRows) else None
