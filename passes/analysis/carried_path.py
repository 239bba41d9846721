"""Carried path of a state through its slice, and what of the state comes by other ways: whether
eft arithmetic loses that."""

from collections.abc import Container, Iterable, Mapping
from itertools import pairwise
from math import inf, isfinite
from typing import Any

import torch
from torch.fx import Node

from collage_fx.passes.analysis.affine import ADDING, FREE, Form, bound, transfer
from collage_fx.passes.ir.graph_memory import WIDENED, mutations
from collage_fx.passes.ir.program import (
    CASTS,
    LOW_PRECISION,
    Coefficient,
    Program,
    Rewritten,
    Slice,
    graph_of,
    is_tensor,
    value_of,
)
from collage_fx.runtime.storage.registry import EXPANSIONS, transforms

aten = torch.ops.aten

_SCALING = {aten.mul.Tensor, aten.div.Tensor}


def walk(nodes: Iterable[Node], x: Node) -> dict[Node, Form]:
    """Return the form in x of every one of these nodes, in graph order, that depends on it."""
    forms: dict[Node, Form] = {x: Form(1)}
    for node in nodes:
        if any(a in forms for a in node.all_input_nodes):
            form = transfer(node, forms)
            if form.depends:
                forms[node] = form
    return forms


def carried_path(part: Slice, x: Node, new: Node, forms: Mapping[Node, Form]) -> tuple[Node, ...]:
    """Return the carried path: backwards from the new value, the way by which most of x comes.

    Of equal or unknown ways that is the shortest. The others (weight decay added to the gradient,
    say) are part of B.
    """
    distance = {x: 0}
    for node in part.nodes:
        near = [distance[a] for a in node.all_input_nodes if a in distance and a in forms]
        if near and node in forms:
            distance[node] = 1 + min(near)
    path: list[Node] = []
    node = new
    while node is not x:
        path.append(node)
        node = min(
            (a for a in node.all_input_nodes if a in distance),
            key=lambda a: (
                *(not forms[a].carries, forms[a].a == 0),
                *(-_share(node, a, forms[a]), distance[a]),
            ),
        )
    return tuple(path[::-1])


def _share(node: Node, operand: Node, form: Form) -> float:
    """Return at most how much of x a node has through this operand; 0 if that is not known."""
    share = bound(transfer(node, {operand: form}).a)
    return share if isfinite(share) else 0.0


def beside(part: Slice, x: Node, path: tuple[Node, ...], forms: Mapping[Node, Form]) -> float:
    """Return at most how much of x comes to the end of the path otherwise than along it.

    What is taken off again on the way counts too, if it has been rounded in between. 1 if x meets
    itself on the path in other than a sum; infinity if that is not known.
    """
    if _tangled(x, path, forms):
        return 1.0
    rounded = _rounded(part, path, forms)
    last = forms[path[-1]]
    off = bound(last.a - _along(x, path)) if last.a != 0 else 0.0
    # What each term that is a selection and is added on the path may have of x.
    terms = (term for _, others in _others(x, path, forms) for term in others)
    chosen = (bound(branch.a) for term in terms for branch in forms[term].branches)
    return max(off, rounded, *chosen, 0.0)


def _rounded(part: Slice, path: tuple[Node, ...], forms: Mapping[Node, Form]) -> float:
    """Return at most how much of x one 16-bit value beside the path brings to its end.

    In x + (x - (x - d)) / 2 the difference has none of x, but the rounding of x - d, which is 0 in
    place of d.
    """
    nodes = part.nodes[: part.nodes.index(path[-1]) + 1]
    beside_path = (n for n in nodes if n in forms and n not in path)
    low = (n for n in beside_path if value_of(n).dtype in LOW_PRECISION and bound(forms[n].share))
    return max((_brought(nodes, n, path[-1], forms) for n in low), default=0.0)


def _brought(nodes: list[Node], value: Node, end: Node, forms: Mapping[Node, Form]) -> float:
    """Return at most how much of x a value brings to the end; infinity if that is not known.

    Where the end is not linear in x, as Adam's is for a decay that enters a gradient, that is
    nothing, unless x is taken off again on the way.
    """
    after, share = walk(nodes, value), bound(forms[value].share)
    found = after.get(end, FREE)
    left = ((forms.get(n, FREE), share * bound(form.share)) for n, form in after.items())
    less = any(f.b != "nonlinear" and bound(f.share) < most / 2 for f, most in left)
    if not found.depends or not (less or _is_linear(forms[end])):
        return 0.0
    if _is_linear(found) or found.branches:
        return share * bound(found.share)
    return inf if less else 0.0


