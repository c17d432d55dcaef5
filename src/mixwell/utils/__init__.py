"""What every room may use: registries, atomic files and locks, terminal output, the environment of results."""
