"""Mixing in transformers: :class:`MixedTrainer`, and weights from losses alone for those who cannot subclass."""

from mixwell.integrations.transformers.loss_callback import DomainLossCallback
from mixwell.integrations.transformers.trainer import MixedTrainer

__all__ = ["DomainLossCallback", "MixedTrainer"]
