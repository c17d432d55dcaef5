"""What is measured per domain over a round."""

from mixwell.signals.base import Signal
from mixwell.signals.hypergradient import Hypergradient

__all__ = ["Hypergradient", "Signal"]
