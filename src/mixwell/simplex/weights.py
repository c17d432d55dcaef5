"""A named point on the simplex, in log space, with its history.

Weights of the paper's quadratic example reach a log-odds of -801 (and must be able to come back), so the
logarithms are the state and the probabilities are derived from them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import final

import numpy as np
from numpy.typing import NDArray

from mixwell.typing import Vector

# No log-weight goes below this, so that sums of two of them stay finite.
LOWEST_LOG = -1e300
TINY = float(np.finfo(np.float64).tiny)


def normalize(log: Vector) -> Vector:
    """Shift log-weights so that their exponentials sum to one.

    ``log_j - max - log(sum_i exp(log_i - max))``, then kept above :data:`LOWEST_LOG`.

    Args:
        log: unnormalized log-weights, finite or ``-inf``, shape ``(m,)``.

    Example:
        >>> normalize(np.array([0.0, 0.0, -1e305])).tolist()
        [-0.6931471805599453, -0.6931471805599453, -1e+300]
    """
    with np.errstate(over="ignore"):
        shifted = log - log.max()
        return np.maximum(shifted - np.log(np.exp(shifted).sum()), LOWEST_LOG)


@final
class Weights:
    """The weights of named domains: the last ones, their average over the steps taken, and their history.

    Args:
        names: the domains, all different.
        initial: positive numbers, by domain or in the order of ``names``; they are divided by their sum.
            ``None`` is uniform.

    Example:
        >>> weights = Weights(["web", "code"], {"web": 3, "code": 1})
        >>> weights["web"]
        0.75
        >>> weights.advance(np.log([0.5, 0.5]), steps=10)
        >>> weights.last
        {'web': 0.5, 'code': 0.5}
        >>> weights.average
        {'web': 0.75, 'code': 0.25}
    """

    def __init__(
        self, names: Sequence[str], initial: Mapping[str, float] | Sequence[float] | None = None
    ) -> None:
        self.names = _checked_names(names)
        self._log = normalize(np.log(_checked_initial(self.names, initial)))
        self._history: list[Vector] = [self._log]
        self._steps: list[int] = []

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __getitem__(self, name: str) -> float:
        return float(self.values[self.index(name)])

    def __repr__(self) -> str:
        inside = ", ".join(f"{name}={value:.4g}" for name, value in self.last.items())
        return f"Weights({inside})"

    def index(self, name: str) -> int:
        """Return the position of a domain in ``names``."""
        try:
            return self.names.index(name)
        except ValueError:
            raise ValueError(f"unknown domain {name!r}; the domains are {', '.join(self.names)}") from None

    @property
    def log(self) -> Vector:
        """The logarithms of the last weights, always finite, shape ``(m,)``."""
        return self._log.copy()

    @property
    def values(self) -> Vector:
        """The last weights, positive and summing to one, shape ``(m,)``."""
        return np.maximum(np.exp(self._log), TINY)

    @property
    def last(self) -> dict[str, float]:
        """The last weights, by domain."""
        return self._by_name(self.values)

    @property
    def average(self) -> dict[str, float]:
        """The average of the weights of finished rounds, by domain.

        ``sum_k s_k w_k / sum_k s_k``, ``s_k`` the steps of round ``k``. With rounds of one length this is the
        mean of ``w_0 .. w_{K-1}`` that the theorems bound. Before the first round ends it is the initial weights.
        """
        if not self._steps:
            return self._by_name(np.exp(self._history[0]))
        return self._by_name(np.average(np.exp(self._history[:-1]), axis=0, weights=self._steps))

    @property
    def history(self) -> NDArray[np.float64]:
        """All weights from the initial to the last ones, shape ``(finished rounds + 1, m)``."""
        return np.exp(np.stack(self._history))

    def advance(self, log: Vector, *, steps: int) -> None:
        """End a round of ``steps`` steps and set the weights of the next.

        Args:
            log: the new log-weights, not necessarily normalized, shape ``(m,)``.

        Raises:
            ValueError: the shape is wrong, a value is NaN or ``+inf``, or all are ``-inf``.
        """
        log = np.asarray(log, dtype=np.float64)
        if log.shape != self._log.shape:
            raise ValueError(f"expected {len(self)} log-weights, got shape {log.shape}")
        if np.isnan(log).any() or np.isposinf(log).any() or np.isneginf(log).all():
            raise ValueError(f"log-weights must not be NaN or +inf, nor all -inf; got {log.tolist()}")
        self._log = normalize(log)
        self._history.append(self._log)
        self._steps.append(int(steps))

    def replace(self, log: Vector) -> None:
        """Set the weights of a round that has not begun, in place of those that an update has set.

        Args:
            log: the new log-weights, finite, shape ``(m,)``.
        """
        self._log = self._history[-1] = normalize(log)

    def state(self) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Return the log-weights of all rounds, shape ``(k + 1, m)``, and the steps of each, shape ``(k,)``."""
        return np.stack(self._history), np.asarray(self._steps, dtype=np.int64)

    def load_state(self, history: NDArray[np.float64], steps: NDArray[np.int64]) -> None:
        """Restore the result of :meth:`state`."""
        if history.ndim != 2 or history.shape[1] != len(self) or len(history) != len(steps) + 1:
            raise ValueError(
                f"weights history of shape {history.shape} with {len(steps)} rounds does not fit "
                f"{len(self)} domains"
            )
        self._history = [np.array(row, dtype=np.float64) for row in history]
        self._log = self._history[-1]
        self._steps = [int(s) for s in steps]

    def _by_name(self, values: Vector) -> dict[str, float]:
        return dict(zip(self.names, (float(v) for v in values), strict=True))


def _checked_names(names: Sequence[str]) -> tuple[str, ...]:
    if isinstance(names, str) or not (names := tuple(names)):
        raise ValueError(f"domains must be a non-empty list of names, got {names!r}")
    for name in names:
        if not isinstance(name, str) or not name:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"a domain's name must be a non-empty string, got {name!r}")
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(f"domains must have different names; repeated: {', '.join(repeated)}")
    return tuple(str(name) for name in names)


def _checked_initial(names: tuple[str, ...], initial: Mapping[str, float] | Sequence[float] | None) -> Vector:
    if initial is None:
        return np.ones(len(names))
    if isinstance(initial, Mapping):
        values = dict(initial)
        missing = [name for name in names if name not in values]
        unknown = [name for name in values if name not in names]
        if missing or unknown:
            raise ValueError(
                f"initial weights must name every domain once; missing: {missing}, unknown: {unknown}"
            )
        array = np.array([values[name] for name in names], dtype=np.float64)
    else:
        array = np.array(initial, dtype=np.float64)
    if array.shape != (len(names),):
        raise ValueError(f"expected {len(names)} initial weights, one per domain, got shape {array.shape}")
    wrong = {n: float(v) for n, v in zip(names, array, strict=True) if not (np.isfinite(v) and v > 0)}
    if wrong:
        raise ValueError(
            f"initial weights must be positive and finite, got {wrong}; "
            "leave a domain out instead of giving it no weight (a zero can never grow again)"
        )
    return array
