"""Values that meet an element chosen from them, of which only one of the two is rounded."""

from collections.abc import Iterator

import torch
from torch.fx import Node

from collage_fx.passes.analysis.affine import CHOOSING, DECIDING
from collage_fx.passes.frontend.reductions import is_largest
from collage_fx.passes.frontend.slice import elementwise
from collage_fx.passes.ir.graph_memory import closure
from collage_fx.passes.ir.program import (
    LOW_PRECISION,
    Program,
    Rewritten,
    graph_of,
    is_tensor,
    value_of,
)
from collage_fx.passes.rules.structural import STRUCTURE
from collage_fx.runtime.storage.registry import transforms

aten = torch.ops.aten
_CHOOSING = frozenset(
    (
        *("amax", "amin", "aminmax", "cummax", "cummin", "kthvalue", "max", "median", "min"),
        *("mode", "nanmedian", "sort", "topk"),
    )
)
"""Operations that return some of the numbers that they are given."""
_COMPARING = (DECIDING | CHOOSING) | {aten.div.Tensor, aten.sub.Tensor, aten.rsub.Scalar}
_INVERTING = (aten.div.Tensor, aten.reciprocal.default, aten.rsqrt.default)
_KEPT = (STRUCTURE - {aten.where.self}) | {aten.abs.default, aten.neg.default}
"""What may be done to a value before, and changes no digit of it."""


def chosen(program: Program) -> Iterator[str]:
    """Say which values are chosen from by their roundings, and meet the choice whole.

    What chooses, a largest element or a median, is in no slice: it reads rounded values. A slice
    has them unrounded: states and what is on their way to their new values, and in arithmetic
    `wide` everything. No element of a state need be its largest one then, and a quotient of a value
    and its largest element may be greater than 1, and a root of 1 less its square no number.
    """
    for rewritten in program.rewritten:
        for node in graph_of(program.canonical).graph.nodes:
            if _chooses(node) and (of := _met(node, _unrounded(program, rewritten))):
                yield f"{of} meets the result of {node.target}, which is of its rounding"


def _chooses(node: Node) -> bool:
    named = getattr(node.target, "_opname", "") in _CHOOSING and not elementwise(node)
    return named or is_largest(node)


def _unrounded(program: Program, rewritten: Rewritten) -> set[Node]:
    """Return the 16-bit values of a class that slices have unrounded, states included."""
    found: set[Node] = set()
    kept, model = rewritten.storages, rewritten.model
    known = all(transforms(model.states[i][0].val.dtype, s) for i, s in kept.items())
    wide = program.settings.arithmetic != "eft" or len(set(kept.values())) != 1 or not known
    path = {n for i in kept for n in rewritten.recurrences[i].carried_path}
    for part in rewritten.members:
        pairs = zip(model.nodes, part.nodes, strict=True)
        found |= {n for like, n in pairs if wide or like in path}
        found |= {part.old(i) for i in kept} | {part.states[i][2] for i in kept}
    return {n for n in found if is_tensor(n) and value_of(n).dtype in LOW_PRECISION}


def _met(choice: Node, unrounded: set[Node]) -> Node | None:
    """Return the value that is chosen from and meets the choice by another way; None if none."""
    before = closure(
        choice, lambda n: n.all_input_nodes if n is choice or n.target in _KEPT else ()
    )
    after = closure(choice, lambda n: n.users)
    for value in before & unrounded:
        beside = closure(value, lambda n: (u for u in n.users if u is not choice))
        if any(_compares(n, after - beside, beside) for n in after & beside):
            return value
    return None


def _compares(node: Node, after: set[Node], beside: set[Node]) -> bool:
    """Tell whether a node compares, divides or subtracts what comes of a choice alone and what
    comes of the value beside it.

    A product, as with 1 less a share of the largest element, is none but for a quotient's.
    """
    operands = node.all_input_nodes
    chosen = [a for a in operands if a in after]
    if not (chosen and elementwise(node) and any(a in beside for a in operands)):
        return False
    if node.target in _COMPARING:
        return True
    way = closure(chosen[0], lambda n: (a for a in n.all_input_nodes if a in after))
    return any(n.target in _INVERTING for n in way)
