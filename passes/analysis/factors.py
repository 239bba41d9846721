"""High words that scale a new value: sizes of terms, through sums, norms and products."""

import functools
import math
import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.fx import Node

from collage_fx.passes.analysis.affine import CHOOSING, DECIDING, LERP, MUCH
from collage_fx.passes.ir.graph_memory import MATRIX_SUMS, PUTS, draws
from collage_fx.passes.ir.program import (
    Carried,
    Program,
    Slice,
    graph_of,
    is_float,
    is_tensor,
    value_of,
)

aten = torch.ops.aten

NUMBER, OTHER, OWN = range(3)
"""The kinds of terms: numbers, rates, and sums or norms of weights; gradients, moments and all
else; and what has the state itself in it, times any of these."""
RATE = 0.06
"""The size of a number that may change from step to step, if it is not known to be larger now."""
LEAST = 2.0**-12
"""The least part of what a state follows that is told from none: one of n in a sum of products."""


@dataclass(frozen=True)
class Term:
    """All terms of one kind in a value: how large they are, and by which high words."""

    size: float
    """A state and a gradient have the size one, and so has a sum or norm of these."""
    high: float = 0.0
    """The size of the largest that is computed of high words."""
    of: frozenset[Node] = frozenset()
    """The states whose high words those are."""
    inverse: bool = False
    """True if it is one over weights, or a norm of them: what that is next to a number that is
    divided by it nobody knows. Weights that are held at a norm are near to it."""

    def plus(self, other: "Term", *, signed: bool) -> "Term":
        """Return the sum. Terms of unknown sign do not cancel."""
        size = self.size + other.size if signed else max(self.size, other.size, key=abs)
        return Term(size, max(self.high, other.high), self.of | other.of)

    def times(self, other: "Term") -> "Term":
        """Return the product, of which the error is that of the factor that is known worst."""
        high = max(self.high * abs(other.size), other.high * abs(self.size))
        made = Term(self.size * other.size, high, self.of | other.of)
        divided = (self.inverse and not other.of) or (other.inverse and not self.of)
        return made.grown() if divided and 0 < abs(made.size) < 1 else made

    def grown(self) -> "Term":
        """Return it as if it were of size one."""
        return Term(math.copysign(1.0, self.size), self.high / abs(self.size), self.of)


Terms: TypeAlias = dict[int, Term]
"""Kind -> its terms. Others are zero."""
Read: TypeAlias = Callable[[Node], Terms]


def _number(size: float) -> Terms:
    return {NUMBER: Term(size)}


def _whole(terms: Iterable[Term]) -> Term:
    """Return the sum of terms of several kinds."""
    return functools.reduce(lambda x, y: x.plus(y, signed=True), terms, Term(0.0))


def _sum(a: Terms, b: Terms) -> Terms:
    both = {k: a[k].plus(b[k], signed=k != OTHER) for k in a.keys() & b.keys()}
    return {**a, **b, **both}


def _product(a: Terms, b: Terms) -> Terms:
    """Return the product; of a gradient, say, and anything it is at most as large as that."""
    made: Terms = {}
    for i, x in a.items():
        for j, y in b.items():
            made = _sum(made, {max(i, j): x.times(y)})
    if OTHER in made and abs(made[OTHER].size) > 1:
        made |= {OTHER: made[OTHER].times(Term(1 / abs(made[OTHER].size)))}
    return made


def _inverse(a: Terms) -> Terms:
    """Return the inverse. It is known as exactly, and of the kind of the leading term."""
    whole = _whole(a.values())
    kind = OWN if OWN in a else max(a, key=lambda k: abs(a[k].size), default=NUMBER)
    known = whole.high / abs(whole.size) if whole.size else whole.high
    size = 1 / whole.size if whole.size and kind != OTHER else 1.0
    return {kind: Term(size, known * abs(size), whole.of, kind == NUMBER and known >= MUCH)}


def _exponential(a: Terms) -> Terms:
    """Return the exponential: of a small value x about 1 + x."""
    if OWN in a:
        whole = _whole(a.values())
        return {OWN: Term(1.0, whole.high, whole.of)}
    number = a.get(NUMBER, Term(0.0))
    size = math.exp(min(number.size, 10.0))
    return {**a, NUMBER: Term(size, number.high * size, number.of)}


def _one_of(values: list[Terms]) -> Terms:
    """Return terms for what may be any of these values."""
    made: Terms = {}
    for value in values:
        both = {k: made[k].plus(value[k], signed=False) for k in made.keys() & value.keys()}
        made = {**made, **value, **both}
    return made


