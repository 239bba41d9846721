"""The rules without a graph: each applied to one operation on real tensors."""

from typing import Any

import torch
from floats import Format
from torch import Generator, Tensor

from collage_fx.passes.ir.program import Value
from collage_fx.passes.rewrite.interpreter import Call, Operation, Traced, expansion_of
from collage_fx.passes.rules import RULES


def whole(hi: Tensor, lo: Tensor) -> Traced:
    """Return an operand that is an expansion."""
    return expansion_of(hi, (lo,))


class Checked(Operation):
    """Checks the dtypes that rules state, and that none of them gives up."""

    def op(self, target: Any, *args: Any, dtype: torch.dtype, **kwargs: Any) -> Value:
        result: Value = super().op(target, *args, dtype=dtype, **kwargs)
        assert result.meta["dtype"] == dtype, (target, result.meta["dtype"], dtype)
        return result

    def components(self, target: Any, *args: Any, dtype: torch.dtype) -> Any:
        result = super().components(target, *args, dtype=dtype)
        assert {x.meta["dtype"] for x in result} == {dtype}, target
        return result


def run_rule(call: Call, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Apply the rule of call to the first expansion among its operands; hi and lo."""
    builder = Checked(dtype, "eft")
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
