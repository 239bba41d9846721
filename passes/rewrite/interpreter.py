"""The rules applied to one operation at a time, on real tensors.

Compiled graphs and this share decompositions and rules: what they build on is a graph there and the
tensors themselves here. It traces what a graph does to numbers, and tests apply rules by it.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from collage_fx.passes.frontend.decompose import DECOMPOSITIONS, like
from collage_fx.passes.ir.program import LOW_PRECISION, Arithmetic, Value, value_of
from collage_fx.passes.rules import RULES
from collage_fx.passes.rules.builder import Builder, Expanded
from collage_fx.passes.rules.join_split import join_op_split
from collage_fx.runtime.expansion.eft import WIDER
from collage_fx.runtime.storage.registry import STORAGES, transforms


@dataclass(frozen=True)
class Call:
    """An operation about to be done; rules see it in the place of a graph node."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)


class Traced(Value):
    """A tensor with the expansion that it is."""

    __slots__ = ("expanded",)

    def __init__(self, val: Tensor, expanded: Expanded | None = None) -> None:
        super().__init__(val)
        self.expanded = expanded


def supports(target: Any) -> bool:
    """Tell whether there is a rule or a decomposition for an operation."""
    return target in RULES or target in DECOMPOSITIONS


def expansion_of(hi: Tensor, lows: tuple[Tensor, ...] | None) -> Traced:
    """Return the operand that stands for hi and its residuals; for a plain tensor without any."""
    return Traced(hi, None if lows is None else (Value(hi), *map(Value, lows)))


class _Environment:
    """What an operand is: its expansion or itself."""

    def __getitem__(self, operand: Any) -> Any:
        return getattr(operand, "expanded", None) or operand

    def __setitem__(self, operand: Any, expanded: Expanded) -> None:
        operand.expanded = expanded


class Operation(Builder):
    """Does one operation on tensors of which some are expansions."""

    def __init__(self, dtype: torch.dtype, arithmetic: Arithmetic, storage: str = "mcf2") -> None:
        self.dtype = dtype
        self.storage = storage
        self.wide = arithmetic == "wide" or not transforms(dtype, storage)
        self.env: Any = _Environment()
        self.without_rule: list[str] = []
        """Operations that ran as join - op - split, for want of a rule."""

    def run(self, call: Call, out: Tensor) -> Traced:
        """Return the result, an expansion if an operand was one; out has its shape and dtype."""
        decomposed = DECOMPOSITIONS.get(call.target)
        if decomposed is None:
            result = self.call(call.target, *call.args, val=out, **call.kwargs)
        else:
            result = decomposed(self, out, *call.args, **call.kwargs)
        if isinstance(result, Traced) and result.expanded is not None:
            whole = self.settled(result)
            return Traced(whole[0].meta["val"], whole)
        return result

    # What decompositions build with.

    def call(self, target: Any, *args: Any, val: Tensor, **kwargs: Any) -> Traced:
        """Do an operation: by its rule where an operand is an expansion."""
        call = Call(target, args, kwargs)
        at = next((i for i, a in enumerate(args) if getattr(a, "expanded", None)), None)
        if at is None:
            return Traced(self.op(target, *args, dtype=val.dtype, **kwargs).meta["val"])
        rule = join_op_split if self.wide else RULES.get(target, join_op_split)
        return Traced(like(val, val.dtype), rule(self, call, args[at].expanded, at))

    def computed_in(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which PyTorch computes; for states of fp32 a wider one."""
        held = dtype == self.dtype and dtype in STORAGES[self.storage].residuals
        return WIDER[dtype] if held or dtype in LOW_PRECISION else dtype

    def convert(self, x: Any, dtype: torch.dtype) -> Any:
        """Return x in dtype; an expansion keeps its own."""
        val = value_of(x)
        if val.dtype == dtype:
            return x
        if getattr(x, "expanded", None):
            return Traced(like(val, dtype), x.expanded)
        return Traced(val.to(dtype))

    # What rules build with, beside what Builder has.

    def op(self, target: Any, *args: Any, dtype: torch.dtype, **kwargs: Any) -> Any:
        """Do an operation with one result."""
        args, kwargs = tree_map(_tensor, (args, kwargs))
        return Value(target(*args, **kwargs))

    def components(self, target: Any, *args: Any, dtype: torch.dtype) -> Any:
        """Do an operation whose result is an expansion."""
        return tuple(Value(c) for c in target(*tree_map(_tensor, args)))

    def joined(self, node: Any) -> None:
        """Note an operation without a rule."""
        if not self.wide:
            self.without_rule.append(str(node.target))


def _tensor(x: Any) -> Any:
    return x.meta["val"] if isinstance(x, Value) else x
