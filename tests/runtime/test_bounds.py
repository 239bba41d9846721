"""Proven bounds of all operations on one, two and three components, against what random bits show.

`pytest -s` prints the largest error seen beside each bound; `benchmarks/bounds.py` writes it down.

For runtime.expansion.components and runtime.expansion.three_components.
"""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from floats import BF16, FP16, FP32, Format, power_of_two
from operations import CHUNK, OPERATIONS, Operation, Words, operands, seen
from test_arithmetic import NAMES
from torch import Tensor

from collage_fx.runtime.errors import ComponentError
from collage_fx.runtime.expansion import components
from collage_fx.runtime.expansion.arithmetic import grow, normalize
from collage_fx.runtime.expansion.eft import fast_two_sum, two_sum

SHORT = [BF16, FP16]
VOLUMES = [
    *((f, 4) for f in SHORT),
    (FP32, 2),
    *(pytest.param(f, 10**8 // CHUNK, marks=pytest.mark.slow) for f in SHORT),
]


def named(value: object) -> str | None:
    if isinstance(value, Operation):
        return f"{value.name}, {value.n}"
    return NAMES.get(value) if isinstance(value, Format) else None


def operation(name: str, n: int) -> Operation:
    return next(op for op in OPERATIONS if (op.name, op.n) == (name, n))


@pytest.mark.parametrize("f, chunks", VOLUMES, ids=named)
@pytest.mark.quick("bf16-*", "fp32-*")
def test_no_result_in_the_declared_range_breaks_its_bound(f: Format, chunks: int) -> None:
    # Eager fp32 roots are off by an ulp at times, so there is no rounding to nearest to be tested.
    chosen = [op for op in OPERATIONS if f is not FP32 or op.n > 1]
    found = seen(f, range(chunks), chosen)
    for op, worst in found:
        print(
            f"{NAMES[f]} {op.name:7} n = {op.n}: at most {op.limit(f):.4f} u^{op.n}, seen "
            f"{worst.error:.4f} in {worst.valid:.3g} of {worst.samples:.3g} samples"
        )
        assert worst.beyond == 0, (op.name, op.n, worst.where)
        assert worst.error > 0.1 * op.limit(f), "too small to have been measured"
        assert worst.valid > 0.3 * worst.samples


@pytest.mark.parametrize("op", OPERATIONS, ids=named)
@pytest.mark.quick("*, 2")
def test_the_measured_error_is_that_of_rationals(op: Operation) -> None:
    """On a sample and on the worst that there is in it."""
    for f in SHORT:
        x, y = op.operands(*operands(f, 6000, torch.Generator().manual_seed(1000)))
        r = op.run(x, y)
        errors, valid = op.errors(f, x, y, r)
        worst = torch.where(valid, errors, -1.0).argsort(descending=True)[:20]
        sample = valid.nonzero().flatten()[:: len(errors) // 200]
        for i in torch.cat([worst, sample]).tolist():
            exact = op.decided(f, x, y, r, i)
            assert float(errors[i]) == pytest.approx(exact, rel=1e-6, abs=1e-6)


def sloppy(x: Words, y: Words) -> Words:
    """SloppyDWPlusDW, which has no bound for mixed signs."""
    s, t = two_sum(x[0], y[0])
    return normalize(s, t + (x[1] + y[1]))


def without_order(x: Words, y: Words) -> Words:
    """Grow as in the paper, with Fast2Sum for any order of magnitudes."""
    s, t = fast_two_sum(x[0], y[0])
    return normalize(s, x[1] + t)


def without_error(x: Words, y: Words) -> Words:
    return normalize(x[0] * y[0], x[1] * y[0] + x[0] * y[1])


def of_two(x: Words, y: Words) -> Words:
    """Two components of the divisor only."""
    return components.div(x, y[:2])


def truncated(x: Words, y: Words) -> Words:
    """Three components added up without what cancels being kept."""
    hi, lo = grow(x[0], torch.zeros_like(x[0]), y[0])
    return components.add((hi, lo, torch.zeros_like(lo)), ((x[1] + y[1]) + (x[2] + y[2]),))


BROKEN = [
    replace(operation("x + y", 2), run=sloppy),
    replace(operation("x + a", 2), run=without_order),
    replace(operation("x * y", 2), run=without_error),
    replace(operation("x + y", 3), run=truncated),
    replace(operation("x / y", 3), run=of_two),
    replace(operation("x * y", 3), run=lambda x, y: components.mul(x, y[:2])),
    replace(operation("sqrt x", 3), run=lambda x, y: (*components.sqrt(x[:2]), 0 * x[0])),
]


@pytest.mark.parametrize("f", SHORT, ids=named)
@pytest.mark.parametrize("op", BROKEN, ids=named)
def test_the_check_fails_for_a_careless_operation(op: Operation, f: Format) -> None:
    x, y = op.operands(*operands(f, 6000, torch.Generator().manual_seed(1)))
    errors, valid = op.errors(f, x, y, op.run(x, y))
    assert float(errors[valid].max()) > 10 * op.limit(f)


@pytest.mark.parametrize("f", [BF16, FP32], ids=named)
@pytest.mark.parametrize("name", ["x * y", "x / y"])
def test_three_components_keep_the_bound_down_to_the_edge_and_not_below(
    f: Format, name: str
) -> None:
    """Of results from 2^k to 2^(k+1), without the half of the smallest number that is let pass."""
    op = replace(operation(name, 3), edge=None)
    bound = op.limit(f)
    edge = f.emin + 2 * f.p
    for k, holds in ((edge + 1, True), (edge, True), (edge - 3, False), (edge - f.p, False)):
        x, y = at_scale(f, 0, 1), at_scale(f, 0, 2)
        shift = power_of_two(torch.tensor(k))
        x = [c.double().mul(shift).to(f.dtype) for c in x]
        errors, valid = op.errors(f, x, y, op.run(x, y))
        assert valid.double().mean() > 0.9
        assert (float(errors[valid].max()) <= bound) == holds, k


def at_scale(f: Format, k: int, seed: int) -> Words:
    """Expansions of three components from 2^k on, below 2^(k + 1/2), so that products are too."""
    g = torch.Generator().manual_seed(seed)
    x = (1 + 0.4 * torch.rand(20000, generator=g, dtype=torch.float64)) * 2.0**k
    hi = x.to(f.dtype)
    lows = [x * f.u**n * (torch.rand(len(x), generator=g) - 0.5) for n in (1, 2)]
    return components.add((hi, *(lo.to(f.dtype) for lo in lows)), (torch.zeros_like(hi),))


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("f", SHORT, ids=named)
def test_special_values_are_those_of_plain_arithmetic(f: Format, n: int) -> None:
    count = len(f.special)
    a, b = f.special.repeat_interleave(count), f.special.repeat(count)
    zero = torch.zeros_like(a)
    x, y = (a, *[zero] * (n - 1)), (b, *[zero] * (n - 1))
    cases: list[tuple[Sequence[Tensor], Tensor]] = [
        (components.add(x, y), a + b),
        (components.sub(x, y), a - b),
        (components.mul(x, y), a * b),
        (components.div(x, y), a / b),
        (components.sqrt(x), a.sqrt()),
        (components.neg(x), -a),
    ]
    for found, plain in cases:
        special = ~plain.isfinite()
        same = (found[0] == plain) | (found[0].isnan() & plain.isnan())
        assert same[special].all() and found[0][~special].isfinite().all()
        assert all(lo.isfinite().all() and not lo[special].any() for lo in found[1:])


@pytest.mark.parametrize("f", [*SHORT, FP32], ids=named)
def test_constants_are_split_into_what_each_component_can_hold(f: Format) -> None:
    for c in (0.9, 0.999, -1 / 3, 0.0, 1.0):
        parts = components.split_constant(c, f.dtype, 3)
        assert all(torch.tensor(v, dtype=f.dtype).double() == v for v in parts)
        # In fp16 the last is below the smallest number: of 0.9 three hold no more than 25 bits.
        error = max(f.u**3 * abs(c), 2.0**-53, f.smallest / 2)
        assert abs(sum(parts[::-1]) - c) <= error
        assert components.split_constant(c, f.dtype, 2) == parts[:2]


def test_operands_of_other_lengths_are_refused() -> None:
    x = torch.ones(2, dtype=torch.bfloat16)
    for bad in ((), (x,) * 4):
        with pytest.raises(ComponentError, match=f"not {len(bad)}"):
            components.mul((x,), bad)
