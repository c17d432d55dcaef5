"""What is measured per domain over a round."""

from mixwell.signals.base import Signal
from mixwell.signals.hypergradient import Hypergradient
from mixwell.signals.still import Still

__all__ = ["Hypergradient", "Signal", "Still"]