def _computed(node: Node, read: Read) -> Terms:
    """Return the terms of what a node computes.

    Of one operand that is the operand, as are sums and norms of it; of several their product, as of
    matrices.
    """
    val, target = node.meta.get("val"), node.target
    item: Any = node.args
    if target is operator.getitem and "_foreach_" in str(item[0].target):
        rows = item[0].args[0]
        if item[1] < len(rows):  # of a check for infinities there is one more result
            return read(rows[item[1]])
    near = [read(a) for a in node.all_input_nodes]
    if target is aten.full.default:  # of integers too: -1 * rate is no rate
        return _operand(node.args[1], read)
    if target in DECIDING or (isinstance(val, torch.Tensor) and not val.is_floating_point()):
        return _number(1.0)
    if not near:
        return {OTHER: Term(1.0)} if draws(target) else _number(1.0)
    if target is aten.where.self:
        return _one_of(near[1:])
    if target in CHOOSING or target in _GATHERING:
        return _one_of(near)
    name = getattr(target, "_opname", "")
    if name in PUTS:
        return _one_of([read(a) for a in node.all_input_nodes if is_float(a)])
    if name in MATRIX_SUMS:
        share, rate = (_operand(node.kwargs.get(k, 1), read) for k in ("beta", "alpha"))
        added, *factors = (_operand(a, read) for a in node.args[:3])
        return _sum(_product(added, share), functools.reduce(_product, factors, rate))
    if target in _INVERSE or (target is aten.pow.Tensor_Scalar and _is_negative(node.args[1])):
        return _inverse(near[0])
    if target is aten.exp.default:
        return _exponential(near[0])
    arithmetic = _ARITHMETIC.get(target)
    if arithmetic is None:
        return functools.reduce(_product, near)
    operands = [_operand(a, read) for a in (*node.args, *node.kwargs.values())]
    return arithmetic(*operands)


def _operand(a: Any, read: Read) -> Terms:
    return read(a) if isinstance(a, Node) else _number(float(a))


def _is_negative(exponent: Any) -> bool:
    return isinstance(exponent, int | float) and exponent < 0


_MINUS = _number(-1.0)
_ONE = _number(1.0)
_GATHERING = (aten.cat.default, aten.stack.default)
_INVERSE = (aten.reciprocal.default, aten.rsqrt.default)
_ARITHMETIC: dict[Any, Callable[..., Terms]] = {
    aten.add.Tensor: lambda a, b, alpha=_ONE: _sum(a, _product(b, alpha)),
    aten.sub.Tensor: lambda a, b, alpha=_ONE: _sum(a, _product(_product(b, alpha), _MINUS)),
    aten.rsub.Scalar: lambda a, b: _sum(b, _product(a, _MINUS)),
    aten.mul.Tensor: _product,
    aten.div.Tensor: lambda a, b: _product(a, _inverse(b)),
    aten.neg.default: lambda a: _product(a, _MINUS),
} | dict.fromkeys(
    LERP, lambda a, b, w: _sum(_product(a, _sum(_ONE, _product(w, _MINUS))), _product(b, w))
)


def scaling(program: Program, states: dict[Node, Carried]) -> Iterator[Node]:
    """Return the states whose high word scales the new value of a state, its own one perhaps.

    In p * s / sum(p), or p * m / norm(p) with a state m for each row, the error u of a sum, of a
    largest element or of m is one of p, and in p - rate * norm(p) * g one of an update. So the size
    is found of all that high words enter and that is no update: of the state itself times
    something, of numbers, and of sums and norms of weights. It matters if it is half of the new
    value, or if it keeps the state near to a value that it gives: near 1 in 0.9 + 0.1 * s / sum(p).

    Args:
        program: the program, with its classes.
        states: the states that have a low word, or may get one, by their placeholders.
    """
    for grown in (False, True):
        walk = _Walk(program, states, grown=grown)
        for node in graph_of(program.canonical).graph.nodes:
            walk.take(node)
        for part, i in program.compensated():
            yield from walk.entering(part, i)
        if not (walk.sized and walk.reads):  # all would be the same
            return


def _weighty(new: Terms, *, grown: bool) -> frozenset[Node]:
    """Return the states whose high words have weight in a new value with these terms."""
    whole = _whole(x for k, x in new.items() if k != OTHER)
    much = whole.high >= MUCH or whole.high > 2 * abs(1 - whole.size)
    found = whole.of if whole.high and much else frozenset()
    return found if grown else found | _followed(new)


def _followed(new: Terms) -> frozenset[Node]:
    """Return the states whose high words make what the new value of a state follows.

    In w*p + (1 - w)*(A @ B) the second term is about as large as what w leaves of p, so that p
    is near to A @ B after some steps. An update by a rate has another size. What is computed of
    weights alone is none: p is near to whatever multiple of that.
    """
    left = 1 - new[OWN].size if OWN in new else 0.0
    weights = new.get(NUMBER, Term(0.0))
    if weights.high >= LEAST * left > 0:
        return weights.of
    follows = _whole(x for k, x in new.items() if k != OWN)
    near = 0.5 * left <= follows.size <= 2 * left
    return follows.of if near and follows.high >= 0.25 * left > 0 else frozenset()


