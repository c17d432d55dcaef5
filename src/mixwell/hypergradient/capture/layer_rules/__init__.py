"""How the gradients of a layer's parameters arise, row by row: one module per type of layer.

A rule saves part of the inputs X in the forward pass and adds the gradient of each domain in the backward pass,
when the gradient dY of the outputs is known. It writes its layer's gradient as one of three sums over rows:

- ``add_products``: ``G = dY^T X``, as ``(dY B)^T (X A)`` where gradients are projected;
- ``add_vectors``: a sum of vectors, as for a bias or the scale of a norm;
- ``add_gradient``: the full gradient of one domain, for everything else.

The accumulator knows where the sums go (:mod:`mixwell.hypergradient.capture.accumulators`). The saved tensors are
small (r numbers per position instead of a layer's width), or refer to tensors that PyTorch saves for its own
backward pass.

Add a type of layer with ``@LAYER_RULES.register(MyLayer)`` on a subclass of :class:`LayerRule`, in a module of
its own.
"""

from mixwell.hypergradient.capture.layer_rules.base import LAYER_RULES as LAYER_RULES
from mixwell.hypergradient.capture.layer_rules.base import LayerCall as LayerCall
from mixwell.hypergradient.capture.layer_rules.base import LayerRule as LayerRule
from mixwell.hypergradient.capture.layer_rules.convolution import ConvolutionRule as ConvolutionRule
from mixwell.hypergradient.capture.layer_rules.embedding import EmbeddingRule as EmbeddingRule
from mixwell.hypergradient.capture.layer_rules.linear import LinearRule as LinearRule
from mixwell.hypergradient.capture.layer_rules.linear import TransposedLinearRule as TransposedLinearRule
from mixwell.hypergradient.capture.layer_rules.lookup import layers_of as layers_of
from mixwell.hypergradient.capture.layer_rules.lookup import rule_for as rule_for
from mixwell.hypergradient.capture.layer_rules.norm import NormRule as NormRule
from mixwell.hypergradient.capture.layer_rules.recompute import RecomputeRule as RecomputeRule
