"""The paper's algorithm: how the validation loss at the end of a round depends on the weights of the domains.

With ``z_j = -d theta / d w_j``, the trace of domain j, a training step is

    ``z_j <- (1 - eta gamma) z_j + eta P g_j``

and the hypergradient is ``h_j = -<grad L_V, z_j>``. In the order in which a step uses them:

1. ``parameters``: theta, the tensors that the optimizer trains;
2. ``responses``: eta and P, one module per family of optimizers;
3. ``curvature``: gamma, the approximate Hessian;
4. ``capture``: g_j of all domains from one backward pass of a mixed batch;
5. ``traces``: z_j, the recursion and ``<grad L_V, z_j>``, one module per kind.

:class:`mixwell.signals.hypergradient.Hypergradient` calls them.
"""
