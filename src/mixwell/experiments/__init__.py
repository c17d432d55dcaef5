"""The experiments of the paper, and ours."""
