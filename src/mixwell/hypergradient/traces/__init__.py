"""Storage for the traces ``z_j = -d theta / d w_j`` of the domains, one module per kind.

- :class:`DenseTraces`: ``z_j`` in full, in float32 or bfloat16;
- :class:`ProjectedTraces`: ``B^T z_j A``, r x r numbers per layer; a mixed batch costs the same for any number of
  domains;
- :class:`SketchedTraces`: ``S z_j``, a given number of numbers in all;
- :class:`ForwardModeTraces`: ``z_j`` and the derivatives of the optimizer's moments, for exact hypergradients.

Add a kind with ``TRACES.register(name, constructor)`` and a subclass of :class:`Traces`.
"""

from mixwell.hypergradient.traces.base import TRACES as TRACES
from mixwell.hypergradient.traces.base import Combined as Combined
from mixwell.hypergradient.traces.base import StepModel as StepModel
from mixwell.hypergradient.traces.base import Traces as Traces
from mixwell.hypergradient.traces.dense import DenseTraces as DenseTraces
from mixwell.hypergradient.traces.forward_mode import ForwardModeTraces as ForwardModeTraces
from mixwell.hypergradient.traces.projected import ProjectedTraces as ProjectedTraces
from mixwell.hypergradient.traces.sketched import SketchedTraces as SketchedTraces
