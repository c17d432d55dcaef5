"""Where the per-domain traces ``z_j = -d theta / d w_j`` live."""

from mixwell.traces.audited import AuditedTraces, TraceError
from mixwell.traces.base import Combined, StepModel, Traces
from mixwell.traces.bfloat16 import BFloat16Traces
from mixwell.traces.carried import CarriedTraces
from mixwell.traces.dense import DenseTraces
from mixwell.traces.projected import ProjectedTraces
from mixwell.traces.sketched import SketchedTraces
from mixwell.traces.subset import SubsetTraces

__all__ = [
    "AuditedTraces",
    "BFloat16Traces",
    "CarriedTraces",
    "Combined",
    "DenseTraces",
    "ProjectedTraces",
    "SketchedTraces",
    "StepModel",
    "SubsetTraces",
    "TraceError",
    "Traces",
]
