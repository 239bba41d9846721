"""The rules without a graph: a builder whose terms are real tensors, and operands for it."""

from dataclasses import dataclass, field
from typing import Any

import torch
from floats import Format
from torch import Generator, Tensor

from collage_fx.passes.ir.program import Value
from collage_fx.passes.rules import RULES
from collage_fx.passes.rules.registry import Components, Decayed, Expanded
from collage_fx.runtime.expansion.eft import WIDER
from collage_fx.runtime.ops import collage

aten = torch.ops.aten


@dataclass(frozen=True)
class Whole:
    """An operand that is an expansion."""

    pair: Components

    @staticmethod
    def of(hi: Tensor, lo: Tensor) -> "Whole":
        return Whole((Value(hi), Value(lo)))


@dataclass(frozen=True)
class Call:
    """An operation on operands: tensors in `Value`, expansions in `Whole`, numbers, lists."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)


class TensorBuilder:
    """The `Builder` of passes/rules/registry.py on real tensors; checks the dtypes rules state."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.noted: list[Any] = []

    def plain(self, operand: Any) -> Any:
        return operand.pair[0] if isinstance(operand, Whole) else operand

    def expansion(self, operand: Any) -> Components | None:
        return operand.pair if isinstance(operand, Whole) else None

    def rounded(self, operand: Any) -> Value:
        return self.narrowed(self.plain(operand))

    def narrowed(self, term: Value) -> Value:
        return Value(_raw(term).to(self.dtype))

    def widened(self, operand: Any) -> Any:
        if isinstance(operand, Whole):
            return self.join(operand.pair)
        narrow = isinstance(operand, Value) and operand.meta["dtype"] == self.dtype
        return Value(_raw(operand).to(WIDER[self.dtype])) if narrow else operand

    count = 2

    def form(self, target: Any) -> Any:
        return target

    def is_number(self, operand: Any) -> bool:
        return isinstance(operand, int | float)

    def op(self, target: Any, *args: Any, dtype: torch.dtype, **kwargs: Any) -> Value:
        result = target(*_raw(args), **_raw(kwargs))
        assert result.dtype == dtype, (target, result.dtype, dtype)
        return Value(result)

    def pair(self, target: Any, *args: Any) -> Components:
        hi, lo = target(*_raw(args))
        assert hi.dtype == lo.dtype == self.dtype, target
        return Value(hi), Value(lo)

    def join(self, x: Components) -> Value:
        return self.op(collage.join.default, *x, dtype=WIDER[self.dtype])

    def split(self, term: Value) -> Components:
        return self.pair(collage.split.default, term, self.dtype)

    def settle(self, x: Expanded) -> Components:
        if not isinstance(x, Decayed):
            return x
        if x.small:
            return self.pair(collage.grow.default, *x.pair, self.narrowed(x.term))
        return self.pair(collage.add.default, *x.pair, *self.split(x.term))

    def again(self, node: Any, args: list[Any], dtype: torch.dtype) -> Value:
        return self.op(node.target, *args, dtype=dtype, **node.kwargs)

    def joined(self, node: Any) -> None:
        self.noted.append(node.target)


def _raw(x: Any) -> Any:
    if isinstance(x, Value):
        return x.meta["val"]
    if isinstance(x, list | tuple):
        return type(x)(_raw(a) for a in x)
    return {k: _raw(v) for k, v in x.items()} if isinstance(x, dict) else x


def run_rule(call: Call, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Apply the rule of call to the first expansion among its operands; hi and lo."""
    builder = TensorBuilder(dtype)
    at = next(i for i, a in enumerate(call.args) if _holds(a))
    first = call.args[at][0] if isinstance(call.args[at], list) else call.args[at]
    result = builder.settle(RULES[call.target](builder, call, first.pair, at))
    assert not builder.noted
    return _raw(result[0]), _raw(result[1])


def _holds(operand: Any) -> bool:
    return isinstance(operand[0] if isinstance(operand, list) else operand, Whole)


def partners(f: Format, a: Tensor, g: Generator) -> Tensor:
    """Second operands: any bits, an exponent not far off, almost -a and almost a, in turn."""
    near = f.random_near(a, -2 * f.p, 2 * f.p, g)
    kinds = [f.random(len(a), g), near, f.near_negative(a, 4, g), -f.near_negative(a, 4, g)]
    chosen = torch.arange(len(a)) % 4
    return torch.stack(kinds)[chosen, torch.arange(len(a))]
