"""Where the per-domain traces ``z_j = -d theta / d w_j`` live."""

from mixwell.hypergradient.traces.audited import AuditedTraces, TraceError
from mixwell.hypergradient.traces.base import Combined, StepModel, Traces
from mixwell.hypergradient.traces.bfloat16 import BFloat16Traces
from mixwell.hypergradient.traces.dense import DenseTraces
from mixwell.hypergradient.traces.forward_mode import ForwardModeTraces
from mixwell.hypergradient.traces.projected import ProjectedTraces
from mixwell.hypergradient.traces.sketched import SketchedTraces
from mixwell.hypergradient.traces.subset import SubsetTraces

__all__ = [
    "AuditedTraces",
    "BFloat16Traces",
    "Combined",
    "DenseTraces",
    "ForwardModeTraces",
    "ProjectedTraces",
    "SketchedTraces",
    "StepModel",
    "SubsetTraces",
    "TraceError",
    "Traces",
]
