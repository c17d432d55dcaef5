"""References that are independent of the estimators, and comparisons with them.

- ``unroll``: exact hypergradients of T steps, and those of the minimizer;
- ``quadratics``: problems on which these have a closed form;
- ``fidelity``: ``measure_fidelity``, an estimate on the user's own model compared
  with the exact hypergradient, by the measures of ``comparison``;
- ``theory``: the bounds of the paper's theorems, and ``averaging``: the effect of several validation points.
"""
