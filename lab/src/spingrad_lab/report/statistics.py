"""Means with intervals, and tests over the same seeds: of a difference, of equivalence, of many at once."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

LEVEL = 0.05
"""A p-value below this is significant."""
MARGIN = 0.003
"""Two accuracies that differ by less are equivalent: 0.3 points."""


class Estimate(NamedTuple):
    """A mean and the half width of its 95 % interval (Student's t)."""

    mean: float
    half: float

    def __str__(self) -> str:
        if math.isnan(self.mean):
            return "–"
        return f"{self.mean:.4f}" if math.isnan(self.half) else f"{self.mean:.4f} ± {self.half:.4f}"

    def percent(self) -> str:
        mean, half = 100 * self.mean, 100 * self.half
        return f"{self.mean:.1%}" if math.isnan(half) else f"{mean:.1f} ± {half:.1f} %"


def estimate(values: Iterable[float]) -> Estimate:
    """Mean and 95 % interval; a single value has no interval, and no value has no mean either (NaN).

    Example:
        >>> print(estimate([1.0, 2.0, 3.0]))
        2.0000 ± 2.4841
    """
    from scipy import stats

    array = np.fromiter(values, dtype=float)
    if len(array) < 2:
        return Estimate(float(array[0]) if len(array) else math.nan, math.nan)
    quantile = stats.t.ppf(0.975, len(array) - 1)
    return Estimate(float(array.mean()), float(quantile * array.std(ddof=1) / math.sqrt(len(array))))


def simultaneous(first: Sequence[float], second: Sequence[float], count: int) -> Estimate:
    """``first - second``, seed by seed, with an interval that holds together with those of ``count`` tests.

    All of them hold with a probability of 95 % (Bonferroni).

    Example:
        >>> print(simultaneous([0.9, 0.8, 0.9], [0.7, 0.7, 0.6], 1))
        0.2000 ± 0.2484
        >>> print(simultaneous([0.9, 0.8, 0.9], [0.7, 0.7, 0.6], 10))
        0.2000 ± 0.8134
    """
    from scipy import stats

    differences = np.asarray(first, dtype=float) - np.asarray(second, dtype=float)
    mean, half = estimate(list(differences))
    if math.isnan(half):
        return Estimate(mean, half)
    wide, usual = (stats.t.ppf(1 - 0.025 / n, len(differences) - 1) for n in (count, 1))
    return Estimate(mean, float(half * wide / usual))


class Paired(NamedTuple):
    """Difference of two methods over the same seeds, and the p-value of a paired t-test."""

    difference: Estimate
    p: float
    holm: float | None = None
    """The p-value corrected for all tests of its family (see :func:`family`), if it is part of one."""

    def __str__(self) -> str:
        if math.isnan(self.difference.mean):
            return "no common seed"
        if math.isnan(self.difference.half):
            return f"{self.signed}, one seed"
        named = f"p = {self.p:.2g}" if self.holm is None else f"Holm p = {self.holm:.2g}"
        return f"{self.signed}, {named}"

    @property
    def signed(self) -> str:
        """The difference with its sign and, of more than one seed, its 95 % interval."""
        mean, half = self.difference
        if math.isnan(mean):
            return "–"
        return f"{mean:+.4f}" if math.isnan(half) else f"{mean:+.4f} ± {half:.4f}"

    @property
    def corrected(self) -> str:
        """The p-value that is corrected for its family; a single seed has none."""
        return "–" if self.holm is None or math.isnan(self.holm) else f"{self.holm:.2g}"


def paired(first: Sequence[float], second: Sequence[float]) -> Paired:
    """``first - second``, seed by seed; methods that are not finished may have no seed in common.

    Example:
        >>> print(paired([0.9, 0.8, 0.9], [0.7, 0.7, 0.6]))
        +0.2000 ± 0.2484, p = 0.074
    """
    from scipy import stats

    differences = np.asarray(first, dtype=float) - np.asarray(second, dtype=float)
    if len(differences) < 2 or not differences.std() > 0:  # a t-test needs spread
        equal = len(differences) and not differences.any()
        return Paired(estimate(list(differences)), 1.0 if equal else math.nan)
    return Paired(estimate(list(differences)), float(stats.ttest_1samp(differences, 0).pvalue))


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values corrected by Holm's method, in the order given.

    The probability that any true null hypothesis of the family is rejected stays below the level at which
    the corrected values are read. A test without a p-value (NaN) stays without one and does not count.

    Example:
        >>> holm([0.01, 0.04, 0.03])
        [0.03, 0.06, 0.06]
    """
    adjusted, highest = list(p_values), 0.0
    order = sorted((p, place) for place, p in enumerate(p_values) if not math.isnan(p))
    for rank, (p, place) in enumerate(order):
        highest = max(highest, min(1.0, p * (len(order) - rank)))
        adjusted[place] = highest
    return adjusted


def family(tests: Sequence[Paired]) -> list[Paired]:
    """The same tests, each with its p-value corrected for all of them by Holm's method."""
    corrected = holm([test.p for test in tests])
    return [test._replace(holm=p) for test, p in zip(tests, corrected, strict=True)]


def equivalence(first: Sequence[float], second: Sequence[float], margin: float = MARGIN) -> float:
    """p-value of the hypothesis that the means differ by ``margin`` or more, tested seed by seed.

    Two one-sided paired t-tests; a low value shows that the two are equivalent. A single seed shows nothing
    (NaN).

    Example:
        >>> round(equivalence([0.901, 0.899, 0.900, 0.902], [0.900, 0.900, 0.901, 0.901]), 3)
        0.007
    """
    from scipy import stats

    differences = np.asarray(first, dtype=float) - np.asarray(second, dtype=float)
    if len(differences) < 2:
        return math.nan
    if not differences.std() > 0:  # a t-test needs spread
        return 0.0 if abs(differences[0]) < margin else 1.0
    above = stats.ttest_1samp(differences, -margin, alternative="greater").pvalue
    below = stats.ttest_1samp(differences, margin, alternative="less").pvalue
    return float(max(above, below))


Verdict = Literal["ahead", "behind", "level", "undecided"]


def verdict(
    paired: Paired, adjusted_p: float, equivalence_p: float, higher_is_better: bool = True
) -> Verdict:
    """What a comparison shows about the first of its two methods.

    Args:
        paired: The first method minus the second.
        adjusted_p: p-value of the difference, corrected for its family (see :func:`holm`).
        equivalence_p: p-value of their equivalence (see :func:`equivalence`), corrected for its family.
        higher_is_better: False if the score is a loss.

    Returns:
        ``ahead`` or ``behind`` if the difference is significant after correction, even where it is smaller
        than the margin; ``level`` if only the equivalence is; ``undecided`` if neither is.
    """
    if adjusted_p < LEVEL:
        return "ahead" if (paired.difference.mean > 0) == higher_is_better else "behind"
    return "level" if equivalence_p < LEVEL else "undecided"


@dataclass(frozen=True)
class Duel:
    """Two methods on one task, over the same seeds.

    Args:
        task: Where they are compared.
        score: What is compared, as a table calls it.
        names: The two methods; the verdict is about the first.
        values: The scores of each, seed by seed.
        higher_is_better: False if the score is a loss.
        margin: By how much the two may differ and still be level.
        control: Scores of real weights on the same task, if there are any.
    """

    task: str
    score: str
    names: tuple[str, str]
    values: tuple[Sequence[float], Sequence[float]]
    higher_is_better: bool = True
    margin: float = MARGIN
    control: Sequence[float] = ()


def shown(what: Verdict, margin: float = MARGIN) -> str:
    """A verdict in Markdown: bold where the difference is significant, and with an unusual margin."""
    if what == "level" and margin != MARGIN:
        return f"level within {margin:g}"
    return f"**{what}**" if what in ("ahead", "behind") else what


def judged(duels: Sequence[Duel]) -> list[tuple[Duel, Paired, Verdict]]:
    """Each duel of a family with its difference, its p-value and its verdict.

    p-values of differences are corrected for all differences, those of equivalence for all equivalences.
    """
    tests = family([paired(*duel.values) for duel in duels])
    levels = holm([equivalence(*duel.values, duel.margin) for duel in duels])
    found = []
    for duel, test, level in zip(duels, tests, levels, strict=True):
        assert test.holm is not None
        found.append((duel, test, verdict(test, test.holm, level, duel.higher_is_better)))
    return found


def significant(value: float, digits: int) -> float:
    """A value rounded to some significant digits, to be kept on file.

    Example:
        >>> significant(0.0123456, 3)
        0.0123
    """
    return float(f"{value:.{digits}g}")
