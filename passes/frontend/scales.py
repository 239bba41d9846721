"""Numbers of 16 bits that scale larger tensors."""

import operator

import torch
from torch import Tensor
from torch.fx import Node

from collage_fx.passes.frontend.slice import elementwise
from collage_fx.passes.ir.program import CASTS, is_tensor, value_of
from collage_fx.runtime.expansion.eft import SIXTEEN_BITS

COPY = torch.ops.aten.copy_.default


def tensors_of(node: Node) -> tuple[Tensor, ...]:
    """Return the tensors that a node stands for."""
    val = node.meta.get("val")
    vals = val if isinstance(val, list | tuple) else (val,)
    return tuple(v for v in vals if isinstance(v, Tensor))


def is_16_bit(node: Node) -> bool:
    """Tell whether a node stands for tensors, all of 16 bits."""
    vals = tensors_of(node)
    return bool(vals) and all(v.dtype in SIXTEEN_BITS for v in vals)


def is_scalar(node: Node) -> bool:
    """Tell whether a node is a 0-d tensor."""
    return is_tensor(node) and value_of(node).dim() == 0


def makes_scale(node: Node) -> bool:
    """Tell whether larger tensors read a number that is computed of this one, which is given.

    A state that is written is in a slice, where nothing is rounded.
    """
    seen, scalars = set[Node](), [node]
    while scalars:
        for user in scalars.pop().users:
            if user.target is COPY:
                if user.args[0] is node:
                    return False
            elif user not in seen and elementwise(user) and is_scalar(user):
                seen.add(user)
                scalars.append(user)
    return any(is_tensor(u) and not is_scalar(u) for n in seen for u in n.users)


def is_one_of_many(node: Node) -> bool:
    """Tell whether a node is a number that is chosen, or computed, of larger tensors."""
    if not is_scalar(node) or elementwise(node) or node.target in CASTS:
        return False
    source = node.all_input_nodes[0] if node.target is operator.getitem else node
    of = [t for a in source.all_input_nodes for t in tensors_of(a)]
    return any(t.dim() and t.dtype in SIXTEEN_BITS for t in of)
