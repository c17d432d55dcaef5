"""Reproductions of the paper, and comparisons of methods.

The quadratic example, the bounds, MNIST, `mixwell compare`, and the embedded problems (the demo is one).
"""
