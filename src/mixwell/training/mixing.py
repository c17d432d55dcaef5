"""The mixer and the sampler that a config asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from torch import nn

from mixwell.constraints import Cap, Constraint, EpochCap, Floor, Prior
from mixwell.data.sampler import Sampler
from mixwell.mixer import Mixer
from mixwell.signals import Hypergradient, Still
from mixwell.traces import BFloat16Traces, DenseTraces, ProjectedTraces, SketchedTraces, Traces
from mixwell.training.config import Config, MixerConfig

if TYPE_CHECKING:
    from torch.optim import Optimizer


def build(
    config: Config, model: nn.Module, optimizer: Optimizer, sizes: Mapping[str, int]
) -> tuple[Mixer, Sampler]:
    """A mixer, and a sampler that shares its caps on epochs.

    Args:
        config: the settings.
        model: to be trained.
        optimizer: trains it.
        sizes: rows by domain.

    Returns:
        Both.
    """
    batch, mixing = config.batch, config.mixer
    cap = None
    if mixing.max_epochs is not None:
        cap = EpochCap(sizes, mixing.max_epochs, batch_size=batch.rows, budget=config.steps)
    sampler = Sampler(
        sizes,
        batch.rows,
        rule=batch.counts,
        least=None if batch.least == "auto" else batch.least,
        cap=cap,
        seed=config.seed,
    )
    learned = mixing.method == "mixwell"
    horizon = None if mixing.horizon == "auto" else mixing.horizon
    step_size = None if mixing.step_size == "auto" else mixing.step_size
    mixer = Mixer(
        model,
        optimizer,
        tuple(sizes),
        budget=config.steps,
        # Fixed weights have one round, so that the validation set is read once.
        horizon=horizon if learned else config.steps,
        signal=hypergradient(config) if learned else Still(),
        update=step_size if learned else 1.0,
        constraints=_constraints(mixing, cap) if learned else [],
        weights=_initial_weights(mixing, sizes),
        warmup=mixing.warmup if learned else 0,
        clip_norm=config.optimizer.clip_norm,
        on_nonfinite=mixing.on_nonfinite,
    )
    return mixer, sampler


def hypergradient(config: Config) -> Hypergradient:
    """The signal that a config asks for.

    Args:
        config: the settings.

    Returns:
        A new one.
    """
    mixing = config.mixer
    kinds: dict[str, Callable[[], Traces]] = {
        "projected": lambda: ProjectedTraces(mixing.rank),
        "dense": DenseTraces,
        "bfloat16": BFloat16Traces,
        "sketched": lambda: SketchedTraces(mixing.sketch_size),
    }
    return Hypergradient(mixing.curvature, kinds[config.traces]())


def _constraints(mixing: MixerConfig, cap: EpochCap | None) -> list[Constraint]:
    found: list[Constraint] = [] if cap is None else [cap]
    if mixing.floor != 0:
        found.append(Floor(mixing.floor))
    if mixing.cap != 1:
        found.append(Cap(mixing.cap))
    if mixing.prior is not None:
        found.append(Prior(mixing.prior, mixing.prior_strength))
    return found


def _initial_weights(mixing: MixerConfig, sizes: Mapping[str, int]) -> Mapping[str, float] | None:
    if mixing.weights == "uniform":
        return None
    if mixing.weights == "proportional":
        return {name: float(size) for name, size in sizes.items()}
    return mixing.weights
