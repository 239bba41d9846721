"""States of which a graph reads the high word, or the rounding, where that matters."""

import operator
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx import Graph, Node

from collage_fx.passes.analysis.affine import (
    ADDING,
    CHOOSING,
    DECIDING,
    MUCH,
    Form,
    bound,
    cancels,
    is_number,
    transfer,
)
from collage_fx.passes.analysis.carried_path import eft_storage, stored_wider
from collage_fx.passes.frontend.reductions import CONSTANTS, SUMS, is_largest
from collage_fx.passes.frontend.single_elements import is_16_bit
from collage_fx.passes.frontend.slice import elementwise
from collage_fx.passes.ir.graph_memory import closure, mutations, representatives
from collage_fx.passes.ir.program import (
    CONVERT,
    LOW_PRECISION,
    Carried,
    Program,
    Rewritten,
    graph_of,
    is_float,
    is_tensor,
    value_of,
)
from collage_fx.passes.rules.structural import STRUCTURE

aten = torch.ops.aten
_CHOOSING = frozenset(
    (
        *("amax", "amin", "aminmax", "cummax", "cummin", "cumprod", "cumsum", "kthvalue"),
        *("logcumsumexp", "max", "median", "min", "mode", "nanmedian", "sort", "topk"),
    )
)
"""Operations that return some of the numbers that they are given, the first at least."""
_PICKING = STRUCTURE | {
    aten.as_strided.default,
    aten.constant_pad_nd.default,
    aten.masked_select.default,
    aten.take.default,
    aten.unfold.default,
}
"""Operations that return elements by their places."""
_SUMS = SUMS - {aten._foreach_norm.Scalar, aten.prod.default, aten.prod.dim_int}
"""Reductions of which a share, a mean say, may leave little of the value that it is taken from."""
_DECIDING = DECIDING | CHOOSING
_COMPARING = _DECIDING | {
    aten.div.Tensor,
    aten.div.Tensor_mode,
    aten.floor_divide.default,
    aten.fmod.Tensor,
    aten.remainder.Tensor,
    aten.rsub.Scalar,
    aten.sub.Tensor,
}
_MASKING = frozenset((aten.mul.Tensor, aten.div.Tensor, *ADDING))
"""Operations that leave an element as it is where the other operand is a one, or a zero."""
_STATISTICS = frozenset(
    (
        *("var", "std", "var_mean", "std_mean", "linalg_vector_norm", "_foreach_norm"),
        *("_softmax", "_log_softmax", "logsumexp"),
    )
)
"""Operations of which no result is an element of the operand."""
_INVERTING = (aten.div.Tensor, aten.reciprocal.default, aten.rsqrt.default)
_KEPT = (STRUCTURE - {aten.where.self}) | {aten.abs.default, aten.neg.default, CONVERT}
"""Operations that change no digit of a value, on the way to a choice, or only round it."""
_REDUCING = _SUMS | {aten.prod.default, aten.prod.dim_int}


def entering(
    program: Program, states: dict[Node, Carried], place: dict[Node, set[Node]]
) -> Iterator[Node]:
    """Return the states whose missing low word has weight in the update of another state.

    A graph knows the low word of a state in the slice that updates it. What leaves that slice, or
    is read where the graph does not write the state, is the high word; by scaling, choosing,
    conversion, views it may get into the new value of a state y that is compensated, y' = a*y +
    b*x. The u*b*x that x is wrong by is little beside an update that x makes by itself (a momentum
    times a rate, a ratio of moments), and much where x takes y's place (b of a half or more) or
    the two nearly cancel, y' - y = (a-1)*y + b*x, as in an average of slow and fast weights. What
    is not linear in x, a norm or a root of a second moment, does not count. x may be y, part of
    which comes back through a view: by a factor that is not known it may be all of it.

    Args:
        program: the program, with its classes.
        states: the states that have a low word, or may get one, by their placeholders.
        place: of those that the graph compensates, the nodes of their slices.
    """
    targets: dict[Node, list[Node]] = {new: [] for new in _computed_anew(program)}
    for part, i in program.compensated():
        targets.setdefault(part.states[i][2], []).append(part.old(i))
    if not targets:
        return
    order = {node: i for i, node in enumerate(graph_of(program.canonical).graph.nodes)}
    for x in (x for x in states if _leaves(x, place)):
        high, whole = _forms(x, place.get(x, set()), order)
        for node in high.keys() & targets.keys():
            if x in targets[node] and bound(high[node].share) >= MUCH:
                yield x
                break
            forms = (whole if y is x else _forms(y, set(), order)[0] for y in targets[node])
            # What is computed anew has nothing of its own.
            own = (form.get(node, Form(0)) for form in (forms if targets[node] else [{}]))
            if any(_weighs(high[node], form) for form in own):
                yield x
                break


