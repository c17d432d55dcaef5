"""Storage for the traces ``z_j = -d theta / d w_j`` of the domains, one module per kind.

- :class:`DenseTraces`: ``z_j`` in full, in float32 or bfloat16;
- :class:`ProjectedTraces`: ``B^T z_j A``, r x r numbers per layer; a mixed batch costs the same for any number of
  domains;
- :class:`SketchedTraces`: ``S z_j``, a given number of numbers in all;
- :class:`ForwardModeTraces`: ``z_j`` and the derivatives of the optimizer's moments, for exact hypergradients.

Add a kind with a subclass of :class:`Traces` and, for the config of a run, ``@TRACES.register(name)`` on a
:class:`TracesConfig`.
"""

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
