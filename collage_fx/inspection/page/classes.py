"""A class of slices as three columns of code and its kernels, and which value is which in them."""

from dataclasses import dataclass

from torch.fx import Node

from collage_fx.inspection.page.kernels import Kernel, kernels_of
from collage_fx.inspection.page.member import Member, member_of, short_names
from collage_fx.inspection.page.operations import stands_for
from collage_fx.inspection.page.readable import Column, Text, write
from collage_fx.inspection.page.sources import Source, source_of
from collage_fx.passes.ir.graph_memory import ORIGIN
from collage_fx.passes.ir.program import Program, Rewritten, graph_of


@dataclass
class ClassView:
    """What the page shows of a class."""

    number: int
    rewritten: Rewritten
    before: Column
    expanded: Column
    lowered: Column
    kernels: list[Kernel]
    stems: dict[str, list[str]]
    """Value -> the values of the graph before that it stems from."""

    @property
    def title(self) -> str:
        """How many members, of which states."""
        names = sorted(filter(None, short_names(self.rewritten)), key=lambda n: n != "param")
        count = self.rewritten.count
        return f"{count} {'member' if count == 1 else 'members'}: {', '.join(names)}"

    @property
    def columns(self) -> list[tuple[str, str, Column]]:
        """The graphs with a title and what is to be said of them."""
        return [
            ("Before", "as it was traced, of one member", self.before),
            ("Expanded", "on high and low words: the reference", self.expanded),
            ("Lowered", "fp32, with every rounding written out", self.lowered),
        ]


def class_view(rewritten: Rewritten, program: Program, code: str, number: int) -> ClassView:
    """Return what the page shows of a class.

    Args:
        rewritten: the class, lowered.
        program: the one that it is in.
        code: Inductor's of that program.
        number: of the class on the page.
    """
    member = member_of(rewritten, program)
    picked = Text(member.nodes, member.inputs, member.results, f"{number}b", pick=member.pick)
    before = write(picked)
    origins = _Origins(rewritten, program, before)
    expanded = write(_expanded(rewritten, origins, f"{number}e"))
    lowered = write(_lowered(rewritten, expanded, f"{number}l"))
    kernels = kernels_of(rewritten, program, code, f"{number}")
    stems = _Stems(before, expanded, lowered)
    stems.of_expanded(origins, member)
    stems.of_lowered(rewritten)
    for kernel in kernels:
        stems.of_kernel(kernel)
    return ClassView(number, rewritten, before, expanded, lowered, kernels, stems.found)


class _Origins:
    """The source nodes that nodes of the expanded graph stem from."""

    def __init__(self, rewritten: Rewritten, program: Program, before: Column) -> None:
        self.source = {n.name: n for n in program.source.graph.nodes}
        self.canonical = {n.name: n for n in graph_of(program.canonical).graph.nodes}
        self.before = before
        self.expanded = graph_of(rewritten.expanded).graph
        self.last: dict[Node, Node] = {}
        """Source node -> the last that stems from it."""
        for node in self.expanded.nodes:
            if (origin := self.of(node)) is not None:
                self.last[origin] = node

    def of(self, node: Node) -> Node | None:
        """Return the source node that a node of the expanded graph stems from."""
        between = self.canonical.get(node.meta.get(ORIGIN, ""))
        return None if between is None else self.source.get(between.meta.get(ORIGIN, between.name))

    def name(self, node: Node) -> str:
        """Return what a value is called in the graph before, if this is what it has become."""
        origin = self.of(node)
        named = origin is not None and self.last.get(origin) is node
        return self.before.names.get(origin, "") if named and origin is not None else ""


def _results(rewritten: Rewritten) -> list[str]:
    """Return what the results of a class are stored in; empty of one that is no state."""
    names = [n.name for n in graph_of(rewritten.expanded).graph.find_nodes(op="placeholder")]
    model = rewritten.model
    stored = {new: names[at] for _, at, new in model.states}
    found = [stored.get(node, "") for node in model.outputs]
    return found + names[len(model.inputs) :][: rewritten.residual_count]


