"""Runs from a config: model, data, optimizer, checkpoints, metrics, display and plan."""
