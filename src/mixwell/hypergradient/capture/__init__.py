"""The gradients of all domains from one backward pass of a mixed batch.

For a linear layer with inputs X and output gradients dY, domain j's gradient is ``dY^T X`` over its own rows,
so one pass serves all domains. In the order in which a mixed batch uses them:

1. ``row_groups``: the rows of each domain, and sums over them;
2. ``hooks``: hooks on the layers, which pass X and dY to the layer's rule;
3. ``layer_rules``: the gradients of a layer's parameters from X and dY, one module per type of layer;
4. ``accumulators``: where these gradients go, in full or projected;
5. ``projections``: A and B of the projected gradient ``B^T G A = (dY B)^T (X A)``.
"""
