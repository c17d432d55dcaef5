"""The mixer and the loader that a config asks for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import nn

from mixwell import methods
from mixwell.data.datasets import IndexedDataset
from mixwell.data.loader import MixtureLoader
from mixwell.methods import MethodContext
from mixwell.methods.hypergradient import averaged_signal
from mixwell.mixer.mixer import Mixer
from mixwell.signals import Hypergradient, Signal
from mixwell.signals.probes import Probes
from mixwell.simplex.constraints import Constraint
from mixwell.simplex.repetition import EpochCap
from mixwell.simplex.weight_updater import WeightUpdater
from mixwell.training.config import Config, MixerConfig
from mixwell.training.constraints import ConstraintContext, build_constraints

if TYPE_CHECKING:
    from torch.optim import Optimizer


def build_mixer_and_loader(
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
    constraints = _constraints(config, sizes)
    method = methods.find(mixing.method)
    recipe = method.recipe(method_context(config, sizes))
    learned = method.kind != "static"
    mixer = Mixer(
        model,
        optimizer,
        tuple(sizes),
        budget=config.steps,
        horizon=horizon(config),
        signal=recipe.signal,
        update=recipe.update,
        constraints=[*constraints, *recipe.constraints] if learned else [],
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
        least=_least(config, recipe.signal)
        if batch.min_rows_per_domain == "auto"
        else batch.min_rows_per_domain,
        cap=next((one for one in constraints if isinstance(one, EpochCap)), None),
        seed=config.seed,
    )
    return mixer, loader


def check_feasible(config: Config, sizes: Mapping[str, int]) -> None:
    """Find out early whether there are weights that the constraints allow.

    Args:
        config: the settings.
        sizes: rows by domain.
    """
    WeightUpdater(None, _constraints(config, sizes)).initial_weights(
        tuple(sizes), _initial_weights(config.mixer, sizes)
    )


def method_context(config: Config, sizes: Mapping[str, int], held_out: int | None = None) -> MethodContext:
    """Return the context of a method's recipe.

    Args:
        config: the settings.
        sizes: rows by domain.
        held_out: rows of the validation set, where known.
    """
    mixer = config.mixer
    return MethodContext(
        domains=tuple(sizes),
        rows=sizes,
        batch_rows=config.batch.rows,
        steps=config.steps,
        seed=config.seed,
        options=methods.find(mixer.method).parse_options(mixer.options),
        weights=mixer.weights,
        horizon=mixer.horizon,
        warmup=mixer.warmup,
        step_size=mixer.step_size,
        curvature=mixer.curvature,
        traces=config.traces,
        rank=mixer.projection_rank,
        sketch_size=mixer.sketch_size,
        validation_rows=mixer.validation_rows,
        held_out=held_out,
        evaluated=None if held_out is None else min(held_out, config.output.evaluate_rows),
    )


def horizon(config: Config) -> int:
    """T of a run.

    Returns:
        Steps of a round; all of them where the weights never change.
    """
    return methods.find(config.mixer.method).round_length(config.mixer.horizon, config.steps)


def hypergradient(config: Config) -> Hypergradient:
    """Return the hypergradient that a config asks for, whatever its method."""
    mixer = config.mixer
    own = mixer.options if mixer.method == "mixwell" else {}
    plain = config.model_copy(
        update={"mixer": mixer.model_copy(update={"method": "mixwell", "options": own})}
    )
    return averaged_signal(method_context(plain, dict.fromkeys(config.domains, 1)))


def _least(config: Config, signal: Signal) -> int | None:
    """Return the least rows of each domain in every batch: the sampler's, but enough for a method's parts.

    Where nothing is measured, rows follow the weights: more of a small domain would only be repeated too often.
    """
    if signal.constant:
        return 0
    room = config.batch.rows // len(config.domains)
    parts = signal.requirements.parts
    return None if parts == 1 else min(room, max(parts, room // 4))


def _constraints(config: Config, sizes: Mapping[str, int]) -> list[Constraint]:
    return build_constraints(config.mixer, ConstraintContext(sizes, config.batch.rows, config.steps))


def _initial_weights(mixing: MixerConfig, sizes: Mapping[str, int]) -> Mapping[str, float] | None:
    if mixing.weights == "uniform":
        return None
    if mixing.weights == "proportional":
        return {name: float(size) for name, size in sizes.items()}
    return mixing.weights
