"""What reproduces the paper and compares methods.

The quadratic example, the bounds, MNIST, the demo, `mixwell compare`, and the embedded problems.
"""
