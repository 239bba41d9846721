"""Structural rules: operations that do not change the value."""

import torch
from torch.fx import Node

from collage_fx.passes.rules.registry import Builder, Expanded, rule

aten, prims = torch.ops.aten, torch.ops.prims


@rule(prims.convert_element_type.default, aten.clone.default)
def keep(b: Builder, node: Node, x: Expanded, at: int) -> Expanded:
    """An expansion keeps its dtype through conversions: it is as precise as what they widen to."""
    return x


STRUCTURE = {aten.clone.default, aten.stack.default, aten.cat.default}
