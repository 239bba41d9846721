"""Numbers of 16 bits that scale larger tensors."""

import operator

from torch import Tensor
from torch.fx import Node

from collage_fx.passes.frontend.slice import elementwise
from collage_fx.passes.ir.program import CASTS, is_scalar, is_tensor
from collage_fx.runtime.expansion.eft import SIXTEEN_BITS


def tensors_of(node: Node) -> tuple[Tensor, ...]:
    """Return the tensors that a node stands for."""
    val = node.meta.get("val")
    vals = val if isinstance(val, list | tuple) else (val,)
    return tuple(v for v in vals if isinstance(v, Tensor))


def is_16_bit(node: Node) -> bool:
    """Tell whether a node stands for tensors, all of 16 bits."""
    vals = tensors_of(node)
    return bool(vals) and all(v.dtype in SIXTEEN_BITS for v in vals)


def makes_scale(node: Node) -> bool:
    """Tell whether larger tensors read a number that is computed of a number in 16 bits."""
    seen, scalars = set[Node](), [node]
    while scalars:
        users = [u for u in scalars.pop().users if elementwise(u) and is_scalar(u)]
        scalars += (u for u in users if u not in seen)
        seen.update(users)
    return any(is_tensor(u) and not is_scalar(u) for n in seen for u in n.users)


def is_one_of_many(node: Node) -> bool:
    """Tell whether a node is a number that is chosen, or computed, of larger tensors."""
    if not is_scalar(node) or elementwise(node) or node.target in CASTS:
        return False
    source = node.all_input_nodes[0] if node.target is operator.getitem else node
    of = [t for a in source.all_input_nodes for t in tensors_of(a)]
    return any(t.dim() and t.dtype in SIXTEEN_BITS for t in of)
