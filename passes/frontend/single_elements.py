"""Operations on single elements: reductions that return their operand, and scales of tensors."""

import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from collage_fx.passes.frontend.slice import elementwise
from collage_fx.passes.ir.graph_memory import OpOverload
from collage_fx.passes.ir.program import CASTS, is_scalar, is_tensor, value_of
from collage_fx.runtime.expansion.eft import SIXTEEN_BITS

_REDUCING = frozenset(
    ("amax", "amin", "aminmax", "max", "mean", "median", "min", "nanmedian", "prod", "sum")
)
_ALONG = frozenset(
    (
        *("cummax", "cummin", "cumprod", "cumsum", "kthvalue", "max", "median", "min", "mode"),
        *("nanmedian", "sort", "topk"),
    )
)
"""Operations along one dimension; most return indices too."""
_VIEWS = frozenset(
    (
        *("alias", "expand", "flip", "permute", "reshape", "rev", "roll", "select", "slice"),
        *("squeeze", "t", "transpose", "unsqueeze", "view", "_unsafe_view"),
    )
)


def returns_operand(node: Node) -> bool:
    """Return True if the elements of a floating-point result are those of its operand, by sizes.

    The largest of one element is this element, and so are its median and its sum; a reduction along
    dimensions of size 1 has one element each to take.
    """
    op = node.target
    source = node.args[0] if isinstance(op, OpOverload) and node.args else None
    if not (isinstance(op, OpOverload) and isinstance(source, Node) and is_tensor(source)):
        return False
    tensors = [a for a in op._schema.arguments if "Tensor" in str(a.type)]
    result = next(iter(tensors_of(node)), None)
    if len(tensors) != 1 or result is None or not value_of(source).is_floating_point():
        return False
    before, after = _count(value_of(source)), _count(result)
    name, dim = op._opname, _argument(node, "dim")
    if before is None or before != after or not result.is_floating_point():
        return False
    if not value_of(source).is_contiguous():  # then the result is no view of it
        return False
    if name in _VIEWS:
        return before == 1 and result.dtype == value_of(source).dtype
    if name in _ALONG and isinstance(dim, int):
        return not value_of(source).dim() or value_of(source).shape[dim] == 1
    return name in _REDUCING


def combines_single_elements(node: Node) -> bool:
    """Return True if a node is an elementwise operation on tensors of one element and one dtype."""
    if not is_tensor(node) or torch.Tag.pointwise not in getattr(node.target, "tags", ()):
        return False
    operands = node.all_input_nodes
    dtypes = {value_of(a).dtype for a in operands if is_tensor(a)}
    return len(dtypes) == 1 and all(map(is_tensor, operands)) and _count(value_of(node)) == 1


def _count(val: Tensor) -> int | None:
    """Return the number of elements; None if it is symbolic."""
    return val.numel() if all(isinstance(s, int) for s in val.shape) else None


def _argument(node: Node, name: str) -> Any:
    """Return an argument of an operation by its name in the schema, or its default."""
    assert isinstance(node.target, OpOverload)
    for i, argument in enumerate(node.target._schema.arguments):
        if argument.name == name:
            given = node.args[i] if i < len(node.args) else node.kwargs.get(name)
            return argument.default_value if given is None else given
    return None


def tensors_of(node: Node) -> tuple[Tensor, ...]:
    """Return the tensors that a node stands for."""
    val = node.meta.get("val")
    vals = val if isinstance(val, list | tuple) else (val,)
    return tuple(v for v in vals if isinstance(v, Tensor))


def is_16_bit(node: Node) -> bool:
    """Return True if a node stands for tensors, all of 16 bits."""
    vals = tensors_of(node)
    return bool(vals) and all(v.dtype in SIXTEEN_BITS for v in vals)


def makes_scale(node: Node) -> bool:
    """Return True if larger tensors read a number that is computed of a number in 16 bits."""
    seen, scalars = set[Node](), [node]
    while scalars:
        users = [u for u in scalars.pop().users if elementwise(u) and is_scalar(u)]
        scalars += (u for u in users if u not in seen)
        seen.update(users)
    return any(is_tensor(u) and not is_scalar(u) for n in seen for u in n.users)


def is_one_of_many(node: Node) -> bool:
    """Return True if a node is a number that is chosen, or computed, of larger tensors."""
    if not is_scalar(node) or elementwise(node) or node.target in CASTS:
        return False
    source = node.all_input_nodes[0] if node.target is operator.getitem else node
    of = [t for a in source.all_input_nodes for t in tensors_of(a)]
    return any(t.dim() and t.dtype in SIXTEEN_BITS for t in of)
