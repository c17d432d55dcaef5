"""The mixer: its batches and scopes, the accumulation of a step and of a round, records and state.

``mixer.py`` has the calls of a training loop. ``step.py`` accumulates a training step; ``round.py`` accumulates a
round and updates the weights at its end; ``state.py`` captures and restores both.
"""
