"""The response of the parameters to a gradient, one module per family of optimizers.

With ``z_j = -d theta / d w_j`` one step of an optimizer with learning rate eta, preconditioner P and decay
lambda is, to first order (:class:`StepResponse`),

    ``z_j <- (1 - eta lambda - eta P H) z_j + eta P g_j``

and to all orders in its own moments (:meth:`OptimizerModel.differentiate_step`) the derivative of its update
rule. P is any linear map on the gradient of one parameter (:class:`Preconditioner`). Add an optimizer with
``@OPTIMIZERS.registering(MyOptimizer)`` on a subclass of :class:`OptimizerModel`.
"""

from mixwell.hypergradient.responses.adam import AdamModel
from mixwell.hypergradient.responses.base import (
    OPTIMIZERS,
    DiagonalPreconditioner,
    OptimizerModel,
    PlainModel,
    Preconditioner,
    StepResponse,
    response_for,
    unwrap_optimizer,
)
from mixwell.hypergradient.responses.sgd import SgdModel

__all__ = [
    "OPTIMIZERS",
    "AdamModel",
    "DiagonalPreconditioner",
    "OptimizerModel",
    "PlainModel",
    "Preconditioner",
    "SgdModel",
    "StepResponse",
    "response_for",
    "unwrap_optimizer",
]
