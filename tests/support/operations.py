"""The operations on expansions: operands to draw, the proven bound, and what is exact.

Errors are computed in float64 as if in threefold precision (`floats.accurate_sum`), by what a
result times the divisor, or the root times itself, differs from what it should be. `decided` does
the same in rationals, for the samples that a test names and for all that seem to break a bound.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
from floats import Format, accurate_sum, fraction
from torch import Generator, Tensor

from collage_fx.runtime.expansion import components
from collage_fx.runtime.expansion.eft import WIDER

Words = Sequence[Tensor]
"""The components of an expansion."""
Terms = tuple[list[Tensor], list[Tensor]]
_HALF = 0.5 + 2.0**-12
"""Share of the smallest number that may be lost below the edge, with the underflows of wide
products."""
CHUNK = 62500
"""Samples at a time: few enough for the caches."""


def widened(x: Words) -> list[Tensor]:
    return [c.double() for c in x]


def products(x: Words, y: Words) -> list[Tensor]:
    return [a * b for a in widened(x) for b in widened(y)]


def _result(exact: Callable[[Words, Words], list[Tensor]]) -> Callable[..., Terms]:
    return lambda x, y, r: (exact(x, y), widened(r))


@dataclass(frozen=True)
class Operation:
    """An operation on x of n components and y of as many, of one, or of none."""

    name: str
    n: int
    run: Callable[[Words, Words], Words]
    bound: Callable[[float, float], float]
    """(u, w) -> the largest relative error in units of u^n."""
    terms: Callable[[Words, Words, Words], Terms]
    """(x, y, result) -> numbers whose sums are equal if the result is exact."""
    scale: int = 1
    """Factor of the relative error of the result to that of these sums."""
    x_words: int = 0
    y_words: int = 0
    """Number of words of the operands that are drawn which it takes; all n if zero."""
    edge: int | None = None
    """Results from 2^(emin + edge*p) on are in the range of the bound; None: all."""

    def operands(self, x: Words, y: Words) -> tuple[Words, Words]:
        x, y = x[: self.x_words or self.n], y[: self.y_words or self.n]
        if self.scale == 2:
            x = [torch.where(x[0] < 0, -c, c) for c in x]
        return x, y

    def limit(self, f: Format) -> float:
        """The proven bound in units of u^n."""
        return self.bound(f.u, torch.finfo(WIDER[f.dtype]).eps / 2)

    def valid(self, f: Format, x: Words, y: Words, r: Words, size: Tensor) -> Tensor:
        """Return the mask of operands and exact results, of this size, in the declared range."""
        found = r[0].isfinite() & (x[0].abs() < f.largest) & (y[0].abs() < f.largest)
        found &= (size <= f.largest) & (size != 0)
        if self.edge is not None:
            found &= r[0] != 0
        if "/" in self.name and self.n == 3:
            found &= x[0].double().abs() >= 2.0 ** (f.emin + f.p)
        if self.edge is not None and self.n == 2:
            found &= r[0].double().abs() >= 2.0 ** (f.emin + self.edge * f.p)
        return found

    def errors(self, f: Format, x: Words, y: Words, r: Words) -> tuple[Tensor, Tensor]:
        """Relative errors in units of u^n, and where they are in the declared range.

        Below the edge, half the smallest number is not counted.
        """
        exact, found = self.terms(x, y, r)
        # Products do not cancel: 2^-98 of them is nothing beside u^3.
        fold = 3 if self.run is add else 2
        difference = accurate_sum(*exact, *(-t for t in found), fold=fold)
        total = sum(reversed(found[:-1]), start=found[-1])
        reference = total + difference
        errors = (difference / reference).abs() / self.scale
        size = (sum(widened(r)) * reference / total).abs()
        if self.edge is not None:
            below = size < 2.0 ** (f.emin + self.edge * f.p)
            errors = torch.where(below, errors - _HALF * f.smallest / size, errors)
        return errors / f.u**self.n, self.valid(f, x, y, r, size)

    def decided(self, f: Format, x: Words, y: Words, r: Words, i: int) -> float:
        """The error of sample i in the same units, by rationals; products are exact in float64."""
        one = [[c[i] for c in v] for v in (x, y, r)]
        exact, found = (sum(map(fraction, t), Fraction(0)) for t in self.terms(*one))
        error = abs(exact - found) / abs(exact) / self.scale
        size = abs(sum(map(fraction, one[2])) * exact / found)
        if self.edge is not None and size < Fraction(2) ** (f.emin + self.edge * f.p):
            error -= Fraction(_HALF * f.smallest) / size
        return float(error / Fraction(f.u) ** self.n)


SUM = _result(lambda x, y: widened([*x, *y]))
PRODUCT = _result(products)


def quotient(x: Words, y: Words, r: Words) -> Terms:
    return widened(x), products(r, y)


def root(x: Words, y: Words, r: Words) -> Terms:
    return widened(x), products(r, r)


def three(first: float, second: float, order: float) -> Callable[[float, float], float]:
    """(first*u^3 + second*uw)(1 + order*u) in u^3."""
    return lambda u, w: (first + second * w / u**2) * (1 + order * u)


add, mul, div = components.add, components.mul, components.div
_CUT = 27 / 8
OPERATIONS = [
    Operation("x + y", 1, add, lambda u, w: 1, SUM),
    Operation("x * y", 1, mul, lambda u, w: 1, PRODUCT, edge=0),
    Operation("x / y", 1, div, lambda u, w: 1, quotient, edge=0),
    Operation("sqrt x", 1, lambda x, y: components.sqrt(x), lambda u, w: 1, root, 2),
    Operation("x + a", 2, add, lambda u, w: 2, SUM, y_words=1),
    Operation("x + y", 2, add, lambda u, w: 3 / (1 - 4 * u), SUM),
    Operation("x * a", 2, mul, lambda u, w: 5, PRODUCT, y_words=1, edge=1),
    Operation("x * y", 2, mul, lambda u, w: 5, PRODUCT, edge=1),
    Operation("x / a", 2, div, lambda u, w: 2 + 8 * u, quotient, y_words=1, edge=1),
    Operation("a / y", 2, div, lambda u, w: 3 + 8 * u, quotient, x_words=1, edge=1),
    Operation("x / y", 2, div, lambda u, w: 3 + 8 * u, quotient, edge=1),
    Operation("sqrt x", 2, lambda x, y: components.sqrt(x), lambda u, w: 25 / 8, root, 2, edge=1),
    Operation("x + a", 3, add, lambda u, w: _CUT / (1 - 1.5 * u), SUM, y_words=1),
    Operation("x + y", 3, add, lambda u, w: _CUT / (1 - 1.5 * u), SUM),
    Operation("x * a", 3, mul, three(3, 7, 4), PRODUCT, y_words=1, edge=2),
    Operation("x * y", 3, mul, three(3, 7, 4), PRODUCT, edge=2),
    Operation("x / a", 3, div, three(3, 14, 8), quotient, y_words=1, edge=2),
    Operation("a / y", 3, div, three(3, 14, 8), quotient, x_words=1, edge=2),
    Operation("x / y", 3, div, three(3, 14, 8), quotient, edge=2),
    Operation("sqrt x", 3, lambda x, y: components.sqrt(x), three(75 / 32, 5, 8), root, 2, edge=2),
]


def operands(f: Format, n: int, g: Generator) -> tuple[Words, Words]:
    """Two expansions of three components, of any bits; the second in many ways near minus x.

    A third of y has a high word of any bits, one of an exponent not far off, and one that is -x_hi
    but for a few units in the last place; of these a half is -x in its first or first two words.
    """
    x = words(f, torch.cat([f.special, f.random(n - len(f.special), g)]), g)
    third = n // 3
    near = f.random_near(x[0][third : 2 * third], -2 * f.p, 2 * f.p, g)
    y = words(f, torch.cat([f.random(third, g), near, f.near_negative(x[0][2 * third :], 4, g)]), g)
    for word, part in ((0, n // 6), (1, n // 12)):
        y[word][-part:] = -x[word][-part:]
        y[word + 1][-part:] = f.near_negative(x[word + 1], 2, g)[-part:]
    return x, _kept(f, y)


def words(f: Format, hi: Tensor, g: Generator) -> list[Tensor]:
    """An expansion of three components below hi."""
    mid = f.residuals(hi, g)
    return _kept(f, [hi, mid, f.residuals(mid, g)])


def _kept(f: Format, x: list[Tensor]) -> list[Tensor]:
    """x, with zeros for words that are not half an ulp of the one before at most."""
    hi, mid, lo = x
    mid = torch.where(hi.isfinite() & f.is_normalized(hi, mid), mid, 0)
    return [hi, mid, torch.where((mid != 0) & f.is_normalized(mid, lo), lo, 0)]


@dataclass
class Worst:
    """Worst samples of one operation."""

    error: float = -1.0
    """The largest, in units of u^n."""
    where: str = ""
    samples: int = 0
    valid: int = 0
    beyond: int = 0
    """Number of samples in the declared range that break the bound, by rationals."""

    def see(self, op: Operation, f: Format, x: Words, y: Words) -> None:
        """Do the operation on a chunk."""
        x, y = op.operands(x, y)
        r = op.run(x, y)
        errors, valid = op.errors(f, x, y, r)
        self.samples += len(errors)
        self.valid += int(valid.sum())
        counted = torch.where(valid, errors, -1.0)
        for i in (counted > op.limit(f)).nonzero().flatten().tolist():
            counted[i] = op.decided(f, x, y, r, i)
            self.beyond += bool(counted[i] > op.limit(f))
        at = int(counted.argmax())
        if float(counted[at]) > self.error:
            self.error = float(counted[at])
            self.where = f"{[float(c[at]).hex() for c in (*x, *y)]}: {[float(c[at]) for c in r]}"


def seen(
    f: Format, chunks: Iterable[int], operations: Sequence[Operation]
) -> list[tuple[Operation, Worst]]:
    """Do all operations on the same operands, a chunk for each seed."""
    found = [(op, Worst()) for op in operations]
    for seed in chunks:
        x, y = operands(f, CHUNK, Generator().manual_seed(seed))
        for op, worst in found:
            worst.see(op, f, x, y)
    return found
