"""What the paper's signal is computed from.

Optimizer responses, curvature, traces, and the capture of per-domain gradients from mixed batches.
"""
