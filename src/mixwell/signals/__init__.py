"""What is measured per domain over a round."""

from mixwell.signals.affinity import FreshAffinity, KeptAffinity
from mixwell.signals.alignment import Alignment
from mixwell.signals.base import Signal
from mixwell.signals.constant import Still
from mixwell.signals.domain_losses import Losses
from mixwell.signals.excess_losses import ExcessLosses
from mixwell.signals.gradient_moments import DescentBound, Moments
from mixwell.signals.hypergradient import Hypergradient
from mixwell.signals.implicit import ImplicitGradient
from mixwell.signals.influence import Influence
from mixwell.signals.learned_curriculum import LearnedRowCurriculum
from mixwell.signals.loss_network import LossNetwork
from mixwell.signals.loss_rewards import Rewards
from mixwell.signals.row_alignment import RowAlignment
from mixwell.signals.row_curriculum import GivenRowCurriculum
from mixwell.signals.scaling_law import ScalingLaws
from mixwell.signals.twin_networks import Twins

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
