"""References that are independent of the estimators, and comparisons with them.

- :mod:`unroll <mixwell.reference.unroll>`: exact hypergradients of T steps, and those of the minimizer;
- :mod:`quadratics <mixwell.reference.quadratics>`: problems on which these have a closed form;
- :mod:`fidelity <mixwell.reference.fidelity>`: ``measure_fidelity``, an estimate on the user's own model compared
  with the exact hypergradient, by the measures of :mod:`comparison <mixwell.reference.comparison>`;
- :mod:`theory <mixwell.reference.theory>`: the bounds of the paper's theorems, and :mod:`averaging
  <mixwell.reference.averaging>`: the effect of several validation points.
"""
