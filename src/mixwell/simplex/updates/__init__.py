"""Updates: how the scores of a round move the weights."""

from mixwell.simplex.updates.base import RoundContext as RoundContext
from mixwell.simplex.updates.base import Update as Update
from mixwell.simplex.updates.base import UpdateState as UpdateState
from mixwell.simplex.updates.mirror_descent import MirrorDescent as MirrorDescent
from mixwell.simplex.updates.mirror_descent import mirror_step as mirror_step
from mixwell.simplex.updates.projected_descent import ProjectedDescent as ProjectedDescent
from mixwell.simplex.updates.smoothing import UniformSmoothing as UniformSmoothing
from mixwell.simplex.updates.softmax import SoftmaxWeights as SoftmaxWeights
from mixwell.simplex.updates.step_size import FACTOR as FACTOR
from mixwell.simplex.updates.step_size import LEAST_GAIN as LEAST_GAIN
from mixwell.simplex.updates.step_size import AutoStepSize as AutoStepSize
from mixwell.simplex.updates.step_size import trust as trust
