"""What is measured per domain over a round; a method combines one signal with an update.

| module | methods |
|---|---|
| ``hypergradient`` | mixwell (the paper), truncated |
| ``implicit_gradient`` | implicit-cg, implicit-neumann, single-loop |
| ``alignment`` | DoGE |
| ``gradient_moments`` | PiKE |
| ``influence``, ``influence_mixtures`` | TiKMiX: the signal, and the mixture that follows from it |
| ``losses`` | Group DRO, DoReMi and dynamic loading (excess losses), ODM (rewards) |
| ``scaling_laws`` | ADO |
| ``affinity`` | Skill-It, Aioli |
| ``twin_networks`` | TANDEM |
| ``row_alignment`` | Learning to Reweight |
| ``row_network`` | Meta-Weight-Net |
| ``row_curriculum`` | MentorNet |

``base`` has :class:`Signal`, and ``row_weighting`` what the last three share. Signals that compute outside of the
training step do it with ``probes``, ``probe_derivatives`` (of every row's loss) and ``model_copy``.
"""

from mixwell.signals.affinity import OnlineAffinity, SkillAffinity
from mixwell.signals.alignment import Alignment
from mixwell.signals.base import ConstantWeights, Signal
from mixwell.signals.gradient_moments import DescentBound, GradientMoments
from mixwell.signals.hypergradient import Hypergradient
from mixwell.signals.implicit_gradient import ImplicitGradient
from mixwell.signals.influence import Influence
from mixwell.signals.losses import DomainLosses, ExcessLosses, LossRewards
from mixwell.signals.row_alignment import RowAlignment
from mixwell.signals.row_curriculum import GivenRowCurriculum, LearnedRowCurriculum
from mixwell.signals.row_network import LossNetwork
from mixwell.signals.scaling_laws import ScalingLaws
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
