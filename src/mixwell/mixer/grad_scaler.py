"""A message in place of torch's assertion where a loss is scaled by a ``GradScaler``."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from torch.amp.grad_scaler import GradScaler

MESSAGE = (
    "a GradScaler multiplies the loss and unscales gradients in its own step, so the mixer would combine scaled "
    "gradients; train in bfloat16 (torch.autocast(device, dtype=torch.bfloat16)), which needs no GradScaler: call "
    "loss.backward() and mixer.step() instead of scaler.scale(loss).backward() and scaler.step(...)"
)

_lock = threading.Lock()
_open_blocks = 0
_scale: Any = GradScaler.scale


def _refuse(scaler: GradScaler, outputs: Any) -> Any:
    if scaler.is_enabled():
        raise RuntimeError(f"scaler.scale(...) was called inside a block of the mixer: {MESSAGE}")
    return _scale(scaler, outputs)


@contextmanager
def refuse_grad_scaler() -> Generator[None]:
    """Let ``scaler.scale(...)`` raise a ``RuntimeError`` inside, where the scaler is enabled.

    A scaled gradient cannot be told from a large one afterwards, and torch itself asserts in ``scaler.update()``,
    when the optimizer has stepped with it already.
    """
    global _open_blocks
    with _lock:
        _open_blocks += 1
        setattr(GradScaler, "scale", _refuse)  # noqa: B010 - a method with overloads
    try:
        yield
    finally:
        with _lock:
            _open_blocks -= 1
            if not _open_blocks:
                GradScaler.scale = _scale
