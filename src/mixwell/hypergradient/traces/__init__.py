"""Storage for the per-domain traces ``z_j = -d theta / d w_j``, one module per kind."""

from mixwell.hypergradient.traces.base import TRACES, Combined, StepModel, Traces, TracesConfig
from mixwell.hypergradient.traces.dense import DenseTraces
from mixwell.hypergradient.traces.forward_mode import ForwardModeTraces
from mixwell.hypergradient.traces.projected import ProjectedTraces
from mixwell.hypergradient.traces.sketched import SketchedTraces

__all__ = [
    "TRACES",
    "Combined",
    "DenseTraces",
    "ForwardModeTraces",
    "ProjectedTraces",
    "SketchedTraces",
    "StepModel",
    "Traces",
    "TracesConfig",
]
