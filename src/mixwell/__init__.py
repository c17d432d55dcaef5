"""Learn how much of each training domain a model should see, while it trains.

The names below are imported when they are first used, so that ``mixwell --help`` need not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from mixwell._version import __version__

if TYPE_CHECKING:
    from mixwell.constraints import Cap, Constraint, Floor, Prior
    from mixwell.curvature import (
        Curvature,
        DiagonalCurvature,
        ExactCurvature,
        IsotropicCurvature,
        PerTensorCurvature,
    )
    from mixwell.data.loader import Loader
    from mixwell.fidelity import Fidelity, measure_fidelity
    from mixwell.horizons import Deterministic, Every, Horizon, Stochastic
    from mixwell.measured import MeasuredCurvature
    from mixwell.mixer import Mixer
    from mixwell.probes import Probes
    from mixwell.recipes import recipe
    from mixwell.records import RoundRecord
    from mixwell.repetition import EpochCap, EpochPace
    from mixwell.signals import Hypergradient, Signal, Still
    from mixwell.traces import (
        AuditedTraces,
        BFloat16Traces,
        CarriedTraces,
        DenseTraces,
        ProjectedTraces,
        SketchedTraces,
        SubsetTraces,
        TraceError,
        Traces,
    )
    from mixwell.training.api import train
    from mixwell.updates import (
        Assigned,
        MirrorDescent,
        ProjectedDescent,
        SelfTunedMirrorDescent,
        Smoothed,
        Update,
    )
    from mixwell.weights import Weights

_ROOMS = {
    # the heart
    "mixer": ("Mixer",),
    "weights": ("Weights",),
    "records": ("RoundRecord",),
    "fidelity": ("Fidelity", "measure_fidelity"),
    # batches and whole runs
    "data.loader": ("Loader",),
    "training.api": ("train",),
    # every method of the field
    "recipes": ("recipe",),
    "probes": ("Probes",),
    # what a mixer is made of
    "signals": ("Hypergradient", "Signal", "Still"),
    "curvature": (
        "Curvature",
        "DiagonalCurvature",
        "ExactCurvature",
        "IsotropicCurvature",
        "PerTensorCurvature",
    ),
    "measured": ("MeasuredCurvature",),
    "traces": (
        "AuditedTraces",
        "BFloat16Traces",
        "CarriedTraces",
        "DenseTraces",
        "ProjectedTraces",
        "SketchedTraces",
        "SubsetTraces",
        "TraceError",
        "Traces",
    ),
    "updates": (
        "Assigned",
        "MirrorDescent",
        "ProjectedDescent",
        "SelfTunedMirrorDescent",
        "Smoothed",
        "Update",
    ),
    "horizons": ("Deterministic", "Every", "Horizon", "Stochastic"),
    "constraints": ("Cap", "Constraint", "Floor", "Prior"),
    "repetition": ("EpochCap", "EpochPace"),
}
_HOMES = {name: room for room, names in _ROOMS.items() for name in names}

__all__ = [
    "Assigned",
    "AuditedTraces",
    "BFloat16Traces",
    "Cap",
    "CarriedTraces",
    "Constraint",
    "Curvature",
    "DenseTraces",
    "Deterministic",
    "DiagonalCurvature",
    "EpochCap",
    "EpochPace",
    "Every",
    "ExactCurvature",
    "Fidelity",
    "Floor",
    "Horizon",
    "Hypergradient",
    "IsotropicCurvature",
    "Loader",
    "MeasuredCurvature",
    "MirrorDescent",
    "Mixer",
    "PerTensorCurvature",
    "Prior",
    "Probes",
    "ProjectedDescent",
    "ProjectedTraces",
    "RoundRecord",
    "SelfTunedMirrorDescent",
    "Signal",
    "SketchedTraces",
    "Smoothed",
    "Still",
    "Stochastic",
    "SubsetTraces",
    "TraceError",
    "Traces",
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
