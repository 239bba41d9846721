"""Stochastic rounding that a step does itself, on the bits of fp32: an expansion needs none.

Optimizers that keep bf16 parameters unbiased add random bits to an fp32 value and cut it off:
x.view(int32), integer arithmetic, .view(float32), .bfloat16(). The engine follows the bits; what
comes back within a unit in the last place of bf16 is x, and its low word holds the rest.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from collage_fx.shadows import Shadows

aten = torch.ops.aten

_INTEGER = frozenset(
    getattr(getattr(aten, name), overload)
    for name in ("add", "sub", "bitwise_and", "bitwise_or", "where")
    for overload in getattr(aten, name).overloads()
    if overload in ("Tensor", "Scalar", "self", "ScalarOther", "ScalarSelf")
)
_UNIT = 2.0**-7
"""A unit in the last place of bf16 is at most this much of the value."""


class Dither:
    """The int32 tensors that were computed from the bits of values that the engine follows."""

    def __init__(self) -> None:
        self.bits = Shadows()
        """In the place of a low word: the fp32 value of whose bits an int32 tensor was made."""

    def view(self, func: Any, args: tuple[Any, ...], result: Tensor, shadows: Shadows) -> Tensor:
        """Return the result of a view; of one that makes a value of bits again, the value."""
        if func is not aten.view.dtype:
            return result
        if args[1] == torch.int32 and args[0].dtype == torch.float32:
            source = shadows.find(args[0])
            if source is not None:
                with_value = self.bits.add(result, args[0].clone(), source.forms)
                with_value.whole = source.whole
        found = self.bits.find(args[0]) if args[1] == torch.float32 else None
        if found is None or found.lo is None:
            return result
        result = undithered(found.lo, result)
        shadows.add(result, None, found.forms).whole = found.whole
        return result

    def follow(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        """Note the result of an integer operation on such bits."""
        if func in _INTEGER and isinstance(result, Tensor) and result.dtype == torch.int32:
            for operand in tree_leaves(args):
                found = self.bits.find(operand) if isinstance(operand, Tensor) else None
                if found is not None:
                    self.bits.add(result, found.lo, found.forms).whole = found.whole


def undithered(x: Tensor, rounded: Tensor) -> Tensor:
    """Return x where rounded is x rounded to bf16, up or down, and rounded elsewhere."""
    return torch.where((rounded - x).abs() <= _UNIT * x.abs(), x, rounded)
