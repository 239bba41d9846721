"""A graph as code that reads like the optimizer: a statement for each line that the user wrote."""

import string
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count, groupby
from typing import Any, TypeAlias

from torch.fx import Node

from collage_fx.inspection.page.operations import (
    ATOM,
    SIGN,
    Form,
    Pick,
    form_of,
    name_of,
    number,
    stands_for,
)
from collage_fx.inspection.page.sources import Source, source_of
from collage_fx.runtime.trees import tree_leaves

LONGEST = 84
"""Characters of a statement beyond which a part of it becomes a statement of its own."""
_CHOICES = frozenset({"where", "lt", "le", "gt", "ge", "eq", "ne", "abs"})
_ROUNDINGS = frozenset({"round", "convert_element_type"})


@dataclass(frozen=True)
class Span:
    """A piece of code that is a value of the graph."""

    value: str
    """The number by which the page knows it."""
    pieces: "tuple[Piece, ...]"
    defines: bool = False
    """True where the value gets its name."""


Piece: TypeAlias = str | Span


@dataclass
class Group:
    """Statements that stem from one line of the user's code."""

    source: Source | None
    statements: list[tuple[Piece, ...]]


@dataclass
class Column:
    """One graph as code."""

    groups: list[Group]
    ids: dict[Node, str]
    """The number of each value; of one that is merely passed on, that of the value it is."""
    names: dict[Node, str]
    """The name of each value that has one."""
    made: set[Node]
    """The values that are not merely passed on."""