def _computed_anew(program: Program) -> Iterator[Node]:
    """Return the new values of parameters that keep nothing of their own, and are no sums."""
    graph = graph_of(program.canonical).graph
    inputs, stored = list(graph.find_nodes(op="placeholder")), mutations(graph)
    params = {c.index for c in program.carried if c.owner == "param"}
    for state in program.plan:
        if state.index in params and state.computed_anew and not state.compensated:
            yield stored[inputs[state.index]]


def _leaves(x: Node, place: dict[Node, set[Node]]) -> bool:
    """Return True if anything but its slice reads x, or what its slice makes."""
    inside = place.get(x, set())
    return any(_followed(u) and u not in inside for n in (x, *inside) for u in n.users)


def _forms(
    x: Node, inside: set[Node], order: dict[Node, int]
) -> tuple[dict[Node, Form], dict[Node, Form]]:
    """Return what nodes have of x by way of its high word, which leaves the slice it is inside of,
    and what they have of the whole value within.

    Without a slice, the first is all they have of x.
    """
    whole: dict[Node, Form] = {x: Form(1)}
    high: dict[Node, Form] = {}
    reached = closure(x, lambda n: filter(_followed, n.users)) - {x}
    for node in sorted(reached, key=order.__getitem__):
        if node in inside:
            _note(node, whole, whole)
        _note(node, high if node in inside else {**whole, **high}, high)
    return high, whole


def _note(node: Node, operands: dict[Node, Form], into: dict[Node, Form]) -> None:
    near = [a for a in node.all_input_nodes if a in operands]
    if near:
        moved = node.target in STRUCTURE and not elementwise(node)
        form = operands[near[0]] if moved else transfer(node, operands)
        if form.depends:
            into[node] = form


def _followed(node: Node) -> bool:
    """Return True if a node is computed element by element, or moves elements."""
    return node.target in STRUCTURE or elementwise(node)


def _weighs(term: Form, own: Form) -> bool:
    """Return True if the error of a term matters in a new value with this form in its old one."""
    return any(
        b != 0 and ((is_number(b) and abs(float(b)) >= MUCH) or cancels(b, a))
        for b in term.shares
        for a in own.shares
    )


def chosen(program: Program) -> Iterator[str]:
    """Yield the values that are chosen from by their roundings, and meet the choice whole.

    What chooses, a largest element or a median, is in no slice: it reads rounded values. A slice
    has them unrounded: states and what is on their way to their new values, and in arithmetic
    `wide` everything. No element of a state need be its largest one then, and a quotient of a value
    and its largest element may be greater than 1, and a root of 1 less its square no number. A sum
    is chosen of roundings likewise: a value less its mean is what remains of both. So is an element
    that is picked by its place, where the pick has another shape than the slice.
    """
    graph = graph_of(program.canonical).graph
    choices = [(n, True) for n in graph.nodes if _chooses(n) or _picks(n)]
    choices += [(n, False) for n in _compared(graph) if _may_pick(n)]
    sums = [n for n in graph.nodes if n.target in _SUMS and not _picks(n)]
    if not choices and not sums:
        return
    wider, alike = stored_wider(program), _alike(graph)
    for rewritten in program.rewritten:
        unrounded: dict[Node, list[set[Node]]] = defaultdict(list)
        for value, slices in _unrounded(program, rewritten, wider).items():
            unrounded[alike[value][0]] += slices
        found = [(node, _met(node, certain, unrounded, alike)) for node, certain in choices]
        found += [(node, _left_little(node, unrounded, alike)) for node in sums]
        for node, of in found:
            if of is not None:
                yield f"{of} meets the result of {node.target}, which is of its rounding"


def _alike(graph: Graph) -> dict[Node, list[Node]]:
    """Return node -> those that compute the same of the same, but for roundings, itself too."""
    same = representatives(
        graph,
        lambda node: elementwise(node) or node.target in STRUCTURE | CONSTANTS,
        lambda node: node.target is CONVERT and is_float(node) and is_float(node.args[0]),
    )
    groups: defaultdict[Node, list[Node]] = defaultdict(list)
    for node, one in same.items():
        groups[one].append(node)
    return {node: groups[one] for node, one in same.items()}


def _compared(graph: Graph) -> set[Node]:
    """Return the tensors that are compared with another one, and what they are computed of."""
    found: set[Node] = set()
    for node in reversed(graph.nodes):
        compares = node.target in _DECIDING and len(node.all_input_nodes) > 1
        if compares or any(user in found for user in node.users):
            found.add(node)
    return found


