"""Structural rules: operations that move values and do not change them. All are exact."""

from typing import Any

import torch

from collage_fx.passes.ir.program import CONVERT
from collage_fx.passes.rules.builder import Builder, Call, Components, Expanded, rule
from collage_fx.passes.rules.join_split import mapped

aten = torch.ops.aten

_KEEPING = (CONVERT, aten.clone.default)
_MOVING = (
    aten.alias.default,
    aten.contiguous.default,
    aten.detach.default,
    aten.diagonal.default,
    aten.expand.default,
    aten.flip.default,
    aten.gather.default,
    aten.index.Tensor,
    aten.index_select.default,
    aten.permute.default,
    aten.repeat.default,
    aten.reshape.default,
    aten.roll.default,
    aten.select.int,
    aten.slice.Tensor,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.t.default,
    aten.transpose.int,
    aten.unsqueeze.default,
    aten.view.default,
    aten._unsafe_view.default,
    torch.ops.prims.rev.default,
)
_GATHERING = (aten.cat.default, aten.stack.default)
STRUCTURE = frozenset((*_KEEPING, *_MOVING, *_GATHERING, aten.where.self))
"""The operations that act on each component by itself, without rounding."""


@rule(*_KEEPING)
def keep(b: Builder, node: Call, x: Expanded, at: int) -> Expanded:
    """An expansion keeps its dtype through conversions: it is as precise as what they widen to."""
    return x


@rule(*_MOVING)
def move(b: Builder, node: Call, x: Expanded, at: int) -> Expanded:
    """The same elements of each component; exact."""
    return tuple(
        b.again(node, [c if i == at else mapped(b.plain, a) for i, a in enumerate(node.args)], kind)
        for c, kind in ((c, c.meta["dtype"]) for c in b.settle(x))
    )


@rule(*_GATHERING)
def gather(b: Builder, node: Call, x: Expanded, at: int) -> Expanded:
    """Tensors put together: all high words, and all low words of one place; exact."""
    parts = [as_expansion(b, a) for a in node.args[at]]
    return tuple(
        b.again(node, [list(words), *node.args[at + 1 :]], b.dtype)
        for words in zip(*parts, strict=True)
    )


@rule(aten.where.self)
def where(b: Builder, node: Call, x: Expanded, at: int) -> Expanded:
    """Each component chosen by the same condition; exact but for a wide alternative's split."""
    condition, *sides = node.args
    pairs = [b.settle(x) if i + 1 == at else as_expansion(b, a) for i, a in enumerate(sides)]
    return tuple(
        b.op(aten.where.self, b.plain(condition), *values, dtype=b.dtype)
        for values in zip(*pairs, strict=True)
    )


def as_expansion(b: Builder, operand: Any) -> Components:
    """Return an operand as an expansion: a plain one of the storage dtype has low words of zero,
    a wider one is split."""
    found = b.expansion(operand)
    if found is not None:
        return found
    plain = b.plain(operand)
    if plain.meta["dtype"] == b.dtype:
        zero = b.op(aten.zeros_like.default, plain, dtype=b.dtype)
        return plain, *[zero] * (b.count - 1)
    return b.split(plain)