def _size(now: float | None, *, grown: bool) -> float:
    """Return the size of a number that may change from step to step.

    Where it is small it is a rate, which may have grown to one by another step; where it is not it
    may be as it is, or as large as one.

    Args:
        now: what it is; None if that is not known.
        grown: whether a small number counts as grown to one, and a larger one as it is now.
    """
    sign = 1.0 if now is None else now
    if now is None or not abs(now) > RATE:
        return math.copysign(1.0 if grown else RATE, sign)
    return math.copysign(abs(now) if grown else max(abs(now), 1.0), sign)


class _Walk:
    """Walk once through a graph, and through slices again with one state as their own."""

    def __init__(self, program: Program, states: dict[Node, Carried], *, grown: bool) -> None:
        self.states = states
        self.number, self.grown = program.number, grown
        self.sized = False
        """True if the size of a number was assumed."""
        self.reads = False
        """True if a high word is read."""
        slices = [part for group in program.classes for part in group.members]
        self.place = {p.old(i): set(p.nodes) for p in slices for i in range(len(p.states))}
        """State -> the nodes of its slice."""
        self.values: dict[Node, Terms] = {}
        self.holds: dict[Node, frozenset[Node]] = {}
        """Node -> the states of whose whole values it is computed, and rounded at most to its own
        dtype."""

    def take(self, node: Node) -> None:
        """Note the terms of a node, with no state for its own."""
        self.holds[node] = frozenset({node} & self.states.keys())
        if node.op == "call_function":
            self.holds[node] = frozenset().union(
                *(self.holds[a] - self._lost(a, node) for a in node.all_input_nodes)
            )
            self.values[node] = _computed(node, lambda a: self._read(a, node))
        elif node in self.states:
            weight = self.states[node].owner == "param"
            self.values[node] = {NUMBER if weight else OTHER: Term(1.0)}
        else:
            real = is_float(node) and value_of(node).dim()
            self.sized |= not real
            size = 1.0 if real else _size(self.number(node), grown=self.grown)
            self.values[node] = {OTHER if real else NUMBER: Term(size)}

    def _lost(self, a: Node, node: Node) -> frozenset[Node]:
        """Return the states whose low word an operand of a node has not: they have that inside of
        their slices, and what is computed in a wider dtype."""
        held = self.holds[a]
        if not held or not is_tensor(a):
            return frozenset()
        size = value_of(a).dtype.itemsize
        return frozenset(
            x
            for x in held
            if size <= value_of(x).dtype.itemsize
            and not ((a is x or a in self.place.get(x, ())) and node in self.place.get(x, ()))
        )

    def _read(self, a: Node, node: Node) -> Terms:
        """Return the terms of an operand as a node sees it."""
        found, lost = dict(self.values[a]), self._lost(a, node)
        if not lost:
            return found
        self.reads = True
        return {k: Term(x.size, max(x.high, abs(x.size)), x.of | lost) for k, x in found.items()}

    def entering(self, part: Slice, i: int) -> frozenset[Node]:
        """Return the states whose high words have weight in the new value of a state.

        A value that has nothing of the state may be that of another one of the slice.
        """
        olds = [part.old(j) for j in range(len(part.states))]
        given = self._given(part, olds[i]).values()
        if not any(x.high for terms in given for x in terms.values()):
            return frozenset()
        own = self._new_value(part, i, olds[i])
        if OWN in own:
            return _weighty(own, grown=self.grown)
        others = (self._new_value(part, i, x) for x in olds if x is not olds[i])
        weighty = functools.partial(_weighty, grown=self.grown)
        return weighty(own).union(*map(weighty, others))

    def _new_value(self, part: Slice, i: int, own: Node) -> Terms:
        """Return the terms of the new value of a state, if a state of the slice is its own one."""
        given = self._given(part, own)
        olds = {part.old(j) for j in range(len(part.states))}
        inside = {x: {OWN if x is own else OTHER: Term(1.0)} for x in olds}

        def read(a: Node) -> Terms:
            return inside[a] if a in inside else given[a, node]

        for node in part.nodes:
            inside[node] = _computed(node, read)
        return inside[part.states[i][2]]

    def _given(self, part: Slice, y: Node) -> dict[tuple[Node, Node], Terms]:
        """Return the values that the nodes of a slice read from outside of it, by edge.

        A sum of the state itself is of its size, even if it is no weight.
        """
        inside = {*part.nodes, *(part.old(j) for j in range(len(part.states)))}
        given = {}
        for node in part.nodes:
            for a in (a for a in node.all_input_nodes if a not in inside):
                terms = self._read(a, node)
                if OTHER in terms and y in terms[OTHER].of:
                    terms = _sum({NUMBER: terms.pop(OTHER)}, terms)
                given[a, node] = terms
        return given