def _may_pick(node: Node) -> bool:
    """Return True if an operation may return elements as they are: a product with ones and zeros.

    What it is cannot be told of a mask that is computed, a scatter, a pool, a custom operator.
    """
    if node.target in _SUMS:
        before = _chosen_from(node, certain=False)
        return any(n.target in _MASKING or n.target is aten.where.self for n in before)
    return _is_opaque(node) or (node.target in _PICKING and not elementwise(node))


def _is_opaque(node: Node) -> bool:
    """Return True if elements of a result may be of any element of an operand, and equal to it."""
    name = getattr(node.target, "_opname", "")
    moves = node.op == "call_function" and not _is_of_each(node)
    return moves and name not in _STATISTICS


def _picks(node: Node) -> bool:
    """Return True if a node returns elements by their places: a masked sum may."""
    if node.target in _REDUCING:
        return any(n.target is aten.where.self or _mask(n) for n in _chosen_from(node))
    return node.target in _PICKING and not elementwise(node)


def _chooses(node: Node) -> bool:
    named = getattr(node.target, "_opname", "") in _CHOOSING and not elementwise(node)
    return named or is_largest(node)


def _mask(node: Node) -> list[Node]:
    """Return the operands of a product that are zeros and ones; none if it is no product."""
    operands = node.all_input_nodes if node.target is aten.mul.Tensor else []
    return [n for n in operands if _is_of_booleans(n)]


def _is_of_booleans(node: Node) -> bool:
    while node.target in _KEPT and len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
    return is_tensor(node) and value_of(node).dtype == torch.bool


def _chosen_from(choice: Node, *, certain: bool = True) -> set[Node]:
    """Return a choice and the nodes of which it may return an element.

    Args:
        choice: the operation.
        certain: whether it is known to return one, and each operation before it to change none. A
            product, a sum or a quotient may change none, where its other operand is a mask.
    """

    def operands(node: Node) -> Iterator[Any]:
        if node is choice or node.target in _KEPT | CHOOSING:
            yield from node.all_input_nodes
        elif node.target is aten.where.self:
            yield from (a for a in node.args[1:] if isinstance(a, Node))
        elif certain and (mask := _mask(node)):
            yield from set(node.all_input_nodes) - set(mask)
        elif not certain and (_is_opaque(node) or node.target in _MASKING | _SUMS):
            squares = node.target is aten.mul.Tensor and node.args[0] is node.args[1]
            yield from () if squares else node.all_input_nodes

    return closure(choice, operands)


def _unrounded(
    program: Program, rewritten: Rewritten, wider: set[Node]
) -> dict[Node, list[set[Node]]]:
    """Return the 16-bit values of a class that slices have unrounded, states included, each with
    the nodes of these slices.

    And what is rounded to one: of 0-d values each use has a rounding of its own, behind the use
    where that changes no digit.
    """
    unrounded: dict[Node, list[set[Node]]] = {}
    kept, model = rewritten.storages, rewritten.model
    eft, _ = eft_storage(program, rewritten, wider)
    path = {n for i in kept for n in rewritten.recurrences[i].carried_path}
    for part in rewritten.members:
        inside = set(part.nodes)
        pairs = zip(model.nodes, part.nodes, strict=True)
        found = {n for like, n in pairs if not eft or like in path}
        found |= {part.old(i) for i in kept} | {part.states[i][2] for i in kept}
        low = {n for n in found if is_tensor(n) and value_of(n).dtype in LOW_PRECISION}
        called = (n for found in map(_kept, low) for n in found if n.op == "call_function")
        for value in low.union(called):
            unrounded.setdefault(value, []).append(inside)
    return unrounded


def _met(
    choice: Node,
    certain: bool,
    unrounded: dict[Node, list[set[Node]]],
    alike: dict[Node, list[Node]],
) -> Node | None:
    """Return the value that is chosen from and meets the choice by another way; None if none.

    What is picked by its place it meets within a slice, which has not the rounding of the pick.

    Args:
        choice: the operation that chooses, picks or may pick.
        certain: whether it does; what only may pick the value meets by a comparison alone.
        unrounded: the values of a class that slices have unrounded, with the nodes of these slices.
        alike: node -> those that compute the same.
    """
    values = {alike[n][0] for n in _chosen_from(choice, certain=certain)} & unrounded.keys()
    if not values:
        return None
    picks = not _chooses(choice)
    # What is computed of several elements that are picked is none of them.
    after = closure(choice, lambda n: _after(n, certain=certain) if picks else n.users)
    for value in values:
        ways = _that_read_rounded(choice, unrounded[value]) if picks else [None]
        if any(_meets(alike[value], choice, after, inside, certain) for inside in ways):
            return value
    return None


