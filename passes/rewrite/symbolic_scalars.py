"""Symbols for numbers that change, where AOTAutograd would specialize on their values.

Dynamo makes a number that changes a symbol. AOTAutograd makes it an input of the graph where it is
an operand of a product, a sum or a comparison; anywhere else (`p.add_(g, alpha=-lr)`) it takes the
value for a constant, and the next value needs another graph. The decompositions here, for
AOTAutograd to trace with, leave such numbers in products only.

A number that does not change is kept as it is: Inductor's decomposition of `lerp` (torch 2.11) or
of `_foreach_lerp` (from 2.14 on) rounds the weight to the dtype in which the kernel computes.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import SymFloat, SymInt, Tensor
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

from collage_fx.passes.frontend.decompose import COMPARISONS, DECOMPOSITIONS, is_rounded_power
from collage_fx.passes.ir.program import Value, value_of
from collage_fx.passes.rewrite.op_schema import each, functional, is_foreach, written
from collage_fx.passes.rewrite.wider import compared, rounds_number
from collage_fx.runtime.expansion.eft import WIDER, computed_in
from collage_fx.runtime.trees import tree_leaves, tree_map_only

aten, prims = torch.ops.aten, torch.ops.prims

_NAMES = ["add", "sub", "mul", "div", "addcmul", "addcdiv", "lerp", "pow", "clamp_min", "clamp_max"]
_TAKES_SYMBOLS = {aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor}
"""Operations of which AOTAutograd makes a symbol an input, if it is an operand."""
_NOT_OURS = ("out", "_mode")
_LERP = (aten.lerp.Scalar, aten._foreach_lerp.Scalar)
_OF_TENSORS = {
    aten.pow.Scalar: aten.pow.Tensor_Tensor,
    aten.pow.Tensor_Scalar: aten.pow.Tensor_Tensor,
    aten.clamp_min.default: aten.maximum.default,
    aten.clamp_max.default: aten.minimum.default,
}
_POWERS = (aten.pow.Scalar, aten.pow.Tensor_Scalar)

Table = dict[Any, Callable[..., Any]]


def keep_symbols(table: Table) -> Table:
    """Return a table of decompositions for AOTAutograd by which no symbol becomes a constant.

    Nor is a number rounded that is the weight of a `lerp`.
    """
    packets = [getattr(aten, prefix + name) for name in _NAMES for prefix in ("", "_foreach_")]
    overloads = [getattr(packet, o) for packet in packets for o in packet.overloads()]
    ours = [op for op in overloads if not written(op) and not op._overloadname.endswith(_NOT_OURS)]
    ours += [prims.fma.default, aten.full.default, aten.scalar_tensor.default]
    comparisons = {op: partial(_compared, op, table.get(op)) for op in COMPARISONS}
    return table | {op: partial(_decomposed, op, table.get(op)) for op in ours} | comparisons


def _decomposed(op: Any, other: Callable[..., Any] | None, *args: Any, **kwargs: Any) -> Any:
    filled = op in (aten.full.default, aten.scalar_tensor.default)
    truncated = filled and not (kwargs.get("dtype") or torch.float32).is_floating_point
    symbolic = not truncated and _symbolic(kwargs if op in _TAKES_SYMBOLS else (args, kwargs))
    if not symbolic and op not in _LERP:
        return NotImplemented if other is None else other(*args, **kwargs)
    if is_foreach(op):
        return [_single(*one) for one in each(functional(op), args, kwargs)]
    return _single(op, args, kwargs)


def _compared(op: Any, other: Callable[..., Any] | None, x: Any, number: Any) -> Any:
    """Compare with a number, rounded as eager PyTorch does, if it is a symbol."""
    if isinstance(number, SymFloat | SymInt) and rounds_number(op, getattr(x, "dtype", None)):
        return compared(op, x.dtype, x, number)
    return NotImplemented if other is None else other(x, number)


def _single(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Do an operation on single tensors, with one rounding, and symbols in products only."""
    # These in the forms that `canonicalize` knows.
    if op is aten.lerp.Scalar:
        return _lerp(*args)
    if op is aten.scalar_tensor.default:
        return torch.ones((), **kwargs) * args[0]
    if op is aten.full.default:
        size, number = args
        return torch.full(size, 1.0, **kwargs) * number
    with disable_proxy_modes_tracing():
        known = tree_map_only(SymFloat, lambda _: 1.0, (args, kwargs))
        out = op(*known[0], **known[1])
    if op in _OF_TENSORS:
        power = op in _POWERS and not out.dim() and is_rounded_power(out.dtype, args[1])
        wide = torch.float64 if power else WIDER.get(out.dtype, out.dtype)
        narrow = computed_in(out.dtype) if power else wide
        one = torch.ones((), dtype=narrow, device=out.device)
        operands = [x.to(wide) if isinstance(x, Tensor) else (one * x).to(wide) for x in args]
        return _OF_TENSORS[op](*operands).to(narrow).to(out.dtype)
    operands, named = tree_map_only(Tensor, Value, (args, kwargs))
    if op in DECOMPOSITIONS:
        return value_of(DECOMPOSITIONS[op](_OnTensors(), out, *operands, **named))
    return op(*args, **kwargs)


class _OnTensors:
    """Builder of decompositions that are done on tensors: see `decompose.Builder`."""

    def call(self, target: Any, *args: Any, val: Tensor, **kwargs: Any) -> Value:
        """Do an operation."""
        args, kwargs = tree_map_only(Value, value_of, (args, kwargs))
        return Value(target(*args, **kwargs))

    def convert(self, x: Value, dtype: torch.dtype) -> Value:
        """Return x in dtype."""
        val = value_of(x)
        return x if val.dtype == dtype else Value(val.to(dtype))


def _lerp(start: Tensor, end: Tensor, weight: Any) -> Tensor:
    """Return start + weight * (end - start), from the nearer end and laid out as start is."""
    for layout, dim in ((torch.channels_last, 4), (torch.channels_last_3d, 5)):
        if start.dim() == dim and start.is_contiguous(memory_format=layout):
            end = end.contiguous(memory_format=layout)
    near = -0.5 < weight < 0.5
    base, factor = (start, weight) if near else (end, weight - 1)
    if not _symbolic(weight):
        return torch.add(base, end - start, alpha=factor)
    if near:
        return start + (end - start) * weight
    return _single(aten.add.Tensor, (end, end - start), {"alpha": factor})


def _symbolic(tree: Any) -> bool:
    return any(isinstance(x, SymFloat) for x in tree_leaves(tree))
