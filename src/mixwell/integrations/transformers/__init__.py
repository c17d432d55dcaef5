"""Mixing in transformers, TRL and PEFT: :class:`MixerTrainer`."""

from mixwell.integrations.transformers.trainer import MixerTrainer

__all__ = ["MixerTrainer"]
