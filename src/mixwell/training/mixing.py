"""The mixer and the loader that a config asks for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import nn

from mixwell import methods
from mixwell.data.datasets import IndexedDataset
from mixwell.data.loader import MixtureLoader
from mixwell.methods import Task
from mixwell.methods.hypergradient import averaged_signal
from mixwell.mixer.mixer import Mixer
from mixwell.signals import Hypergradient, Signal
from mixwell.signals.probes import Probes
from mixwell.simplex.constraints import Cap, Constraint, Floor, PriorPull
from mixwell.simplex.repetition import EpochCap
from mixwell.simplex.weight_updater import WeightUpdater
from mixwell.training.config import Config, MixerConfig, method_options

if TYPE_CHECKING:
    from torch.optim import Optimizer


def build(
    config: Config,
    model: nn.Module,
    optimizer: Optimizer,
    domains: Mapping[str, IndexedDataset],
    probes: Probes | None = None,
) -> tuple[Mixer, MixtureLoader]:
    """Return a mixer, and a loader that shares its caps on epochs.

    Args:
        probes: what the method may compute on its own.
    """
    batch, mixing = config.batch, config.mixer
    sizes = {name: len(rows) for name, rows in domains.items()}
    cap = _epoch_cap(config, sizes)
    method = methods.find(mixing.method)
    recipe = method.recipe(task(config, sizes))
    learned = method.kind != "static"
    mixer = Mixer(
        model,
        optimizer,
        tuple(sizes),
        budget=config.steps,
        horizon=horizon(config),
        signal=recipe.signal,
        update=recipe.update,
        constraints=[*_constraints(mixing, cap), *recipe.constraints] if learned else [],
        weights=recipe.weights or _initial_weights(mixing, sizes),
        warmup=mixing.warmup if learned else 0,
        clip_norm=config.optimizer.clip_norm,
        on_nonfinite=mixing.on_nonfinite,
        probes=probes,
    )
    loader = MixtureLoader(
        domains,
        batch.rows,
        rule=batch.counts,
        least=_least(config, recipe.signal) if batch.least == "auto" else batch.least,
        cap=cap,
        seed=config.seed,
    )
    return mixer, loader


def expect_possible(config: Config, sizes: Mapping[str, int]) -> None:
    """Find out early whether there are weights that the constraints allow."""
    constraints = _constraints(config.mixer, _epoch_cap(config, sizes))
    WeightUpdater(None, constraints).start(tuple(sizes), _initial_weights(config.mixer, sizes))


def task(config: Config, sizes: Mapping[str, int], held_out: int | None = None) -> Task:
    """Return the task of a method's recipe.

    Args:
        held_out: rows of the validation set, where that is known.
    """
    return Task(
        domains=tuple(sizes),
        rows=sizes,
        batch_rows=config.batch.rows,
        steps=config.steps,
        seed=config.seed,
        mixer=config.mixer,
        options=method_options(methods.find(config.mixer.method), config.mixer.options),
        traces=config.traces,
        held_out=held_out,
        evaluated=None if held_out is None else min(held_out, config.output.evaluate_rows),
    )


def horizon(config: Config) -> int:
    """T of a run.

    Returns:
        Steps of a round; all of them where the weights never change.
    """
    return methods.find(config.mixer.method).length(config.mixer.horizon, config.steps)


def hypergradient(config: Config) -> Hypergradient:
    """Return the hypergradient that a config asks for, whatever its method."""
    mixer = config.mixer
    own = mixer.options if mixer.method == "mixwell" else {}
    plain = config.model_copy(
        update={"mixer": mixer.model_copy(update={"method": "mixwell", "options": own})}
    )
    return averaged_signal(task(plain, dict.fromkeys(config.domains, 1)))


def _least(config: Config, signal: Signal) -> int | None:
    """Return the least rows of each domain in every batch: the sampler's, but enough for a method's parts.

    Where nothing is measured, rows follow the weights: more of a small domain would only be repeated too often.
    """
    if signal.constant:
        return 0
    room = config.batch.rows // len(config.domains)
    return None if signal.parts == 1 else min(room, max(signal.parts, room // 4))


def _epoch_cap(config: Config, sizes: Mapping[str, int]) -> EpochCap | None:
    most = config.mixer.max_epochs
    return None if most is None else EpochCap(sizes, most, batch_size=config.batch.rows, budget=config.steps)


def _constraints(mixing: MixerConfig, cap: EpochCap | None) -> list[Constraint]:
    found: list[Constraint] = [] if cap is None else [cap]
    if mixing.floor != 0:
        found.append(Floor(mixing.floor))
    if mixing.cap != 1:
        found.append(Cap(mixing.cap))
    if mixing.prior is not None:
        found.append(PriorPull(mixing.prior, mixing.prior_strength))
    return found


def _initial_weights(mixing: MixerConfig, sizes: Mapping[str, int]) -> Mapping[str, float] | None:
    if mixing.weights == "uniform":
        return None
    if mixing.weights == "proportional":
        return {name: float(size) for name, size in sizes.items()}
    return mixing.weights