def _after(pick: Node, *, certain: bool) -> Iterator[Node]:
    """Yield the users of a pick whose results may be elements that are picked.

    Args:
        pick: or what comes of one.
        certain: whether they are, each computed of one.
    """
    for user in pick.users:
        if _is_of_each(user) or (not certain and (_is_opaque(user) or user.target in _SUMS)):
            yield user


def _left_little(
    total: Node, unrounded: dict[Node, list[set[Node]]], alike: dict[Node, list[Node]]
) -> Node | None:
    """Return the value of which a share of its sum leaves little; None if none."""
    values = {alike[n][0] for n in _chosen_from(total)} & unrounded.keys()
    return next((v for v in values if any(_less_a_share(n, total) for n in alike[v])), None)


def _is_of_each(node: Node) -> bool:
    """Return True if each element of a result is computed of one of an operand."""
    return elementwise(node) or node.target in _PICKING or node.target is operator.getitem


def _that_read_rounded(pick: Node, slices: list[set[Node]]) -> list[set[Node] | None]:
    """Return the slices that read a rounding of what is picked: they leave out their own."""
    return [s for s in slices if is_16_bit(pick) or not s.issuperset(pick.users)]


def _is_wide(node: Node) -> bool:
    """Return True if a node is a tensor in fp32."""
    return is_tensor(node) and value_of(node).dtype == torch.float32


def _meets(
    values: list[Node],
    choice: Node,
    after: set[Node],
    inside: set[Node] | None,
    certain: bool,
) -> bool:
    """Return True if a value meets what comes of a choice: unrounded, if a slice is given.

    That is within the slice, and in fp32 on the way to it.

    Args:
        values: the nodes that have the value.
        choice: the operation that chooses.
        after: what comes of it.
        inside: the nodes of the slice.
        certain: whether it chooses; if not, comparisons alone count.
    """

    def others(node: Node) -> Iterator[Node]:
        for user in node.users:
            unrounded = inside is None or user in inside or _is_wide(user)
            if user is not choice and unrounded:
                yield user

    beside = {n for value in values for n in closure(value, others)}
    alone = after - beside
    # An element times another tensor is no element, from which nothing may remain.
    straight = alone if inside is None else alone & _straight(choice)
    met = {n for n in after & beside if certain or n.target in _DECIDING}
    if choice.target in _REDUCING:  # A share of a sum is no element, and no total is compared.
        met = {n for n in met if n.target in _COMPARING and n.target not in _INVERTING}
        beside = {n for n in beside if is_tensor(n) and value_of(n).numel() != 1} | set(values)
    elif inside is None:  # A sum of the value itself is of its rounding too.
        beside = _beside_sums(values, choice, others)
    return any(_compares(n, alone if n.target in _DECIDING else straight, beside) for n in met)


def _beside_sums(
    values: list[Node], choice: Node, others: Callable[[Node], Iterator[Node]]
) -> set[Node]:
    """Return what is computed of a value, but not by a sum that reads it as the choice does.

    Args:
        values: the nodes that have the value.
        choice: the operation that chooses.
        others: node -> the users that count.
    """
    read = _chosen_from(choice)

    def unsummed(node: Node) -> Iterator[Node]:
        is_rounded = is_16_bit(node) and not read.isdisjoint(_kept(node))
        return (u for u in others(node) if not (is_rounded and u.target in _SUMS))

    return {n for value in values for n in closure(value, unsummed)}


def _kept(node: Node) -> set[Node]:
    """Return a node and those before it that have its digits, or more of them."""
    return closure(node, lambda n: n.all_input_nodes if n.target in _KEPT else ())


def _straight(choice: Node) -> set[Node]:
    """Return the values computed of a choice, and of no other tensor."""
    return closure(choice, lambda n: (u for u in n.users if len(u.all_input_nodes) == 1))


def _less_a_share(value: Node, total: Node) -> bool:
    """Return True if a share of its sum, a mean say, is subtracted from a value, or added."""

    def alone(node: Node) -> set[Node]:
        return closure(
            node, lambda n: (u for u in n.users if u is not total and len(u.all_input_nodes) == 1)
        )

    values, shares = alone(value), alone(total)
    return any(
        user.target in ADDING and any(a in values for a in user.all_input_nodes)
        for share in shares
        for user in share.users
    )


def _compares(node: Node, after: set[Node], beside: set[Node]) -> bool:
    """Return True if a node compares, divides or subtracts what comes of a choice alone and what
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
    return any(n.target in _INVERTING and n.args[-1] in after for n in way)
