"""Means with intervals, and paired tests."""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np


class Estimate(NamedTuple):
    """A mean and the half width of its 95 % interval (Student's t)."""

    mean: float
    half: float

    def __str__(self) -> str:
        return f"{self.mean:.4f}" if math.isnan(self.half) else f"{self.mean:.4f} ± {self.half:.4f}"

    def percent(self) -> str:
        mean, half = 100 * self.mean, 100 * self.half
        return f"{self.mean:.1%}" if math.isnan(half) else f"{mean:.1f} ± {half:.1f} %"


def estimate(values: Iterable[float]) -> Estimate:
    """Mean and 95 % interval; a single value has no interval.

    Example:
        >>> print(estimate([1.0, 2.0, 3.0]))
        2.0000 ± 2.4841
    """
    from scipy import stats

    array = np.fromiter(values, dtype=float)
    if len(array) < 2:
        return Estimate(float(array.mean()), math.nan)
    quantile = stats.t.ppf(0.975, len(array) - 1)
    return Estimate(float(array.mean()), float(quantile * array.std(ddof=1) / math.sqrt(len(array))))


class Paired(NamedTuple):
    """Difference of two methods over the same seeds, and the p-value of a paired t-test."""

    difference: Estimate
    p: float

    def __str__(self) -> str:
        return f"{self.difference.mean:+.4f} ± {self.difference.half:.4f}, p = {self.p:.2g}"


def paired(first: Sequence[float], second: Sequence[float]) -> Paired:
    """``first - second``, seed by seed.

    Example:
        >>> print(paired([0.9, 0.8, 0.9], [0.7, 0.7, 0.6]))
        +0.2000 ± 0.2484, p = 0.074
    """
    from scipy import stats

    differences = np.asarray(first, dtype=float) - np.asarray(second, dtype=float)
    if len(differences) < 2 or not differences.std() > 0:  # a t-test needs spread
        return Paired(estimate(list(differences)), 1.0 if not differences.any() else math.nan)
    return Paired(estimate(list(differences)), float(stats.ttest_1samp(differences, 0).pvalue))


def significant(value: float, digits: int) -> float:
    """A value rounded to some significant digits, to be kept on file.

    Example:
        >>> significant(0.0123456, 3)
        0.0123
    """
    return float(f"{value:.{digits}g}")
