"""The models of the runner: each file registers a config section that builds a :class:`Trainable`."""
