"""Learn how much of each training domain a model should see, while it trains.

The names below are imported when they are first used, so that ``mixwell --help`` need not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from mixwell._version import __version__

if TYPE_CHECKING:
    from mixwell.data.loader import MixtureLoader
    from mixwell.hypergradient.curvature import (
        Curvature,
        ExactCurvature,
        IsotropicCurvature,
    )
    from mixwell.hypergradient.traces import (
        DenseTraces,
        ForwardModeTraces,
        ProjectedTraces,
        SketchedTraces,
        Traces,
    )
    from mixwell.methods.recipes import recipe
    from mixwell.mixer.mixer import Mixer
    from mixwell.mixer.records import RoundRecord
    from mixwell.reference.fidelity import Fidelity, measure_fidelity
    from mixwell.signals import ConstantWeights, Hypergradient, Signal
    from mixwell.signals.probes import Probes
    from mixwell.simplex.constraints import Cap, Constraint, Floor, PriorPull
    from mixwell.simplex.horizons import DeterministicHorizon, FixedHorizon, Horizon, StochasticHorizon
    from mixwell.simplex.repetition import EpochCap, EpochPace
    from mixwell.simplex.updates import (
        MirrorDescent,
        ProjectedDescent,
        SelfTunedMirrorDescent,
        SoftmaxWeights,
        UniformSmoothing,
        Update,
    )
    from mixwell.simplex.weights import Weights
    from mixwell.training.api import train

_ROOMS = {
    # the heart
    "mixer.mixer": ("Mixer",),
    "simplex.weights": ("Weights",),
    "mixer.records": ("RoundRecord",),
    "reference.fidelity": ("Fidelity", "measure_fidelity"),
    # batches and whole runs
    "data.loader": ("MixtureLoader",),
    "training.api": ("train",),
    # every method of the field
    "methods.recipes": ("recipe",),
    "signals.probes": ("Probes",),
    # what a mixer is made of
    "signals": ("Hypergradient", "Signal", "ConstantWeights"),
    "hypergradient.curvature": (
        "Curvature",
        "ExactCurvature",
        "IsotropicCurvature",
    ),
    "hypergradient.traces": (
        "ForwardModeTraces",
        "DenseTraces",
        "ProjectedTraces",
        "SketchedTraces",
        "Traces",
    ),
    "simplex.updates": (
        "SoftmaxWeights",
        "MirrorDescent",
        "ProjectedDescent",
        "SelfTunedMirrorDescent",
        "UniformSmoothing",
        "Update",
    ),
    "simplex.horizons": ("DeterministicHorizon", "FixedHorizon", "Horizon", "StochasticHorizon"),
    "simplex.constraints": ("Cap", "Constraint", "Floor", "PriorPull"),
    "simplex.repetition": ("EpochCap", "EpochPace"),
}
_HOMES = {name: room for room, names in _ROOMS.items() for name in names}

__all__ = [
    "Cap",
    "ConstantWeights",
    "Constraint",
    "Curvature",
    "DenseTraces",
    "DeterministicHorizon",
    "EpochCap",
    "EpochPace",
    "ExactCurvature",
    "Fidelity",
    "FixedHorizon",
    "Floor",
    "ForwardModeTraces",
    "Horizon",
    "Hypergradient",
    "IsotropicCurvature",
    "MirrorDescent",
    "Mixer",
    "MixtureLoader",
    "PriorPull",
    "Probes",
    "ProjectedDescent",
    "ProjectedTraces",
    "RoundRecord",
    "SelfTunedMirrorDescent",
    "Signal",
    "SketchedTraces",
    "SoftmaxWeights",
    "StochasticHorizon",
    "Traces",
    "UniformSmoothing",
    "Update",
    "Weights",
    "__version__",
    "measure_fidelity",
    "recipe",
    "train",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'mixwell' has no attribute {name!r}")
    value = getattr(import_module(f"mixwell.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
