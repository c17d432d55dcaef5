"""What every room may use: atomic files and locks, terminal output, the environment of results."""
