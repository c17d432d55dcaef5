"""The mixer: its scopes, the accumulation of a step, the records of rounds, and its state."""
