"""Type aliases that several rooms share."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor, nn

Vector = NDArray[np.float64]
"""One number per domain, shape ``(m,)``."""
Indices = NDArray[np.int64]
"""Row numbers of a dataset."""
Json = dict[str, object]
"""Plain values that JSON can hold."""
Gradients = list["Tensor | None"]
"""One gradient per trained parameter, ``None`` for a parameter that has none."""
LossFn = Callable[["nn.Module", Any], "Tensor"]
"""A function of the model and a batch that returns a loss: one number, or one per row."""
