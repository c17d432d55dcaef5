"""Mixing in transformers: :class:`MixerTrainer`, and weights from losses alone for those who cannot subclass."""

from mixwell.integrations.transformers.loss_callback import DomainLossCallback
from mixwell.integrations.transformers.trainer import MixerTrainer

__all__ = ["DomainLossCallback", "MixerTrainer"]
