"""What is measured per domain over a round."""

from mixwell.signals.affinity import FreshAffinity, KeptAffinity
from mixwell.signals.alignment import Alignment
from mixwell.signals.base import Signal
from mixwell.signals.excess import ExcessLosses
from mixwell.signals.hypergradient import Hypergradient
from mixwell.signals.implicit import ImplicitGradient
from mixwell.signals.influence import Influence
from mixwell.signals.learned_curriculum import LearnedRowCurriculum
from mixwell.signals.loss_network import LossNetwork
from mixwell.signals.losses import Losses
from mixwell.signals.moments import DescentBound, Moments
from mixwell.signals.rewards import Rewards
from mixwell.signals.row_alignment import RowAlignment
from mixwell.signals.row_curriculum import GivenRowCurriculum
from mixwell.signals.scaling_law import ScalingLaws
from mixwell.signals.still import Still
from mixwell.signals.twins import Twins

__all__ = [
    "Alignment",
    "DescentBound",
    "ExcessLosses",
    "FreshAffinity",
    "GivenRowCurriculum",
    "Hypergradient",
    "ImplicitGradient",
    "Influence",
    "KeptAffinity",
    "LearnedRowCurriculum",
    "LossNetwork",
    "Losses",
    "Moments",
    "Rewards",
    "RowAlignment",
    "ScalingLaws",
    "Signal",
    "Still",
    "Twins",
]
