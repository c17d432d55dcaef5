"""Ctrl-C and SIGTERM: a run saves and stops, a sweep ends with a message. Importing it is quick."""

from __future__ import annotations

import signal
from collections.abc import Callable, Generator
from contextlib import contextmanager

STOPPED = "stopped; the same command continues where this one left off"
"""The message of a sweep."""


@contextmanager
def interruptible() -> Generator[None]:
    """Let Ctrl-C and SIGTERM raise InterruptedError while no workers handle them, such as before they start.

    A command enters it before it imports anything heavy, so that it ends in the same way whenever it is stopped.
    """
    try:
        # Python has no handler of its own for SIGTERM, which would end the process without a word.
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    except ValueError:  # only the main thread may handle signals
        yield
        return
    try:
        yield
    except KeyboardInterrupt as error:
        raise InterruptedError(STOPPED) from error
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def stop_signals() -> Generator[Callable[[], bool]]:
    """Yield a function that returns whether Ctrl-C or SIGTERM came; a second one ends the process at once."""
    came: list[int] = []

    def note(number: int, frame: object) -> None:
        came.append(number)
        signal.signal(number, before[signal.Signals(number)])

    try:
        before = {one: signal.signal(one, note) for one in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread, which alone may handle signals
        before = {}
    try:
        yield lambda: bool(came)
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
