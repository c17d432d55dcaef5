"""The response of the parameters to a gradient, one module per family of optimizers.

With ``z_j = -d theta / d w_j`` one step of an optimizer with learning rate eta, preconditioner P and decay
lambda is, to first order (:class:`StepResponse`),

    ``z_j <- (1 - eta lambda - eta P H) z_j + eta P g_j``

and to all orders in its own moments (:meth:`OptimizerResponse.differentiate_step`) the derivative of its update
rule. P is any linear map on the gradient of one parameter (:class:`Preconditioner`). Add an optimizer with
``@RESPONSES.register(MyOptimizer)`` on a subclass of :class:`OptimizerResponse`.
"""

from mixwell.hypergradient.responses.adam import AdamResponse as AdamResponse
from mixwell.hypergradient.responses.base import RESPONSES as RESPONSES
from mixwell.hypergradient.responses.base import DiagonalPreconditioner as DiagonalPreconditioner
from mixwell.hypergradient.responses.base import OptimizerResponse as OptimizerResponse
from mixwell.hypergradient.responses.base import PlainResponse as PlainResponse
from mixwell.hypergradient.responses.base import Preconditioner as Preconditioner
from mixwell.hypergradient.responses.base import StepResponse as StepResponse
from mixwell.hypergradient.responses.base import response_for as response_for
from mixwell.hypergradient.responses.base import unwrap_optimizer as unwrap_optimizer
from mixwell.hypergradient.responses.sgd import SgdResponse as SgdResponse
