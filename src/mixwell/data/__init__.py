"""Where training data come from."""
