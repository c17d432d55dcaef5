"""Helpers for every room: registries, atomic files and locks, terminal output, the environment of results."""
