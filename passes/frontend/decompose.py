"""Decompositions of operations into single-tensor operations that round at most once.

The functions build on whatever the builder they are given stands for: nodes of a graph
(`canonicalize`) or real tensors (`rewrite.symbolic_scalars`).
"""

import ctypes
import functools
import math
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from itertools import accumulate, pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from collage_fx.passes.ir.program import CONVERT, LOW_PRECISION, Operand, is_value, value_of
from collage_fx.runtime.expansion.eft import computed_in
from collage_fx.runtime.torch_private import (
    inductor_prims as inductor_prims,  # registers torch.ops.prims.fma
)

aten, prims = torch.ops.aten, torch.ops.prims


class Builder(Protocol):
    """Protocol by which decompositions are built: on nodes of a graph, or on tensors."""

    def call(self, target: Any, *args: Any, val: Tensor, **kwargs: Any) -> Any:
        """Append an operation whose result has shape and dtype of val."""

    def convert(self, x: Any, dtype: torch.dtype) -> Any:
        """Return x in dtype."""


def once(b: Builder, out: Tensor, build: Callable[..., Operand], *operands: Any) -> Any:
    """Compute build(wide, *operands) in the precision that PyTorch uses and round it once."""
    wide = computed_in(out.dtype)
    if wide == out.dtype:
        return build(out, *operands)
    widened = [x if is_scalar(x, out) else b.convert(x, wide) for x in operands]
    return b.convert(build(like(out, wide), *widened), out.dtype)


def is_scalar(x: Any, out: Tensor) -> bool:
    """Return True if x is a number, or a 0-d tensor beside larger ones."""
    return not is_value(x) or (value_of(x).dim() == 0 and out.dim() > 0)


def like(val: Tensor, dtype: torch.dtype, size: int | None = None) -> Tensor:
    """Return a tensor without data of this dtype that has the shape of val, or just a size."""
    mode = getattr(val, "fake_mode", None)
    if size is not None:
        with mode or nullcontext():
            return torch.empty(size, dtype=dtype, device=val.device if mode else "meta")
    if mode is None and val.layout == torch.strided:
        return _without_data(val.size(), val.stride(), dtype)
    if mode is None:
        return torch.empty_like(val, dtype=dtype, device="meta")
    key = (*val.size(), *val.stride(), dtype, val.device)
    # To make one takes longer than all else here. The mode keeps them, since they refer to it.
    made = vars(mode).setdefault("_collage_fx_alike", {})
    symbolic = any(isinstance(s, torch.SymInt) for s in key)
    if not symbolic and key in made:
        return made[key]
    with mode:
        new = torch.empty_like(val, dtype=dtype)  # with gaps, it is dense, as residuals are
    if not symbolic:
        made[key] = new
    return new


