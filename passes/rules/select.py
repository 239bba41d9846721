"""Rules of selection by value: the larger, the smaller, the nearest within limits."""

import torch

from collage_fx.passes.rules.builder import Builder, Call, Expanded
from collage_fx.passes.rules.join_split import apply_wide
from collage_fx.passes.rules.registry import rule

aten = torch.ops.aten


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
