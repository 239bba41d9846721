"""Statistics of paired differences: intervals, tests of equivalence, and ranks.

With n differences of mean d and standard error s: an interval is d -+ t s, with t the quantile of
Student's distribution of n - 1 degrees of freedom. Two strategies are equivalent within a margin m
if both "d <= -m" and "d >= m" are rejected (TOST: two one-sided tests; the larger of the two
p-values counts), after Holm's correction for the number of tests.
"""

import math
import random
import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from typing import NamedTuple


def student(t: float, degrees: int) -> float:
    """Return the probability that Student's t of whole degrees of freedom is at most `t`.

    The finite sums of Abramowitz and Stegun, 26.7.3 and 26.7.4.
    """
    angle = math.atan(t / math.sqrt(degrees))
    cos, sin = math.cos(angle), math.sin(angle)
    odd = degrees % 2
    term, total = (cos if odd else 1.0), 0.0
    for k in range(degrees // 2):
        total += term
        term *= cos * cos * (2 * k + 1 + odd) / (2 * k + 2 + odd)
    within = (angle + sin * total) * 2 / math.pi if odd else sin * total
    return 0.5 + within / 2


def quantile(p: float, degrees: int) -> float:
    """Return the t of which `student` is `p`, by bisection."""
    low, high = -1e4, 1e4
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if student(middle, degrees) < p else (low, middle)
    return (low + high) / 2


class Mean(NamedTuple):
    """Mean of some numbers with its 95% interval."""

    mean: float
    half: float
    """Half of the length of the interval."""
    error: float
    """Standard error of the mean."""
    count: int


def mean_of(values: Sequence[float]) -> Mean:
    """Return the mean of two or more values."""
    error = statistics.stdev(values) / math.sqrt(len(values))
    return Mean(
        statistics.fmean(values), quantile(0.975, len(values) - 1) * error, error, len(values)
    )


def tost(values: Sequence[float], margin: float) -> float:
    """Return the p-value of "the mean is not within -+ margin"."""
    found = mean_of(values)
    if found.error == 0:
        return 0.0 if abs(found.mean) < margin else 1.0
    below, above = ((found.mean + side * margin) / found.error for side in (1, -1))
    degrees = found.count - 1
    return max(1 - student(below, degrees), student(above, degrees))


def holm(values: Sequence[float]) -> list[float]:
    """Return p-values corrected for their number: the k-th least of n times n - k + 1, no less."""
    found, least = [0.0] * len(values), 0.0
    for rank, i in enumerate(sorted(range(len(values)), key=lambda i: values[i])):
        least = max(least, min(1.0, values[i] * (len(values) - rank)))
        found[i] = least
    return found


def ranks(values: Sequence[float]) -> list[float]:
    """Return the rank of each value from 1 on; equal ones have the mean of their places."""
    order = sorted(values)
    return [(bisect_left(order, v) + 1 + bisect_right(order, v)) / 2 for v in values]


def spearman(x: Sequence[float], y: Sequence[float]) -> float:
    """Return the correlation of the ranks; 0 where all of one are equal."""
    a, b = ranks(x), ranks(y)
    if len(set(a)) == 1 or len(set(b)) == 1:
        return 0.0
    return statistics.correlation(a, b)


def bootstrapped(
    rows: Sequence[Sequence[float]],
    number: Callable[[Sequence[Sequence[float]]], float],
    times: int = 2000,
) -> tuple[float, float]:
    """Return the middle 95% of a number over rows that are drawn again, with a fixed seed."""
    draw = random.Random(0)
    found = sorted(number(draw.choices(rows, k=len(rows))) for _ in range(times))
    return found[round(0.025 * times)], found[round(0.975 * times) - 1]
