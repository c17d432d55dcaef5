"""Comparisons of methods on one problem with the same seeds, data and compute."""
