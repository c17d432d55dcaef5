"""What is measured per domain over a round."""

from mixwell.signals.affinity import OnlineAffinity, SkillAffinity
from mixwell.signals.alignment import Alignment
from mixwell.signals.base import Signal
from mixwell.signals.constant import ConstantWeights
from mixwell.signals.domain_losses import DomainLosses
from mixwell.signals.excess_losses import ExcessLosses
from mixwell.signals.gradient_moments import DescentBound, GradientMoments
from mixwell.signals.hypergradient import Hypergradient
from mixwell.signals.implicit import ImplicitGradient
from mixwell.signals.influence import Influence
from mixwell.signals.learned_curriculum import LearnedRowCurriculum
from mixwell.signals.loss_network import LossNetwork
from mixwell.signals.loss_rewards import LossRewards
from mixwell.signals.row_alignment import RowAlignment
from mixwell.signals.row_curriculum import GivenRowCurriculum
from mixwell.signals.scaling_law import ScalingLaws
from mixwell.signals.twin_networks import TwinNetworks

__all__ = [
    "Alignment",
    "ConstantWeights",
    "DescentBound",
    "DomainLosses",
    "ExcessLosses",
    "GivenRowCurriculum",
    "GradientMoments",
    "Hypergradient",
    "ImplicitGradient",
    "Influence",
    "LearnedRowCurriculum",
    "LossNetwork",
    "LossRewards",
    "OnlineAffinity",
    "RowAlignment",
    "ScalingLaws",
    "Signal",
    "SkillAffinity",
    "TwinNetworks",
]