@dataclass
class Text:
    """A graph, or a part of one, that is to be written."""

    nodes: Sequence[Node]
    """Operations, in an order in which they can run."""
    inputs: dict[Node, str]
    """Inputs -> their names."""
    results: dict[Node, str]
    """The name of the state that a value is stored in, or of the result that it is."""
    prefix: str
    """Prefix of the numbers of values."""
    pick: Pick = lambda node, operand: operand
    """Function that picks, of a list of operands of a node, the one of the member that is shown."""
    source: Callable[[Node], Source | None] = lambda n: source_of(n.meta.get("stack_trace"))
    name: Callable[[Node], str] = lambda n: ""
    """Function that returns another name of a value; empty if it has none."""
    brief: bool = True
    """True to put what one line of the user's code does into one statement."""

    def __post_init__(self) -> None:
        """Find out how each operation is written and who uses what."""
        self.forms: dict[Node, Form] = {}
        self.operands: dict[Node, list[Node]] = {}
        self.users: dict[Node, list[Node]] = {}
        self.parts: dict[Node, list[Node]] = {}
        """Operation with several results -> these."""
        for node in self.nodes:
            if self._resolve(node) is not node:
                continue
            if name_of(node) == "getitem":
                of: Any = node.args[0]
                self.parts.setdefault(of, []).append(node)
                continue
            self.forms[node] = form = form_of(node, self.pick)
            nodes = (o for o in tree_leaves(form.operands) if isinstance(o, Node))
            self.operands[node] = list(map(self._resolve, nodes))
            for operand in self.operands[node]:
                self.users.setdefault(operand, []).append(node)
        self.stored: dict[Node, str] = {}
        """Value that is not merely passed on -> its name among the results."""
        for node, name in self.results.items():
            self.stored.setdefault(self._resolve(node), name)

    def column(self) -> Column:
        """Return the graph as code."""
        self.inlined = self._inlined()
        roots = [n for n in self.forms if n not in self.inlined]
        self.names = self._names(roots)
        made = [*self.inputs, *self.forms, *chain.from_iterable(self.parts.values())]
        self.ids = {node: f"{self.prefix}{i}" for i, node in enumerate(made)}
        passed = {n: self._resolve(n) for n in self.nodes if n not in self.ids}
        self.ids |= {n: self.ids[to] for n, to in passed.items() if to in self.ids}
        lines = [(self.source(n), self._statement(n)) for n in roots]
        groups = [Group(s, [one for _, one in g]) for s, g in groupby(lines, lambda x: x[0])]
        return Column(groups, self.ids, self.names, set(made))

    def _resolve(self, node: Node) -> Node:
        """Return the value that a node passes on, itself if it makes one."""
        while node not in self.inputs:
            passed = stands_for(node, self.pick, exact=not self.brief)
            if passed is None:
                return node
            node = passed
        return node

    def _inlined(self) -> set[Node]:
        """Choose which operations are written within the one that takes their result."""
        found: set[Node] = set()
        length: dict[Node, int] = {}
        for node, form in self.forms.items():
            size = len(form.text) + 6 * len(form.operands)
            for o in self.operands[node]:
                if self._fits(o, node) and size + length[o] <= LONGEST:
                    found.add(o)
                    size += length[o]
            length[node] = size
        return found

    def _fits(self, inner: Node, outer: Node) -> bool:
        if inner not in self.forms or inner in self.stored or inner in self.parts:
            return False
        if len(self.users[inner]) > 1:
            return False
        if self.brief:
            return self.source(inner) == self.source(outer)
        name = name_of(outer)
        return name in _ROUNDINGS or (name in _CHOICES and name_of(inner) in _CHOICES - {"where"})

    def _root(self, node: Node) -> Node:
        """Return the statement in which a node is written."""
        while node in self.inlined:
            (node,) = self.users[node]
        return node

    def _names(self, roots: list[Node]) -> dict[Node, str]:
        """Name what statements make, as the user did where no two living values would clash."""
        place = {n: i for i, n in enumerate(roots)}
        end = len(roots)
        last = {
            n: max((place[self._root(u)] for u in users), default=-1)
            for n, users in self.users.items()
        }
        last |= dict.fromkeys(self.stored, end)
        final = {self.source(n): n for n in roots}
        holders = {name: node for node, name in self.inputs.items()}
        names = dict(self.inputs)
        for at, root in enumerate(roots):
            for value in self.parts.get(root, [root]):
                free = (
                    name
                    for name in self._wishes(value, root, final)
                    if name not in holders or last.get(holders[name], -1) <= at
                )
                others = (name for i in count(1) if (name := f"t{i}") not in holders)
                names[value] = next(free, "") or next(others)
                holders[names[value]] = value
        return names

    def _wishes(self, value: Node, root: Node, final: dict[Source | None, Node]) -> Iterator[str]:
        """Yield names for a value, the best first."""
        if value in self.stored:
            yield self.stored[value]
            yield from (f"new_{self.stored[value]}{i or ''}" for i in range(9))
        if other := self.name(value):
            yield other
        source = self.source(root)
        if source is not None and self.brief and value is root and final[source] is root:
            name = source.variable
            yield from (
                f"{name}{f'_{i}' * bool(i)}" for i in range(1 if source.in_place else 9) if name
            )

    def _statement(self, root: Node) -> tuple[Piece, ...]:
        left: list[Piece] = []
        for i, value in enumerate(self.parts.get(root, [root])):
            left += [", "] * bool(i) + [Span(self.ids[value], (self.names[value],), defines=True)]
        right = self._expression(root)
        whole = (Span(self.ids[root], right),) if root in self.parts else right
        return (*left, " = ", *whole)

    def _expression(self, node: Node) -> tuple[Piece, ...]:
        form = self.forms[node]
        pieces: list[Piece] = []
        for literal, at, _, _ in string.Formatter().parse(form.text):
            pieces += [literal] if literal else []
            if at is not None:
                needs = form.needs[int(at)] if form.needs else 0
                pieces += self._operand(form.operands[int(at)], needs)
        return tuple(pieces)

    def _operand(self, operand: Any, needs: int) -> list[Piece]:
        if isinstance(operand, list | tuple):
            pieces: list[Piece] = []
            for i, o in enumerate(operand):
                pieces += [", "] if i else []
                pieces += self._operand(o, 0)
            return ["[", *pieces, "]"]
        if not isinstance(operand, Node):
            text = number(operand)
            return [f"({text})" if text.startswith("-") and needs > SIGN else text]
        value = self._resolve(operand)
        if value not in self.inlined:
            name = self.names.get(value, value.name)
            return [Span(self.ids[value], (name,)) if value in self.ids else name]
        span = Span(self.ids[value], self._expression(value))
        loose = self.forms[value].binding < min(needs, ATOM)
        return ["(", span, ")"] if loose else [span]
