"""When the scales of a preconditioner are read anew."""

from __future__ import annotations

from typing import cast, final

from mixwell.typing import Json

# Adam's second moment is a mean over as many steps as were taken, later over about 1000.
FRACTION, MOST = 0.1, 50


@final
class ScaleSchedule:
    """Says when to read r and c of ``P ~ r c^T``, which change by a few percent in between.

    In the first traced step of a round, and when a tenth more steps were taken than at the last time, or 50.

    Example:
        >>> schedule, read = ScaleSchedule(), []
        >>> for step in range(40):
        ...     if schedule.due:
        ...         schedule.restart()
        ...         read.append(step)
        ...     schedule.count(1)
        >>> read[:12], read[-3:]
        ([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], [30, 33, 37])
    """

    def __init__(self) -> None:
        self._steps, self._read_at = 0, cast("int | None", None)

    @property
    def due(self) -> bool:
        """Whether the scales are to be read."""
        last = self._read_at
        return last is None or self._steps - last >= min(max(FRACTION * last, 1), MOST)

    def restart(self) -> None:
        """Count from here: the scales are read."""
        self._read_at = self._steps

    def count(self, steps: int) -> None:
        """Count steps of the optimizer."""
        self._steps += steps

    def end_round(self) -> None:
        """Let the scales be read in the next traced step."""
        self._read_at = None

    def state(self) -> Json:
        """Return the counters."""
        return {"steps": self._steps, "read_at": self._read_at}

    def load_state(self, values: Json) -> None:
        """Restore the result of :meth:`state`."""
        self._steps, self._read_at = cast("int", values["steps"]), cast("int | None", values["read_at"])
