"""Operations applied to the whole value: join, apply in the wide dtype, split again."""

from collections.abc import Callable
from typing import Any

import torch

from collage_fx.passes.rules.builder import Builder, Call, Components, Expanded, rule
from collage_fx.runtime.expansion.eft import WIDER

aten = torch.ops.aten


def mapped(function: Callable[[Any], Any], operand: Any) -> Any:
    """Return function(operand), or the list of it for each member of a list."""
    if isinstance(operand, list | tuple):
        return [mapped(function, a) for a in operand]
    return function(operand)


def apply_wide(b: Builder, node: Call, x: Expanded, at: int) -> Components:
    """Join every expansion, apply the operation in the wide dtype and split its result.

    Relative error: that of the operation in the wide dtype, on operands that are off by 2^-24 where
    the exponents of hi and lo are more than 24 apart, plus u^2/2 for the split.
    """
    wide = WIDER[b.dtype]
    whole = b.join(b.settle(x))
    subject = node.args[at]
    args = [whole if a is subject else mapped(b.widened, a) for a in node.args]
    return b.split(b.again(node, args, wide))


def join_op_split(b: Builder, node: Call, x: Expanded, at: int) -> Expanded:
    """Rewrite an operation without a rule: `apply_wide`, and a note for the plan."""
    b.joined(node)
    return apply_wide(b, node, x, at)


@rule(
    aten.maximum.default,
    aten.minimum.default,
    aten.clamp.default,
    aten.clamp.Tensor,
    aten.clamp_min.default,
    aten.clamp_min.Tensor,
    aten.clamp_max.default,
    aten.clamp_max.Tensor,
)
def select(b: Builder, node: Call, x: Expanded, at: int) -> Expanded:
    """Joined, compared and selected in the wide dtype, split again; u^2/2 + 2^-24 at most.

    The high words alone would choose wrongly between two values that differ in their low words.
    """
    return apply_wide(b, node, x, at)
