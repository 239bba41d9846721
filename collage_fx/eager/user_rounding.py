"""Stochastic rounding that a step does itself, on the bits of fp32: an expansion needs none.

Optimizers that keep bf16 parameters unbiased add random bits to an fp32 value and cut them off:
x.view(int32), integer arithmetic, .view(float32), and a conversion to bf16 that is exact. The
engine follows the bits; where that conversion finds x rounded to bf16 by chance, up or down, it
takes x itself, and the low word holds the rest. All other arithmetic on bits is left as it is.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from collage_fx.eager.memory_map import MemoryMap, MemoryRecord
from collage_fx.passes.ir.program import SAME_VALUE
from collage_fx.passes.rewrite.interpreter import Forms
from collage_fx.runtime.residuals.memory import has_memory

aten = torch.ops.aten

_FOLLOWED = (
    frozenset(
        getattr(getattr(aten, name + ending), overload)
        for name in (
            "add",
            "sub",
            "bitwise_and",
            "bitwise_or",
            "where",
            "lt",
            "le",
            "gt",
            "ge",
            "copy",
        )
        for ending in ("", "_")
        if hasattr(aten, name + ending)
        for overload in getattr(aten, name + ending).overloads()
        if overload in ("Tensor", "Scalar", "self", "ScalarOther", "ScalarSelf", "default")
    )
    | SAME_VALUE
)
_UNIT = 2.0**-7
"""A unit in the last place of bf16 is at most this much of the value."""


@dataclass
class _Bits:
    """What went into a tensor: the bits of an fp32 value, chance, or both."""

    value: Tensor | None = None
    version: int = 0
    """Of the value when its bits were taken."""
    forms: Forms | None = None
    random: bool = False


class UserRounding:
    """The tensors that were computed from random numbers and from bits that the engine follows."""

    def __init__(self) -> None:
        self.known = MemoryMap()
        self.bits: dict[MemoryRecord, _Bits] = {}

    def clear(self) -> None:
        """Forget all, at the end of a step."""
        self.known.clear()
        self.bits.clear()

    def before_write(self, target: Any, memory: MemoryMap) -> None:
        """Keep the value of bits that are about to be changed in place."""
        found = self._of(target, memory)
        if found is not None and found.value is not None and self._find(target) is None:
            self._note(target, _Bits(found.value.clone(), 0, found.forms, found.random))

    def follow(self, func: Any, args: Any, result: Any, memory: MemoryMap) -> None:
        """Note the result of a random operation, or of one on what is known."""
        random = torch.Tag.nondeterministic_seeded in func.tags
        if not (random or func in _FOLLOWED) or not isinstance(result, Tensor):
            return
        if not has_memory(result) or (result.is_floating_point() and not random):
            return
        operands = [self._of(a, memory) for a in tree_leaves(args)] if func in _FOLLOWED else []
        known = [o for o in operands if o is not None]
        if not (random or known):
            return
        source = next((o for o in known if o.value is not None), _Bits())
        random |= any(o.random for o in known)
        self._note(result, _Bits(source.value, source.version, source.forms, random))

    def undone(self, x: Tensor) -> tuple[Tensor, Forms] | None:
        """Return what x was before it was rounded to bf16 by chance, and its forms; else None."""
        if not self.bits or x.dtype != torch.float32 or not has_memory(x):
            return None
        found = self._find(x.view(torch.int32))
        if found is None or found.value is None or not found.random:
            return None
        if found.value._version != found.version or found.value.shape != x.shape:
            return None
        exact = (x.view(torch.int32) & 0xFFFF) == 0
        near = (x - found.value).abs() <= _UNIT * found.value.abs()
        return torch.where(exact & near, found.value, x), found.forms or {}

    def _of(self, operand: Any, memory: MemoryMap) -> _Bits | None:
        """Return what is known of an operand; of the bits of a followed value, that value."""
        if not isinstance(operand, Tensor) or not has_memory(operand):
            return None
        found = self._find(operand)
        if found is None and operand.dtype == torch.int32:
            value = operand.view(torch.float32)
            source = memory.find(value)
            if source is not None:
                return _Bits(value, value._version, source.forms)
        return found

    def _find(self, tensor: Any) -> _Bits | None:
        record = self.known.find(tensor) if isinstance(tensor, Tensor) else None
        return self.bits.get(record) if record is not None else None

    def _note(self, tensor: Tensor, bits: _Bits) -> None:
        self.bits[self.known.add(tensor, None, {})] = bits
