"""Runs: a config file, the loop, checkpoints and the run directory."""