def _is_linear(form: Form) -> bool:
    return form.b in ("zero", "free")


def _along(x: Node, path: tuple[Node, ...]) -> Coefficient:
    """Return the coefficient of x along the path alone."""
    form = Form(1)
    for previous, node in pairwise((x, *path)):
        form = Form(transfer(node, {previous: form}).share)
    return form.a


def _others(
    x: Node, path: tuple[Node, ...], forms: Mapping[Node, Form]
) -> list[tuple[Node, list[Node]]]:
    """Return each node of the path with its operands that are not on it, but depend on x."""
    return [
        (node, [a for a in node.all_input_nodes if a is not previous and a in forms])
        for previous, node in pairwise((x, *path))
        if node.args.count(previous) == 1
    ]


def _tangled(x: Node, path: tuple[Node, ...], forms: Mapping[Node, Form]) -> bool:
    """Return True if x meets itself on the path in other than a sum, or is scaled by a tensor.

    A condition that x decides does not count: it has nothing of its value.
    """
    if any(
        node.target not in ADDING and any(forms[a].carries for a in others)
        for node, others in _others(x, path, forms)
    ):
        return True
    return any(
        node.target in _SCALING and any(_computed(a, x) for a in node.args[:2] if a is not previous)
        for previous, node in pairwise((x, *path))
    )


def _computed(operand: Any, x: Node) -> bool:
    """Return True if operand is a 16-bit tensor of the step's own making, such as exp(-lr * g).

    It may have been rounded to one on the way, so eft would multiply by nothing. One that is made
    of reductions has not; but what else is scaled by it, in an average say, would be rounded.
    """
    if not isinstance(operand, Node) or operand.op == "placeholder" or operand is x:
        return False
    if WIDENED in operand.meta:
        return True
    near = operand.target in CASTS and isinstance(operand.args[0], Node)
    return value_of(operand).dtype in LOW_PRECISION or (near and _computed(operand.args[0], x))


def stored_wider(program: Program) -> set[Node]:
    """Return the values that the graph stores in more than 16 bits."""
    stored = filter(is_tensor, mutations(graph_of(program.canonical).graph).values())
    return {n for n in stored if value_of(n).dtype not in LOW_PRECISION}


def eft_storage(
    program: Program, rewritten: Rewritten, wider: Container[Node]
) -> tuple[str | None, str]:
    """Return how the compensated states of a class are laid out, if its arithmetic is eft; else
    None, and what would be lost by eft, where that is why.

    Args:
        program: whose arithmetic is asked for.
        rewritten: the class.
        wider: see `stored_wider`. On a carried path it would be rounded to the words of that path:
            fp32 weights, say, that a parameter enters and then takes over.
    """
    kept, states = rewritten.storages.items(), rewritten.model.states
    known = all(transforms(states[i][0].val.dtype, s) for i, s in kept)
    storage, *others = {s for _, s in kept}
    if program.settings.arithmetic != "eft" or others or not known:
        return None, ""
    paths = (rewritten.recurrences[i].carried_path for i in rewritten.storages)
    if any(node in wider for path in paths for node in path):
        return None, "a slice that stores in fp32 what a state passes through"
    if _has_side_way(rewritten, EXPANSIONS[storage]):
        return None, "a slice in which a state enters an update beside the carried path"
    return storage, ""


def _has_side_way(rewritten: Rewritten, count: int) -> bool:
    """Return True if a state comes into a compensated update beside the carried path, with weight.

    There eft rounds what it computes of the state to its dtype and would lose u * side of it; up to
    a side of 4u that is within the bounds of two components, as the weight decay that SGD adds to a
    gradient is, and up to 4u^2 within those of three.
    """
    return any(
        abs(rewritten.recurrences[i].side)
        > 4 * (torch.finfo(value_of(rewritten.model.old(i)).dtype).eps / 2) ** (count - 1)
        for i in rewritten.storages
    )
