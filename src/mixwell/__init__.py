"""Learn how much of each training domain a model should see, while it trains.

The names below are imported when they are first used, so that ``mixwell --help`` need not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from mixwell._version import __version__ as __version__

if TYPE_CHECKING:
    from mixwell.data.loader import MixtureLoader as MixtureLoader
    from mixwell.data.mixture_dataset import MixtureDataset as MixtureDataset
    from mixwell.hypergradient.curvature import Curvature as Curvature
    from mixwell.hypergradient.curvature import ExactCurvature as ExactCurvature
    from mixwell.hypergradient.curvature import IsotropicCurvature as IsotropicCurvature
    from mixwell.hypergradient.traces import DenseTraces as DenseTraces
    from mixwell.hypergradient.traces import ForwardModeTraces as ForwardModeTraces
    from mixwell.hypergradient.traces import ProjectedTraces as ProjectedTraces
    from mixwell.hypergradient.traces import SketchedTraces as SketchedTraces
    from mixwell.hypergradient.traces import Traces as Traces
    from mixwell.mixer.batch import DomainBatch as DomainBatch
    from mixwell.mixer.batch import MixtureBatch as MixtureBatch
    from mixwell.mixer.mixer import Mixer as Mixer
    from mixwell.mixer.records import RoundRecord as RoundRecord
    from mixwell.reference.fidelity import Fidelity as Fidelity
    from mixwell.reference.fidelity import measure_fidelity as measure_fidelity
    from mixwell.signals import ConstantWeights as ConstantWeights
    from mixwell.signals import Hypergradient as Hypergradient
    from mixwell.signals import Signal as Signal
    from mixwell.signals.probes import Probes as Probes
    from mixwell.simplex.constraints import Cap as Cap
    from mixwell.simplex.constraints import Constraint as Constraint
    from mixwell.simplex.constraints import Floor as Floor
    from mixwell.simplex.constraints import PriorPull as PriorPull
    from mixwell.simplex.horizons import DeterministicHorizon as DeterministicHorizon
    from mixwell.simplex.horizons import FixedHorizon as FixedHorizon
    from mixwell.simplex.horizons import Horizon as Horizon
    from mixwell.simplex.horizons import StochasticHorizon as StochasticHorizon
    from mixwell.simplex.repetition import EpochCap as EpochCap
    from mixwell.simplex.repetition import EpochPace as EpochPace
    from mixwell.simplex.updates import MirrorDescent as MirrorDescent
    from mixwell.simplex.updates import ProjectedDescent as ProjectedDescent
    from mixwell.simplex.updates import SoftmaxWeights as SoftmaxWeights
    from mixwell.simplex.updates import UniformSmoothing as UniformSmoothing
    from mixwell.simplex.updates import Update as Update
    from mixwell.simplex.weights import Weights as Weights
    from mixwell.training.api import train as train

_ROOMS = {
    # core
    "mixer.mixer": ("Mixer",),
    "simplex.weights": ("Weights",),
    "mixer.records": ("RoundRecord",),
    "reference.fidelity": ("Fidelity", "measure_fidelity"),
    # batches and whole runs
    "data.loader": ("MixtureLoader",),
    "data.mixture_dataset": ("MixtureDataset",),
    "mixer.batch": ("DomainBatch", "MixtureBatch"),
    "training.api": ("train",),
    # methods that compute outside of the training step
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
        "UniformSmoothing",
        "Update",
    ),
    "simplex.horizons": ("DeterministicHorizon", "FixedHorizon", "Horizon", "StochasticHorizon"),
    "simplex.constraints": ("Cap", "Constraint", "Floor", "PriorPull"),
    "simplex.repetition": ("EpochCap", "EpochPace"),
}
_HOMES = {name: room for room, names in _ROOMS.items() for name in names}

__all__ = sorted([*_HOMES, "__version__"])  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'mixwell' has no attribute {name!r}")
    value = getattr(import_module(f"mixwell.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
