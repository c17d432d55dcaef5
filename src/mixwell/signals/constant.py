"""No signal: the weights stay as they are."""

from __future__ import annotations

from typing import final

import numpy as np
from typing_extensions import override

from mixwell.signals.base import Requirements, Signal
from mixwell.typing import Gradients, Vector


@final
class ConstantWeights(Signal):
    """Measures nothing and costs nothing, for training with fixed weights: all scores are zero."""

    constant = True
    requirements = Requirements(domain_batches=False, validation=False)

    def __repr__(self) -> str:
        return "ConstantWeights()"

    @override
    def scores(self, validation: Gradients | None) -> Vector:
        return np.zeros(len(self._domains))