@functools.lru_cache(maxsize=4096)
def _without_data(size: torch.Size, stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a meta tensor; to make them anew takes long."""
    return torch.empty_like(torch.empty_strided(size, stride, device="meta"), dtype=dtype)


def constant_of(x: Any) -> Any:
    """Return the number that a full() node holds everywhere, or None.

    It may be a 0-d tensor, which `passes/rewrite/symbolic_scalars.py` multiplies ones by.
    """
    if not is_value(x):
        return None
    if x.target is aten.full.default and isinstance(x.args[1], int | float):
        return x.args[1]
    ones = x.target is aten.mul.Tensor and constant_of(x.args[0]) == 1
    return x.args[1] if ones and is_scalar(x.args[1], value_of(x)) else None


def _is_one(number: Any) -> bool:
    """Return True if a number is the constant one: to ask a symbol would guard its value."""
    return type(number) in (int, float) and number == 1


def _scaled(b: Builder, wide: Tensor, x: Operand, scale: Any) -> Any:
    """Return x * scale in the dtype of wide, or x itself when scale is one."""
    if _is_one(scale):
        return x
    return b.call(aten.mul.Tensor, x, scale, val=like(value_of(x), wide.dtype))


def _add_or_sub(op: Any, b: Builder, out: Tensor, x: Any, y: Any, *, alpha: Any = 1) -> Any:
    x, y = _scalar(x, out), _scalar(y, out)
    if not is_value(y):
        return _binary(b, out, op, x, y * alpha)
    if op is aten.add.Tensor:
        polyfill = _lerp(x, y, alpha) or (_lerp(y, x, 1) if _is_one(alpha) else None)
        if polyfill:
            op = aten.lerp.Tensor if is_value(polyfill[2]) else aten.lerp.Scalar
            return b.call(op, *polyfill, val=out)
    if _is_one(alpha):
        return _binary(b, out, op, x, y)
    return once(
        b, out, lambda wide, x, y: b.call(op, x, _scaled(b, wide, y, alpha), val=wide), x, y
    )


_add = functools.partial(_add_or_sub, aten.add.Tensor)


def _binary(b: Builder, out: Tensor, op: Any, x: Any, y: Any) -> Any:
    """Keep an operation of two tensors; with a scalar, which eager PyTorch may round, go wide."""
    if is_scalar(x, out) or is_scalar(y, out):
        return once(b, out, lambda wide, x, y: b.call(op, x, y, val=wide), x, y)
    return b.call(op, x, y, val=out)


def _lerp(x: Any, y: Any, weight: Any) -> tuple[Any, Any, Any] | None:
    """Return (x, end, w) if x + weight*y is lerp(x, end, w) as Dynamo's polyfills write it.

    That is y = end - x with the weight beside it, or y = w * (end - x).
    """
    if is_value(y) and y.target is aten.mul.Tensor and _is_one(weight):
        y, weight = y.args  # a scalar stands second, by _mul
    if not is_value(y) or y.target is not aten.sub.Tensor or y.args[1] is not x:
        return None
    end = y.args[0]
    if not is_value(end) or not is_value(x):
        return None
    known = isinstance(weight, float)
    scalar = is_value(weight) and value_of(weight).dim() == 0 and value_of(x).dim() > 0
    return (x, end, weight) if known or scalar else None


def _scalar(x: Any, out: Tensor) -> Any:
    """Return the number that x is everywhere, if it is a constant and out is not 0-d, or x."""
    number = constant_of(x) if out.dim() and is_value(x) and not value_of(x).dim() else None
    return x if number is None else number


def _mul(b: Builder, out: Tensor, x: Any, y: Any) -> Any:
    x, y = _scalar(x, out), _scalar(y, out)
    if is_scalar(x, out):  # eager PyTorch rounds a scalar that comes first, and not one behind
        x, y = y, x
    return b.call(aten.mul.Tensor, x, y, val=out)


def _where(b: Builder, out: Tensor, condition: Any, x: Any, y: Any) -> Any:
    known = constant_of(condition)
    if known is None or is_value(known):
        return b.call(aten.where.self, condition, x, y, val=out)
    chosen: Operand = x if known else y
    same = value_of(chosen).shape == out.shape and value_of(chosen).dtype == out.dtype
    return chosen if same else b.call(aten.where.self, condition, x, y, val=out)


def _addcmul(b: Builder, out: Tensor, x: Operand, t1: Any, t2: Any, value: Any = 1) -> Any:
    for weight, other in ((t1, t2), (t2, t1)):
        number = constant_of(weight)
        one = _is_one(value)
        if number is not None and (one or (not is_value(number) and not is_value(value))):
            alpha = number if one else number * value
            return _add(b, out, x, other, alpha=alpha)
    return _add_scaled(b, out, aten.mul.Tensor, (x, t1, t2), value)


def _addcdiv(b: Builder, out: Tensor, x: Operand, t1: Operand, t2: Operand, value: Any = 1) -> Any:
    return _add_scaled(b, out, aten.div.Tensor, (x, t1, _divisor(b, out, t2)), value)


def _div(b: Builder, out: Tensor, x: Any, y: Any) -> Any:
    if is_value(y):
        # Before 2.13 torch takes addcdiv apart, into operations on what it has widened.
        wider = y.target is CONVERT and is_value(y.args[0])
        source: Any = y.args[0] if wider and value_of(y).dtype == torch.float32 else y
        divisor = _divisor(b, value_of(source), source)
        if divisor is not source:
            div = aten.div.Tensor
            return once(b, out, lambda wide, x, y: b.call(div, x, y, val=wide), x, divisor)
    return _binary(b, out, aten.div.Tensor, x, y)


def _divisor(b: Builder, out: Tensor, x: Operand) -> Operand:
    """Return a divisor, not rounded to fp16 if it is a value times or by a scalar.

    Traced steps of torch.optim divide by sqrt(v) / lr, where eager ones multiply by lr: beyond the
    range of fp16 for a gradient of one and a rate of 1e-5, and the update would be 0.
    """
    if out.dtype != torch.float16:
        return x
    if x.target is CONVERT:
        scaled: Any = x.args[0]
        by_scalar = scaled.target is aten.div.Tensor and is_scalar(scaled.args[1], out)
        return scaled if by_scalar else x
    if x.target is aten.mul.Tensor and is_scalar(x.args[1], out):
        wide = computed_in(out.dtype)
        return b.call(aten.mul.Tensor, b.convert(x.args[0], wide), x.args[1], val=like(out, wide))
    return x


def _add_scaled(
    b: Builder, out: Tensor, op: Any, operands: tuple[Operand, Operand, Operand], value: Any
) -> Any:
    """x + op(value*t1, t2), rounded once."""
    return once(
        b,
        out,
        lambda wide, x, t1, t2: b.call(
            aten.add.Tensor,
            x,
            b.call(op, _scaled(b, wide, t1, value), t2, val=wide),
            val=wide,
        ),
        *operands,
    )


def _fma(b: Builder, out: Tensor, x: Any, y: Any, z: Any) -> Any:
    if isinstance(x, int | float):
        x, y = y, x
    if not is_value(z) or not is_value(x):
        return b.call(prims.fma.default, x, y, z, val=out)
    if is_value(y):
        return _addcmul(b, out, z, x, y)
    if x.target is aten.mul.Tensor and all(is_value(a) for a in x.args):
        t1, t2 = x.args
        return _addcmul(b, out, z, t1, t2, y)
    return _add(b, out, z, x, alpha=y)


def is_rounded_power(dtype: torch.dtype, exponent: Any) -> bool:
    """Return True if a power of 0-d operands is taken in float64, and then rounded to this dtype.

    It is one of at most 24 bits; but numbers 0, 1 and 2 as exponents round at most once anywhere.
    """
    exact = isinstance(exponent, int | float) and exponent in (0, 1, 2)
    return computed_in(dtype) == torch.float32 and not exact


def in_fp32(number: float) -> float:
    """Return the fp32 number that PyTorch takes as an operand of an fp32 power."""
    return ctypes.c_float(number).value


def _power(op: Any, b: Builder, out: Tensor, x: Any, y: Any) -> Any:
    """Take a power of 0-d operands in float64, and round it once.

    Each library has another fp32 power: that of a GPU is off by a unit in the last place at times.
    In float64 theirs differ as well, which changes the rounding to fp32 once in some 10^8 powers.
    """
    if out.dim() or not is_rounded_power(out.dtype, y):
        if op is aten.pow.Tensor_Scalar:
            return _binary(b, out, op, x, y)
        return b.call(op, x, y, val=out)
    wide = computed_in(out.dtype)

    def operand(z: Any) -> Any:
        """Return an operand as the fp32 power would take it, in float64."""
        if not is_value(z):
            return in_fp32(z)
        number = value_of(z).dtype == torch.float64  # a symbolic one
        return b.convert(b.convert(z, wide) if number else z, torch.float64)

    power = b.call(op, operand(x), operand(y), val=like(out, torch.float64))
    return b.convert(b.convert(power, wide), out.dtype)


def _copy(b: Builder, out: Tensor, x: Operand, source: Any, *_: Any, **__: Any) -> Any:
    if is_value(source) and value_of(source).shape == out.shape:
        return b.convert(source, out.dtype)
    return b.call(aten.copy.default, x, source, val=out)


COMPARISONS = {
    **dict.fromkeys(
        (aten.eq.Scalar, aten.ge.Scalar, aten.le.Scalar),
        (aten.eq.Scalar, aten.bitwise_or.Tensor),
    ),
    **dict.fromkeys(
        (aten.ne.Scalar, aten.gt.Scalar, aten.lt.Scalar),
        (aten.ne.Scalar, aten.bitwise_and.Tensor),
    ),
}
"""Comparison with a number -> that for equality with the number itself, and what joins the two."""


def compare(call: Callable[..., Any], op: Any, x: Any, number: float, dtype: torch.dtype) -> Any:
    """Compare with a number as eager PyTorch does, which rounds it to the dtype of the tensor.

    What is not rounded here may be the number itself, where it was clamped to that, say: it counts
    as the rounded number.

    Args:
        call: does, or appends, an operation.
        op: one of COMPARISONS.
        x: of the dtype, or wider.
        number: what x is compared with.
        dtype: that of x in the user's operation.
    """
    rounded = _in_16_bits(number, dtype)
    found = call(op, x, rounded)
    if rounded == number or math.isnan(rounded):
        return found
    itself, both = COMPARISONS[op]
    return call(both, found, call(itself, x, number))


def _in_16_bits(number: float, dtype: torch.dtype) -> float:
    """Return the number of a dtype that PyTorch takes in the place of a Python number.

    Without a tensor, which a mode would make a fake one.
    """
    number = in_fp32(number)
    if dtype is torch.bfloat16 and math.isfinite(number):
        (bits,) = struct.unpack("<I", struct.pack("<f", number))
        bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
        (number,) = struct.unpack("<f", struct.pack("<I", bits))
    elif dtype is torch.float16 and math.isfinite(number):
        try:
            (number,) = struct.unpack("<e", struct.pack("<e", number))
        except OverflowError:
            number = math.copysign(math.inf, number)
    return number


def _compare(op: Any, b: Builder, out: Tensor, x: Any, number: Any) -> Any:
    dtype = value_of(x).dtype
    if dtype not in LOW_PRECISION or not isinstance(number, int | float):
        return b.call(op, x, number, val=out)
    return compare(lambda target, *args: b.call(target, *args, val=out), op, x, number, dtype)


DIVIDING = frozenset((aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int))
"""Operations that return all of a tensor, in views that have nothing in common."""


def parts_of(
    op: Any, x: Any, given: Sequence[Any], parts: Sequence[Tensor]
) -> Iterator[tuple[Any, ...]]:
    """Yield the operation that makes each part of a tensor alone, with its arguments.

    Args:
        op: one of DIVIDING.
        x: the tensor, as these arguments have it.
        given: the other arguments of `op`.
        parts: the results of `op`, for their sizes.
    """
    axis = (*given, 0)[op is not aten.unbind.int]
    if op is aten.unbind.int:
        yield from ((aten.select.int, x, axis, k) for k in range(len(parts)))
        return
    for begin, end in pairwise(accumulate((part.shape[axis] for part in parts), initial=0)):
        yield aten.slice.Tensor, x, axis, begin, end


DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    **{op: functools.partial(_compare, op) for op in COMPARISONS},
    aten.add.Tensor: _add,
    aten.sub.Tensor: functools.partial(_add_or_sub, aten.sub.Tensor),
    aten.mul.Tensor: _mul,
    aten.where.self: _where,
    aten.div.Tensor: _div,
    aten.addcmul.default: _addcmul,
    aten.addcdiv.default: _addcdiv,
    aten.copy.default: _copy,
    aten._to_copy.default: lambda b, out, x, **_: b.convert(x, out.dtype),
    CONVERT: lambda b, out, x, dtype: b.convert(x, dtype),
    prims.fma.default: _fma,
    **{
        op: functools.partial(_power, op)
        for op in (aten.pow.Scalar, aten.pow.Tensor_Scalar, aten.pow.Tensor_Tensor)
    },
}
