"""The rules without a graph: each applied to one operation on real tensors."""

from dataclasses import dataclass, field
from typing import Any

import torch
from floats import Format
from torch import Generator, Tensor
from torch.utils._pytree import tree_map

from collage_fx.passes.ir.program import Value, value_of
from collage_fx.passes.rules import RULES
from collage_fx.passes.rules.builder import Builder, Expanded


@dataclass(frozen=True)
class Call:
    """An operation about to be done; rules see it in the place of a graph node."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)


class Traced(Value):
    """A tensor with the expansion that it is."""

    __slots__ = ("expanded",)

    def __init__(self, val: Tensor, expanded: Expanded) -> None:
        super().__init__(val)
        self.expanded = expanded


def whole(hi: Tensor, lo: Tensor) -> Traced:
    """Return an operand that is an expansion."""
    return Traced(hi, (Value(hi), Value(lo)))


class _Environment:
    """Operand -> its expansion, or itself."""

    def __getitem__(self, operand: Any) -> Any:
        return getattr(operand, "expanded", None) or operand

    def __setitem__(self, operand: Any, expanded: Expanded) -> None:
        operand.expanded = expanded


class Checked(Builder):
    """Checks the dtypes that rules state, and that none of them gives up."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.env: Any = _Environment()
        self.without_rule: list[str] = []
        """Operations that ran as join - op - split, for want of a rule."""

    def op(self, target: Any, *args: Any, dtype: torch.dtype, **kwargs: Any) -> Value:
        args, kwargs = tree_map(_tensor, (args, kwargs))
        result = Value(target(*args, **kwargs))
        assert result.meta["dtype"] == dtype, (target, result.meta["dtype"], dtype)
        return result

    def components(self, target: Any, *args: Any, dtype: torch.dtype) -> Any:
        result = tuple(Value(c) for c in target(*tree_map(_tensor, args)))
        assert {x.meta["dtype"] for x in result} == {dtype}, target
        return result

    def convert(self, x: Any, dtype: torch.dtype) -> Any:
        val = value_of(x)
        return x if val.dtype == dtype else Value(val.to(dtype))

    def joined(self, node: Any) -> None:
        self.without_rule.append(str(node.target))


def _tensor(x: Any) -> Any:
    return value_of(x) if isinstance(x, Value) else x


def run_rule(call: Call, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Apply the rule of call to the first expansion among its operands; hi and lo."""
    builder = Checked(dtype)
    at = next(i for i, a in enumerate(call.args) if _first(a) is not None)
    result = builder.settle(RULES[call.target](builder, call, _first(call.args[at]), at))
    assert not builder.without_rule
    hi, lo = (x.meta["val"] for x in result)
    return hi, lo


def _first(operand: Any) -> Any:
    return getattr(operand[0] if isinstance(operand, list) else operand, "expanded", None)


def partners(f: Format, a: Tensor, g: Generator) -> Tensor:
    """Second operands: any bits, an exponent not far off, almost -a and almost a, in turn."""
    near = f.random_near(a, -2 * f.p, 2 * f.p, g)
    kinds = [f.random(len(a), g), near, f.near_negative(a, 4, g), -f.near_negative(a, 4, g)]
    chosen = torch.arange(len(a)) % 4
    return torch.stack(kinds)[chosen, torch.arange(len(a))]
