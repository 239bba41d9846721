"""Roundings that change nothing: those inside of error-free transformations that fp32 computes.

`lower` rounds after each operation, as eager PyTorch does with bf16 and fp16. Where the operations
are fp32's, some of their results are numbers of the 16-bit dtype already. Of all pairs of such
numbers, infinite ones and NaN included (`tests/compilation/test_exact_roundings.py`, exhaustively):

- 2Sum, s = RN(a + b): what is computed from this s without roundings is the error t. Where s - b
  overflows the dtype, which takes the largest number for a, t has to become NaN.
- Fast2Sum, s = RN(a + b), z = RN(s - a): b - z is a number of the dtype. The rounding of s - a is
  none for |a| >= |b| only, and `arithmetic.normalize` may meet smaller ones: it stays.

The error of a product needs its rounding below 2^-118 (bf16), so that stays too.

A number without its low half, as `split_remainder16` and `round_alone` make it, is one of bf16.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from collage_fx.passes.ir.program import CONVERT
from collage_fx.passes.rewrite.lower import EXACT, WHERE
from collage_fx.runtime.ops import collage

aten = torch.ops.aten
OVERFLOW = {torch.bfloat16: (2 - 2.0**-8) * 2.0**127, torch.float16: 65520.0}
"""dtype for which all this was tried -> the smallest number that is rounded to infinity."""
_CHOOSING = {*EXACT, *WHERE.values()}


@dataclass
class ExactRoundings:
    """Roundings that change nothing in a lowered graph whose operations are done in fp32."""

    values: dict[Node, torch.dtype] = field(default_factory=dict)
    """fp32 node -> the 16-bit dtype of which its value is a number."""
    exact: dict[Node, Node | None] = field(default_factory=dict)
    """Rounding that returns its operand -> a node that makes it NaN where it overflows."""


def exact_roundings(graph: Graph) -> ExactRoundings:
    """Return the roundings of a lowered graph that change nothing.

    Before::

        t = round(round(a - ap) + round(b - bp)), ap = round(s - b), bp = round(s - ap)

    After::

        t = (a - ap) + (b - bp), ap = s - b, bp = s - ap
    """
    found = ExactRoundings()
    for node in graph.nodes:
        dtype = _dtype_of_value(node, found.values)
        if dtype is None:
            continue
        found.values[node] = dtype
        if _is_rounding(node):
            found.exact |= _two_sum(node, found.values) or _fast_two_sum(node, found.values)
            found.exact |= _of_high_half(node)
    return found


def _dtype_of_value(node: Node, values: dict[Node, torch.dtype]) -> torch.dtype | None:
    """Return the 16-bit dtype of which the result of a node is a number; None if unknown."""
    operands: Sequence[Any] = node.args
    dtype: torch.dtype | None
    if _is_rounding(node):
        dtype = operands[1]
        return dtype
    if node.target is CONVERT:
        dtype = operands[0].meta["dtype"]
        return dtype if dtype in OVERFLOW else None
    if _is_high_half(node):
        return torch.bfloat16
    if node.target not in _CHOOSING:
        return None
    conditions = (a for a in node.all_input_nodes if a.meta["dtype"] == torch.bool)
    dtypes = {values.get(a) for a in set(node.all_input_nodes).difference(conditions)}
    if len(dtypes) != 1 or (dtype := dtypes.pop()) is None:
        return None
    numbers = (a for a in operands if not isinstance(a, Node))
    return dtype if all(_represents(dtype, float(a)) for a in numbers) else None


def _represents(dtype: torch.dtype, number: float) -> bool:
    nearest = torch.tensor(number, dtype=torch.float64).to(dtype).item()
    return bool(nearest == number) or math.isnan(number)


def _of_high_half(rounding: Node) -> dict[Node, Node | None]:
    """Return a rounding of a number without its low half, if it is that."""
    half: Any = rounding.args[0]
    while half.target is aten.alias.default:
        half = half.args[0]
    return {rounding: None} if _is_high_half(half) else {}


def _is_high_half(node: Node) -> bool:
    """Return True if a node is fp32 of bits that end in 16 zeros.

    Those are bits less ((bits & 0xffff) ^ 0x8000) - 0x8000, and bits & ~0xffff.
    """
    if node.target is not aten.view.dtype or node.args[1] is not torch.float32:
        return False
    if _args_of(node.args[0], aten.bitwise_and.Scalar)[1] == ~0xFFFF:
        return True
    bits, low = _args_of(node.args[0], aten.sub.Tensor)
    signed, half = _args_of(low, aten.sub.Tensor)
    masked, sign = _args_of(signed, aten.bitwise_xor.Scalar)
    whole, mask = _args_of(masked, aten.bitwise_and.Scalar)
    return bits is whole is not None and (mask, sign, half) == (0xFFFF, 0x8000, 0x8000)


def _args_of(node: Any, target: Any) -> tuple[Any, Any]:
    """Return the two operands of an operation, if that is what a node is."""
    is_that = isinstance(node, Node) and node.target is target and not node.kwargs
    return tuple(node.args) if is_that else (None, None)


def _is_rounding(node: Any) -> bool:
    """Return True if a node rounds an fp32 value to a dtype for which all this was tried."""
    return (
        isinstance(node, Node)
        and node.target is collage.round.default
        and node.args[1] in OVERFLOW
        and node.meta["dtype"] == torch.float32
    )


def _rounded(node: Any, target: Any) -> tuple[Node, Node] | None:
    """Return a and b of RN(a + b), or RN(a - b), if that is what a node is."""
    if not _is_rounding(node):
        return None
    (operation,) = node.all_input_nodes
    if operation.target is not target or operation.kwargs or len(operation.users) != 1:
        return None
    a, b = operation.args
    return (a, b) if isinstance(a, Node) and isinstance(b, Node) else None


def _two_sum(t: Node, values: dict[Node, torch.dtype]) -> dict[Node, Node | None]:
    """Return the roundings of a 2Sum that ends in t; none if t is no such end."""
    of_a, of_b = _rounded(t, aten.add.Tensor) or (None, None)
    a, a_part = _rounded(of_a, aten.sub.Tensor) or (None, None)
    b, b_part = _rounded(of_b, aten.sub.Tensor) or (None, None)
    of_a_part, of_b_part = (_rounded(x, aten.sub.Tensor) for x in (a_part, b_part))
    if not (of_a and of_b and a_part and b_part and of_a_part and of_b_part):
        return {}
    s = of_a_part[0]
    inside = {a_part: 2, b_part: 1, of_a: 1, of_b: 1}
    if (
        of_a_part == (s, b)
        and of_b_part == (s, a_part)
        and _rounded(s, aten.add.Tensor) == (a, b)
        and _of_one_dtype(values, a, b, s, *inside, t)
        and all(len(node.users) == count for node, count in inside.items())
    ):
        return {**dict.fromkeys(inside), t: a_part}
    return {}


def _fast_two_sum(t: Node, values: dict[Node, torch.dtype]) -> dict[Node, Node | None]:
    """Return the last rounding of a Fast2Sum, if t is that."""
    b, z = _rounded(t, aten.sub.Tensor) or (None, None)
    s, a = _rounded(z, aten.sub.Tensor) or (None, None)
    fits = _rounded(s, aten.add.Tensor) == (a, b) != (None, None)
    return {t: None} if fits and _of_one_dtype(values, a, b, s, z, t) else {}


def _of_one_dtype(values: dict[Node, torch.dtype], *nodes: Node | None) -> bool:
    """Return True if all are numbers of one 16-bit dtype."""
    dtypes = {values.get(node) for node in nodes if node is not None}
    return len(dtypes) == 1 and None not in dtypes
