"""A graph as code that reads like the optimizer: a statement for each line that the user wrote."""

import string
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, groupby
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
    """Whether it is where the value gets its name."""


Piece: TypeAlias = str | Span


@dataclass
class Group:
    """Statements that stem from one line of the user's."""

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
    """What a graph, or a part of one, is to be written with."""

    nodes: Sequence[Node]
    """Operations, in an order in which they can run."""
    inputs: dict[Node, str]
    """Their names."""
    results: dict[Node, str]
    """The name of the state that a value is stored in, or of the result that it is."""
    prefix: str
    """Of the numbers of values."""
    pick: Pick = lambda node, operand: operand
    """Of a list of operands of a node that of the member which is shown."""
    source: Callable[[Node], Source | None] = lambda n: source_of(n.meta.get("stack_trace"))
    names: Callable[[Node], str] = lambda n: ""
    """What else a value may be called."""
    brief: bool = True
    """Whether what one line of the user's does is put into one statement."""


def write(text: Text) -> Column:
    """Return a graph as code."""
    return _Writer(text).column()


@dataclass
class _Writer:
    text: Text
    forms: dict[Node, Form] = field(default_factory=dict)
    operands: dict[Node, list[Node]] = field(default_factory=dict)
    users: dict[Node, list[Node]] = field(default_factory=dict)
    inlined: set[Node] = field(default_factory=set)
    parts: dict[Node, list[Node]] = field(default_factory=dict)
    """Operation with several results -> these."""

    def column(self) -> Column:
        self._read()
        self._inline()
        roots = [n for n in self.forms if n not in self.inlined]
        names = self._names(roots)
        ids = self._ids()
        lines = [(self.text.source(n), self._statement(n, names, ids)) for n in roots]
        groups = [Group(s, [one for _, one in g]) for s, g in groupby(lines, lambda x: x[0])]
        parts = (p for ps in self.parts.values() for p in ps)
        return Column(groups, ids, names, {*self.text.inputs, *self.forms, *parts})

    def _resolve(self, node: Node) -> Node:
        """Return the value that a node passes on, itself if it makes one."""
        while node not in self.text.inputs:
            passed = stands_for(node, self.text.pick, exact=not self.text.brief)
            if passed is None:
                return node
            node = passed
        return node

    def _read(self) -> None:
        """Find out how each operation is written and who uses what."""
        for node in self.text.nodes:
            if self._resolve(node) is not node:
                continue
            if name_of(node) == "getitem":
                of: Any = node.args[0]
                self.parts.setdefault(of, []).append(node)
                continue
            self.forms[node] = form_of(node, self.text.pick)
            self.operands[node] = []
            for operand in _nodes_in(self.forms[node].operands):
                self._use(operand, node)
        self.results: dict[Node, str] = {}
        for node, name in self.text.results.items():
            self.results.setdefault(self._resolve(node), name)

    def _use(self, operand: Node, user: Node) -> None:
        operand = self._resolve(operand)
        self.operands[user].append(operand)
        self.users.setdefault(operand, []).append(user)

    def _inline(self) -> None:
        """Choose which operations are written within the one that takes their result."""
        length: dict[Node, int] = {}
        for node, form in self.forms.items():
            size = len(form.text) + 6 * len(form.operands)
            for o in self.operands[node]:
                if self._fits(o, node) and size + length[o] <= LONGEST:
                    self.inlined.add(o)
                    size += length[o]
            length[node] = size

    def _fits(self, inner: Node, outer: Node) -> bool:
        if inner not in self.forms or inner in self.results or inner in self.parts:
            return False
        if len(self.users[inner]) > 1:
            return False
        if self.text.brief:
            return self.text.source(inner) == self.text.source(outer)
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
        last |= dict.fromkeys(self.results, end)
        final = {self.text.source(n): n for n in roots}
        holders = {name: node for node, name in self.text.inputs.items()}
        names = dict(self.text.inputs)
        for at, root in enumerate(roots):
            for value in self.parts.get(root, [root]):
                free = (
                    name
                    for name in self._wishes(value, root, final)
                    if name not in holders or last.get(holders[name], -1) <= at
                )
                names[value] = next(free, "") or self._other_name(holders)
                holders[names[value]] = value
        return names

    def _other_name(self, taken: Iterable[str]) -> str:
        return next(name for i in count(1) if (name := f"t{i}") not in taken)

    def _wishes(self, value: Node, root: Node, final: dict[Source | None, Node]) -> Iterator[str]:
        """Yield names for a value, the best first."""
        if value in self.results:
            yield self.results[value]
            yield from (f"new_{self.results[value]}{i or ''}" for i in range(9))
        if other := self.text.names(value):
            yield other
        source = self.text.source(root)
        if source is not None and self.text.brief and value is root and final[source] is root:
            name = source.variable
            yield from (
                f"{name}{f'_{i}' * bool(i)}" for i in range(1 if source.in_place else 9) if name
            )

    def _ids(self) -> dict[Node, str]:
        """Number all values."""
        ids: dict[Node, str] = {}
        for node in [
            *self.text.inputs,
            *self.forms,
            *(p for ps in self.parts.values() for p in ps),
        ]:
            ids[node] = f"{self.text.prefix}{len(ids)}"
        passed = {n: self._resolve(n) for n in self.text.nodes if n not in ids}
        return ids | {n: ids[to] for n, to in passed.items() if to in ids}

    def _statement(
        self, root: Node, names: dict[Node, str], ids: dict[Node, str]
    ) -> tuple[Piece, ...]:
        made = self.parts.get(root, [root])
        left: list[Piece] = []
        for i, value in enumerate(made):
            left += [", "] * bool(i) + [Span(ids[value], (names[value],), defines=True)]
        right = self._expression(root, names, ids)
        whole = (Span(ids[root], right),) if root in self.parts else right
        return (*left, " = ", *whole)

    def _expression(
        self, node: Node, names: dict[Node, str], ids: dict[Node, str]
    ) -> tuple[Piece, ...]:
        form = self.forms[node]
        pieces: list[Piece] = []
        for literal, at, _, _ in string.Formatter().parse(form.text):
            pieces += [literal] if literal else []
            if at is not None:
                needs = form.needs[int(at)] if form.needs else 0
                pieces += self._operand(form.operands[int(at)], needs, names, ids)
        return tuple(pieces)

    def _operand(
        self, operand: Any, needs: int, names: dict[Node, str], ids: dict[Node, str]
    ) -> list[Piece]:
        if isinstance(operand, list | tuple):
            pieces: list[Piece] = []
            for i, o in enumerate(operand):
                pieces += [", "] if i else []
                pieces += self._operand(o, 0, names, ids)
            return ["[", *pieces, "]"]
        if not isinstance(operand, Node):
            text = number(operand)
            return [f"({text})" if text.startswith("-") and needs > SIGN else text]
        value = self._resolve(operand)
        if value not in self.inlined:
            name = names.get(value, value.name)
            return [Span(ids[value], (name,)) if value in ids else name]
        span = Span(ids[value], self._expression(value, names, ids))
        loose = self.forms[value].binding < min(needs, ATOM)
        return ["(", span, ")"] if loose else [span]


def _nodes_in(operands: Iterable[Any]) -> Iterator[Node]:
    """Yield the nodes among operands, those in lists too."""
    for operand in operands:
        if isinstance(operand, Node):
            yield operand
        elif isinstance(operand, list | tuple):
            yield from _nodes_in(operand)
