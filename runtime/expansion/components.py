"""Arithmetic on expansions of one, two or three components, uniform in their number.

An expansion is a tuple of tensors of one dtype, of value their sum, each at most half an ulp of the
one before. A result has as many components as the longer operand; the other may have fewer, down to
one float, and the components of y may be Python numbers that the dtype represents in `mul` and
`div`. One component is plain arithmetic, rounded to nearest; two are `arithmetic.py`; three are
`three_components.py`. Bounds, ranges and what becomes of infinities stand there. Tensors broadcast.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from collage_fx.runtime.errors import ComponentError
from collage_fx.runtime.expansion import arithmetic, three_components

Expansion = tuple[Tensor, ...]
Terms = Sequence[Tensor | float]


def add(x: Sequence[Tensor], y: Sequence[Tensor]) -> Expansion:
    """Return x + y. Relative error: u; 2u^2 with one float, else 3u^2/(1-4u); (3u/2)^3/(1-3u/2).

    Raises ComponentError, as all here, for operands of no or more than three components.
    """
    longer, shorter = (x, y) if len(x) >= len(y) else (y, x)
    match _count(longer, shorter):
        case 1:
            return (x[0] + y[0],)
        case 2 if len(shorter) == 1:
            return arithmetic.grow(longer[0], longer[1], shorter[0])
        case 2:
            return arithmetic.add(x[0], x[1], y[0], y[1])
    return three_components.add(longer, shorter)


def sub(x: Sequence[Tensor], y: Sequence[Tensor]) -> Expansion:
    """Return x - y, with the bounds of `add`."""
    return add(x, neg(y))


def mul(x: Sequence[Tensor], y: Terms) -> Expansion:
    """Return x * y. Relative error: u; 5u^2; (3u^3 + 7uw)(1 + 4u), w that of the wide dtype."""
    match _count(x, y):
        case 1:
            return (x[0] * y[0],)
        case 2:
            return arithmetic.mul(*_padded(x), *_padded(y))
    return three_components.mul(x, y)


def div(x: Sequence[Tensor], y: Terms) -> Expansion:
    """Return x / y. Relative error: u; 3u^2 + 8u^3; (3u^3 + 14uw)(1 + 8u)."""
    match _count(x, y):
        case 1:
            return (x[0] / y[0],)
        case 2:
            return arithmetic.div(*_padded(x), *_padded(y))
    return three_components.div(x, y)


def sqrt(x: Sequence[Tensor]) -> Expansion:
    """Return the square root of x. Relative error: u; 25/8 u^2; (75/32 u^3 + 5uw)(1 + 8u)."""
    match _count(x):
        case 1:
            return (x[0].sqrt(),)
        case 2:
            return arithmetic.sqrt(x[0], x[1])
    return three_components.sqrt(x)


def neg(x: Sequence[Tensor]) -> Expansion:
    """Return -x; exact."""
    _count(x)
    return tuple(-c for c in x)


def split_constant(c: float, dtype: torch.dtype, count: int) -> tuple[float, ...]:
    """Return count numbers of dtype, each what it can hold of what the ones before leave of c.

    For instance 0.999 in bf16 is (1.0, -0.000999451): its high word alone would never decay.
    """
    return three_components.split_constant(c, dtype)[: _count([0.0] * count)]


def _count(*operands: Terms) -> int:
    """Return the number of components of the result."""
    for x in operands:
        if not 1 <= len(x) <= 3:
            raise ComponentError(f"an expansion has one, two or three components, not {len(x)}")
    return max(map(len, operands))


def _padded(x: Terms) -> Any:
    return x if len(x) == 2 else (x[0], 0.0)
