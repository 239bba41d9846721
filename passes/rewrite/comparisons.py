"""Comparisons with a number, done on wider tensors as the user's operation does them in 16 bits."""

from typing import Any

import torch
from torch import Tensor

from collage_fx.passes.frontend.decompose import COMPARISONS, compare
from collage_fx.passes.ir.program import LOW_PRECISION
from collage_fx.runtime.expansion.eft import computed_in

aten = torch.ops.aten
_SINGLE = {op._opname: op for op in COMPARISONS}


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
