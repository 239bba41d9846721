"""Every rule against exact rationals, on random bits, cancelling pairs and the edges.

For passes.rules, passes.rules.linear and passes.rules.product.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from math import isqrt
from typing import Any

import pytest
import torch
from floats import BF16, FP16, Format, last_place
from rule_builder import Call, Traced, partners, run_rule, whole
from test_rules_structure import CASES as STRUCTURAL
from torch import Tensor

from collage_fx.passes.ir.program import Value
from collage_fx.passes.rules import RULES

aten = torch.ops.aten
COUNT = 400
C = Fraction(0.999), Fraction(0.9)


@dataclass(frozen=True)
class Case:
    """An operation on x and y, which are expansions, t and c, which are plain, and numbers.

    `x y t w s b`: expansions, a tensor of their dtype, a wide tensor, a wide 0-d one near one, a
    condition. `exact` gives the result from the values of the operands that are not numbers.
    """

    operands: tuple[Any, ...]
    exact: Callable[..., Fraction]
    bound: float
    """Bound of the error in u^2, by the docstrings; fp32 adds 2^-24 to them here and there."""
    scale: Callable[..., Fraction] | None = None
    """Function for the size that the bound is relative to; the exact result, unless given."""
    term: Callable[..., Fraction] | None = None
    """A term that is rounded to the storage, and may be off by u."""


def magnitudes(*values: Fraction) -> Fraction:
    return sum((abs(v) for v in values), Fraction(0))


def root(x: Fraction) -> Fraction:
    return Fraction(isqrt((x.numerator << 800) // x.denominator), 1 << 400)


def plus(a: Fraction, b: Fraction) -> Fraction:
    return a + b


def minus(a: Fraction, b: Fraction) -> Fraction:
    return a - b


def times(a: Fraction, b: Fraction) -> Fraction:
    return a * b


def over(a: Fraction, b: Fraction) -> Fraction:
    return a / b


def average(w: float) -> Callable[..., Fraction]:
    return lambda a, b: a + Fraction(w) * (b - a)


def averaged(a: Fraction, b: Fraction, w: Fraction) -> Fraction:
    return a + w * (b - a)


def clamped(x: Fraction, low: Fraction, high: Fraction) -> Fraction:
    return min(max(x, low), high)


def _is_number(target: Any, case: Case) -> bool:
    return case.operands == ("x", "x") and target is aten.sub.Tensor


SUM = 3.2  # 3 / (1 - 4u)
SUMS: list[tuple[tuple[Any, ...], float]] = [
    (("x", "t"), 2),
    (("t", "x"), 2),
    (("x", "y"), SUM),
    (("y", "x"), SUM),
    (("x", "x"), SUM),
]
WIDE = 1.5  # u^2/2 for the split, and an fp32 rounding or two: 2^-24 is u^2/4 in fp16
PICK = 1.0


def picking(target: Any, exact: Callable[..., Fraction]) -> dict[Any, list[Case]]:
    orders = [("x", "t"), ("t", "x"), ("x", "y"), ("x", "x")]
    return {target: [Case(o, exact, PICK) for o in orders]}


CASES: dict[Any, list[Case]] = {
    aten.add.Tensor: [
        *(Case(o, plus, bound) for o, bound in SUMS),
        Case(("x", "w"), plus, 2, term=lambda x, w: w),
        Case(("x", 0.25), lambda x: x + Fraction(0.25), WIDE, lambda x: magnitudes(x, C[0])),
    ],
    aten.sub.Tensor: [
        *(Case(o, minus, bound) for o, bound in SUMS),
        Case(("x", 0.25), lambda x: x - Fraction(0.25), WIDE, lambda x: magnitudes(x, C[0])),
        Case((2, "x"), lambda x: 2 - x, WIDE, lambda x: 2 + abs(x)),
    ],
    aten.neg.default: [Case(("x",), lambda x: -x, 0)],
    aten.mul.Tensor: [
        *(Case(o, times, 5) for o in [("x", "t"), ("t", "x"), ("x", "y"), ("x", "x")]),
        Case(("x", 0.9), lambda x: x * C[1], 5.5),
        Case((0.9, "x"), lambda x: x * C[1], 5.5),
        Case(("x", 0.999), lambda x: x * C[0], 7),  # a decay's term, at most 5u^2, and a grow
        Case(("x", "s"), times, 4, lambda x, s: abs(x) + abs(s * x)),
        Case(("x", "w"), times, 5.5),
    ],
    aten.div.Tensor: [
        *(Case(o, over, 3.1) for o in [("x", "y"), ("y", "x"), ("t", "x")]),
        Case(("x", "t"), over, 2.1),
        Case(("x", 3.0), lambda x: x / 3, 3.6),
        Case(("x", 0.9), lambda x: x / C[1], 3.6),
        Case(("x", 0.999), lambda x: x / C[0], 7),
        Case((2.0, "x"), lambda x: 2 / x, WIDE),
        *(Case(o, over, WIDE) for o in [("x", "s"), ("x", "w"), ("w", "x")]),
    ],
    aten.reciprocal.default: [Case(("x",), lambda x: 1 / x, 3.1)],
    aten.sqrt.default: [Case(("x",), lambda x: root(x) if x >= 0 else Fraction(0), 25 / 8)],
    aten.lerp.Scalar: [
        *(
            Case(("x", "t", w), average(w), 7, magnitudes, lambda x, t, w=w: Fraction(w) * t)
            for w in (0.125, 0.001)
        ),
        *(Case(("x", "y", w), average(w), 8, magnitudes) for w in (0.125, 0.001)),
        Case(("t", "x", 0.25), average(0.25), 7, magnitudes, lambda t, x: t),
        Case(("y", "x", 0.25), average(0.25), 8, magnitudes),
    ],
    aten.lerp.Tensor: [
        *(Case(o, averaged, 8, magnitudes) for o in [("x", "t", "s"), ("x", "y", "s")]),
        Case(("t", "x", "s"), averaged, 8, magnitudes),
    ],
    **picking(aten.maximum.default, max),
    **picking(aten.minimum.default, min),
    **picking(aten.clamp_min.Tensor, max),
    **picking(aten.clamp_max.Tensor, min),
    aten.clamp_min.default: [Case(("x", 0.5), lambda x: max(x, Fraction(0.5)), PICK)],
    aten.clamp_max.default: [Case(("x", 0.5), lambda x: min(x, Fraction(0.5)), PICK)],
    aten.clamp.default: [
        Case(("x", -16.5, 16.5), lambda x: clamped(x, -Fraction(16.5), Fraction(16.5)), PICK),
        Case(("x", None, 1.0), lambda x: min(x, Fraction(1)), PICK),
    ],
    aten.clamp.Tensor: [Case(("x", "t", "y"), clamped, PICK)],
    aten.where.self: [
        *(Case(("b", *o), lambda b, p, q: p if b else q, 0) for o in (("x", "t"), ("t", "x"))),
        Case(("b", "x", "y"), lambda b, p, q: p if b else q, 0),
        Case(("b", "x", "w"), lambda b, p, q: p if b else q, PICK),
    ],
}
FLAT = [
    pytest.param(
        t, c, f, id=f"{t}-{'-'.join(map(str, c.operands))}-{'bf16' if f is BF16 else 'fp16'}"
    )
    for t, cases in CASES.items()
    for c in cases
    for f in (BF16, FP16)
]

# Where a term is rounded to u, and where the result is a number, the low word adds nothing to test.
INEXACT = [
    p
    for p in FLAT
    if p.values[1].bound and p.values[1].term is None and not _is_number(p.values[0], p.values[1])
]


@functools.cache
def inputs(f: Format) -> dict[str, Any]:
    g = torch.Generator().manual_seed(0)
    edges = f.special[f.special.isfinite()]
    hi = torch.cat(
        [f.expansions(COUNT, g)[0], f.random_near(f.special[1:2].expand(COUNT), -4, 4, g)]
    )
    hi = torch.cat([hi, edges.repeat(4)])
    other = partners(f, hi, g)
    finite = torch.where(other.isfinite(), other, 1.0)
    n = len(hi)
    return {
        "x": whole(hi, f.residuals(hi, g)),
        "y": whole(finite, f.residuals(finite, g)),
        "t": Value(other),
        "w": Value((torch.randn(n, generator=g) * 4).float()),
        "s": Value(torch.tensor(0.99777)),
        "b": Value(torch.arange(n) % 3 == 0),
    }


def values(operand: Value, n: int) -> list[Fraction | None]:
    """The exact value of each element; None where it is not finite."""
    parts = operand.expanded if isinstance(operand, Traced) else (operand,)
    columns = [p.meta["val"].double().expand(n).tolist() for p in parts]
    return [
        sum(map(Fraction, row)) if all(abs(v) < torch.inf for v in row) else None  # type: ignore[misc]
        for row in zip(*columns, strict=True)
    ]


def run(target: Any, case: Case, f: Format) -> tuple[Tensor, Tensor]:
    known = inputs(f)
    return run_rule(Call(target, tuple(known.get(o, o) for o in case.operands)), f.dtype)


def worst(result: tuple[Tensor, Tensor], case: Case, f: Format) -> tuple[float, int]:
    """The largest error beyond the rounded terms, in u^2 of the scale, and how many were valid.

    Valid is what is finite and so far from the smallest numbers that its low word is normal.
    """
    n, known = len(result[0]), inputs(f)
    columns = [values(known[o], n) for o in case.operands if isinstance(o, str)]
    largest, count, smallest = 0.0, 0, Fraction(f.smallest)
    for found, *row in zip(values(whole(*result), n), *columns, strict=True):
        try:
            exact = None if None in row else case.exact(*row)
        except ZeroDivisionError:
            continue
        if exact is None or found is None:
            continue
        scale = abs(case.scale(*row)) if case.scale else abs(exact)
        if exact and scale < Fraction(2) ** (f.emin + f.p + 4):
            continue
        allowed = (abs(case.term(*row)) * Fraction(f.u) if case.term else 0) + smallest * 2
        error = abs(found - exact) - (allowed if case.bound else 0)
        count += 1
        if error > 0:
            largest = max(largest, float(error / scale / Fraction(f.u) ** 2) if scale else 1e9)
    return largest, count


def test_every_rule_is_tested() -> None:
    assert set(CASES) | set(STRUCTURAL) == set(RULES)


@pytest.mark.parametrize("target, case, f", FLAT)
@pytest.mark.quick(
    "*.add.*-bf16",
    "*.sub.*-y*-bf16",
    "*.mul.*-bf16",
    "*.div.*-[xyw]*-bf16",
    "*default*-bf16",
    "*.lerp.*-x-y*-bf16",
    "*.where.*-bf16",
)
def test_rule_keeps_its_bound(target: Any, case: Case, f: Format) -> None:
    result = run(target, case, f)
    error, count = worst(result, case, f)
    assert error <= case.bound, f"{error:.4g} u^2, allowed {case.bound}"
    assert count > COUNT // 3, count
    hi, lo = result
    assert lo.isfinite().all() and not lo[~hi.isfinite()].any()
    half_ulp = 2.0 ** (last_place(hi.double(), f).double() - 1)
    assert (lo.double().abs() <= half_ulp)[hi.isfinite()].all()


@pytest.mark.parametrize("target, case, f", INEXACT)
@pytest.mark.quick("*-x-y*-bf16", "*default*-bf16", "*-x-w-bf16", "*-0.25-bf16")
def test_bound_is_broken_without_the_low_word(target: Any, case: Case, f: Format) -> None:
    """The control: were a rule to drop the low word of its result, its own test would fail."""
    hi, lo = run(target, case, f)
    assert worst((hi, torch.zeros_like(lo)), case, f)[0] > case.bound
