"""The components of the paper's signal.

Optimizer responses, curvature, traces, and the capture of per-domain gradients from mixed batches.
"""
