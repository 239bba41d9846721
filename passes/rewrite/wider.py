"""Operations on whole values, in wider dtypes, that are not just done in these.

A comparison with a number rounds that to 16 bits, as the user's operation does. Powers of 0-d
tensors are taken in float64, as in the graphs that the passes rewrite by `frontend.decompose`.
"""

from functools import partial
from typing import Any

import torch
from torch import SymFloat, SymInt, Tensor

from collage_fx.passes.frontend.canonicalize import single_overload
from collage_fx.passes.frontend.decompose import COMPARISONS, compare, in_fp32, is_rounded_power
from collage_fx.passes.ir.program import LOW_PRECISION
from collage_fx.passes.rewrite.op_schema import each, is_foreach, written
from collage_fx.runtime.expansion.eft import computed_in

aten = torch.ops.aten
_SINGLE = {op._opname: op for op in COMPARISONS}
_POWERS = frozenset(
    op
    for packet in (aten.pow, aten.pow_, aten._foreach_pow, aten._foreach_pow_)
    for op in (getattr(packet, overload) for overload in packet.overloads())
    if any("Tensor" in str(a.type) for a in op._schema.arguments)
    and not op._overloadname.endswith("out")
)
"""The operations that take powers, of one tensor or of each in a list."""


def on_wider(op: Any, dtype: Any = None) -> Any:
    """Return what does an operation on wider tensors: itself, or a partial function.

    Args:
        op: the operation.
        dtype: that of its first operand in the step; None if that is no tensor.
    """
    if rounds_number(op, dtype):
        return partial(compared, op, dtype)
    return partial(_power, op) if op in _POWERS else op


def rounds_number(op: Any, dtype: Any) -> bool:
    """Return True if op compares a tensor with a number, and rounds that to the tensor's dtype."""
    name = getattr(op, "_opname", "").removesuffix("_")
    return dtype in LOW_PRECISION and name in _SINGLE and "Scalar" in op._overloadname


def compared(op: Any, dtype: torch.dtype, x: Tensor, number: Any, *, out: Any = None) -> Tensor:
    """Compare a tensor with a number, as a tensor of `dtype` would be.

    Args:
        op: of which `rounds_number` holds for this dtype; in place, with `out`, or neither.
        dtype: that of the tensor in the step.
        x: the tensor, in a wider dtype where it has low words.
        number: may be symbolic.
        out: what an overload with such an argument writes.
    """
    single = _SINGLE[op._opname.removesuffix("_")]
    if isinstance(number, int | float):
        found = compare(lambda target, *args: target(*args), single, x, number, dtype)
    else:
        itself, both = COMPARISONS[single]
        given = torch.ones((), dtype=torch.float64, device=x.device) * number
        wide = computed_in(x.dtype)
        rounded = getattr(aten, single._opname).Tensor(x, given.to(dtype).to(x.dtype))
        found = both(rounded, getattr(aten, itself._opname).Tensor(x.to(wide), given.to(wide)))
    place = x if op._opname.endswith("_") else out
    return found if place is None else place.copy_(found)


def _power(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Take powers, those of 0-d tensors in float64; symbols AOTAutograd is to decompose."""
    power = aten.pow.Tensor_Tensor
    singles = [operands for _, operands, _ in each(power, args, {})] if is_foreach(op) else [args]
    if kwargs or not any(_is_rounded(*operands) for operands in singles):
        return op(*args, **kwargs)
    made = [_taken(*operands) for operands in singles]
    if written(op):
        for (x, _), value in zip(singles, made, strict=True):
            x.copy_(value)
        return args[0]
    return made if is_foreach(op) else made[0]


def _taken(x: Any, y: Any) -> Tensor:
    """Take one power: in float64 if it is of 0-d tensors, of what PyTorch would take in fp32."""
    dtype = torch.result_type(x, y)
    if _is_rounded(x, y):
        x, y = (z.to(torch.float64) if isinstance(z, Tensor) else in_fp32(z) for z in (x, y))
    power: Tensor = single_overload(aten.pow.Tensor_Tensor, (x, y))(x, y)
    return power.to(computed_in(dtype)).to(dtype)


def _is_rounded(x: Any, y: Any) -> bool:
    if any(isinstance(a, SymFloat | SymInt) or (isinstance(a, Tensor) and a.dim()) for a in (x, y)):
        return False
    return is_rounded_power(torch.result_type(x, y), y)
