"""Confidence intervals of means of a few observations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev
from typing import final


@final
@dataclass(frozen=True)
class Interval:
    """A mean and its confidence interval.

    Args:
        low: lower end; NaN with fewer than two observations.
        count: number of observations.
    """

    mean: float
    low: float
    high: float
    count: int

    def __str__(self) -> str:
        if math.isnan(self.low):
            return f"{self.mean:.2f} [no interval, n = {self.count}]"
        return f"{self.mean:.2f} [{self.low:.2f}, {self.high:.2f}]"

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high


def interval(values: Sequence[float], *, confidence: float = 0.95) -> Interval:
    """Return Student's interval of a mean, ``mean +- t_{n-1} s / sqrt(n)``; NaN for no values.

    Example:
        >>> print(interval([1.0, 2.0, 3.0]))
        2.00 [-0.48, 4.48]
    """
    count = len(values)
    mean = fmean(values) if values else math.nan
    if count < 2:
        return Interval(mean, math.nan, math.nan, count)
    reach = student_quantile(0.5 + confidence / 2, count - 1) * stdev(values) / math.sqrt(count)
    return Interval(mean, mean - reach, mean + reach, count)


def student_quantile(probability: float, freedom: int) -> float:
    """Return the quantile of Student's t distribution, for a probability above a half.

    Closed forms for one and two degrees of freedom, and the expansion of Fisher and Cornish beyond (Abramowitz
    and Stegun 26.7.5), which is right to about a percent at three and better after that.

    Example:
        >>> [round(student_quantile(0.975, n), 2) for n in (1, 2, 4, 7, 30)]
        [12.71, 4.3, 2.78, 2.36, 2.04]
    """
    if freedom == 1:
        return math.tan(math.pi * (probability - 0.5))
    if freedom == 2:
        away = 2 * probability - 1
        return away * math.sqrt(2 / (1 - away**2))
    z, n = NormalDist().inv_cdf(probability), freedom
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / n ** (power + 1) for power, term in enumerate(terms))
