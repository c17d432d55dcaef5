"""What a config asks for: its device, mixer and loader, and the context of its method."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

from mixwell import distributed, methods
from mixwell.data.datasets import IndexedDataset
from mixwell.data.loader import MixtureLoader
from mixwell.methods import MethodContext
from mixwell.methods.mixwell import averaged_signal
from mixwell.mixer.mixer import Mixer
from mixwell.signals import Hypergradient, Signal
from mixwell.signals.probes import Probes
from mixwell.simplex import rounds
from mixwell.simplex.constraints import Constraint
from mixwell.simplex.repetition import epoch_caps
from mixwell.simplex.weight_updater import WeightUpdater
from mixwell.training.config import Config, MixerConfig
from mixwell.training.constraints import CONSTRAINTS, ConstraintContext

if TYPE_CHECKING:
    from torch.optim import Optimizer


def build_mixer_and_loader(
    config: Config,
    model: nn.Module,
    optimizer: Optimizer,
    domains: Mapping[str, IndexedDataset],
    probes: Probes | None = None,
) -> tuple[Mixer, MixtureLoader]:
    """Return a mixer, and a loader that shares its cap on epochs.

    Args:
        domains: rows by domain.
        probes: for methods that compute outside of training steps.
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
        cap=next(iter(epoch_caps(constraints)), None),
        seed=config.seed,
    )
    return mixer, loader


def check_feasible(config: Config, sizes: Mapping[str, int]) -> None:
    """Raise ValueError if no weights satisfy the constraints; ``sizes`` are the rows by domain."""
    WeightUpdater(None, _constraints(config, sizes)).initial_weights(
        tuple(sizes), _initial_weights(config.mixer, sizes)
    )


def method_context(config: Config, sizes: Mapping[str, int], held_out: int | None = None) -> MethodContext:
    """Return the context of a method's recipe.

    Args:
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
        trace_every=mixer.trace_every,
        validation_rows=mixer.validation_rows,
        held_out=held_out,
        evaluated=None if held_out is None else min(held_out, config.output.evaluate_rows),
    )


def horizon(config: Config) -> int:
    """Return T, the steps of a round; all of the run's where the weights never change."""
    return methods.find(config.mixer.method).round_length(config.mixer.horizon, config.steps)


def hypergradient(config: Config) -> Hypergradient:
    """Return the hypergradient of a config's settings, whatever its method."""
    mixer = config.mixer
    own = mixer.options if mixer.method == "mixwell" else {}
    plain = config.model_copy(
        update={"mixer": mixer.model_copy(update={"method": "mixwell", "options": own})}
    )
    return averaged_signal(method_context(plain, dict.fromkeys(config.domains, 1)))


def validation_rows(config: Config, horizon: int, *, points: int) -> int:
    """Return the number of rows of one validation gradient, with ``points`` of them in a round."""
    wanted = config.mixer.validation_rows
    if wanted != "auto":
        return wanted
    rows = rounds.validation_rows(config.batch.rows, steps=horizon, points=points)
    return max(rows, distributed.world_size())  # at least one for each rank


def choose_device(name: str) -> torch.device:
    """Return the device of a name as PyTorch has it, or of ``auto``.

    Raises:
        ValueError: the device is not available.
    """
    if name in ("auto", "cuda") and torch.cuda.is_available():
        # With several processes each has chosen its GPU when it joined them.
        return (
            torch.device("cuda")
            if distributed.is_single_process()
            else torch.device("cuda", torch.cuda.current_device())
        )
    if name == "auto":
        # No backend of torch.distributed communicates tensors that are on MPS.
        mps = torch.backends.mps.is_available() and distributed.is_single_process()
        return torch.device("mps" if mps else "cpu")
    try:
        device = torch.device(name)
        if device.type == "meta":
            raise RuntimeError("it holds no values")
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"device: {name!r} is not available ({reason}); try auto or cpu") from error
    return device


def _least(config: Config, signal: Signal) -> int | None:
    """Return the least rows of each domain in every batch: the sampler's, but enough for a method's parts."""
    if signal.constant:
        # Nothing is measured, so a minimum would only repeat the rows of small domains more often.
        return 0
    room = config.batch.rows // len(config.domains)
    parts = signal.requirements.parts
    return None if parts == 1 else min(room, max(parts, room // 4))


def _constraints(config: Config, sizes: Mapping[str, int]) -> list[Constraint]:
    run = ConstraintContext(sizes, config.batch.rows, config.steps)
    built = [config.mixer.part(CONSTRAINTS.get(name)).build(run) for name in CONSTRAINTS.names()]
    return [one for one in built if one is not None]


def _initial_weights(mixing: MixerConfig, sizes: Mapping[str, int]) -> Mapping[str, float] | None:
    if mixing.weights == "uniform":
        return None
    if mixing.weights == "proportional":
        return {name: float(size) for name, size in sizes.items()}
    return mixing.weights