def _expanded(rewritten: Rewritten, origins: _Origins, prefix: str) -> Text:
    graph = graph_of(rewritten.expanded).graph
    inputs = {}
    taken: set[str] = set()
    for node in graph.find_nodes(op="placeholder"):
        origin, name = origins.of(node), node.name
        generic = name.startswith("in") and name[2:].isdigit()
        known = origins.before.names.get(origin, "") if origin is not None else ""
        inputs[node] = known if generic and known and known not in taken else name
        taken.add(inputs[node])
    nodes = [n for n in graph.nodes if n.op == "call_function"]
    outputs: tuple[Node, ...] = graph.output_node().args[0]  # type: ignore[assignment]
    results = dict(zip(outputs, (n or "result" for n in _results(rewritten)), strict=True))
    return Text(nodes, inputs, results, prefix, names=origins.name)


def _lowered(rewritten: Rewritten, expanded: Column, prefix: str) -> Text:
    graph = graph_of(rewritten.lowered).graph
    before = graph_of(rewritten.expanded).graph
    named = {n.name: n for n in before.nodes}

    def source(node: Node) -> Source | None:
        origin = named.get(node.meta.get(ORIGIN, ""))
        return None if origin is None else source_of(origin.meta.get("stack_trace"))

    inputs = {
        node: expanded.names.get(named[node.name], node.name) if node.name in named else node.name
        for node in graph.find_nodes(op="placeholder")
    }
    nodes = [n for n in graph.nodes if n.op == "call_function"]
    outputs: tuple[Node, ...] = graph.output_node().args[0]  # type: ignore[assignment]
    results = dict(zip(outputs, (n or "result" for n in _results(rewritten)), strict=True))
    return Text(nodes, inputs, results, prefix, source=source, brief=False)


class _Stems:
    """Collects which value stems from which."""

    def __init__(self, before: Column, expanded: Column, lowered: Column) -> None:
        self.before, self.expanded, self.lowered = before, expanded, lowered
        self.found: dict[str, list[str]] = {}

    def _add(self, value: str, stem: str) -> None:
        known = self.found.setdefault(value, [])
        if stem not in known:
            known.append(stem)

    def of_expanded(self, origins: _Origins, member: Member) -> None:
        """Link the expanded graph to the one before."""
        kept: set[str] = set()
        for node in origins.expanded.nodes:
            origin = origins.of(node)
            if node in self.expanded.made and origin in self.before.ids:
                self._add(self.expanded.ids[node], self.before.ids[origin])
                kept.add(self.before.ids[origin])
        # What is put together with what takes it, as lerp is: it goes where that goes.
        for node in reversed(member.nodes):
            mine = self.before.ids.get(node, "")
            if mine and mine not in kept and stands_for(node, member.pick) is None:
                users = [u for u in node.users if self.before.ids.get(u, mine) != mine]
                for value, stems in list(self.found.items()):
                    if any(self.before.ids[u] in stems for u in users):
                        self._add(value, mine)

    def of_lowered(self, rewritten: Rewritten) -> None:
        """Link the lowered graph to the expanded one."""
        named = {n.name: n for n in graph_of(rewritten.expanded).graph.nodes}
        for node in graph_of(rewritten.lowered).graph.nodes:
            origin = named.get(node.meta.get(ORIGIN, ""))
            if node in self.lowered.ids and origin in self.expanded.ids:
                self._add(self.lowered.ids[node], self.expanded.ids[origin])

    def of_kernel(self, kernel: Kernel) -> None:
        """Link the words of a kernel to the lowered graph."""
        for value, nodes in kernel.values.items():
            for node in nodes:
                if node in self.lowered.ids:
                    self._add(value, self.lowered.ids[node])
