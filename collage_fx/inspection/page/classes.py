"""A class of slices on the page: three columns of code and its kernels, their values linked."""

from typing import Any

from torch.fx import GraphModule, Node

from collage_fx.inspection.page.kernels import kernels_of
from collage_fx.inspection.page.member import Member, short_names
from collage_fx.inspection.page.operations import stands_for
from collage_fx.inspection.page.readable import Column, Text
from collage_fx.inspection.page.sources import Source, source_of
from collage_fx.passes.ir.graph_memory import ORIGIN
from collage_fx.passes.ir.program import Program, Rewritten, graph_of


class ClassView:
    """The view of a class on the page."""

    def __init__(self, rewritten: Rewritten, program: Program, code: str, number: int) -> None:
        """Write its graphs and kernels, and link their values.

        Args:
            rewritten: the class, lowered.
            program: the one that it is in.
            code: Inductor's of that program.
            number: of the class on the page.
        """
        self.number = number
        self.rewritten = rewritten
        self.member = member = Member(rewritten, program)
        self._source = {n.name: n for n in program.source.graph.nodes}
        self._canonical = {n.name: n for n in graph_of(program.canonical).graph.nodes}
        self._expanded = {n.name: n for n in graph_of(rewritten.expanded).graph.nodes}
        ends = ((self._in_source(n), n) for n in self._expanded.values())
        self._last = {origin: n for origin, n in ends if origin is not None}
        """Source node -> the last node of the expanded graph that stems from it."""
        text = Text(member.nodes, member.inputs, member.results, f"{number}b", pick=member.pick)
        self.before = text.column()
        self.expanded = self._written_expanded()
        self.lowered = self._written_lowered()
        self.kernels = kernels_of(rewritten, program, code, f"{number}")
        self.stems: dict[str, list[str]] = {}
        """Value -> the values of the graph before that it stems from."""
        self._link_expanded()
        self._link_lowered()

    @property
    def title(self) -> str:
        """Number of members, with the states of one."""
        names, count = short_names(self.rewritten), self.rewritten.count
        states = sorted((not c.state_name.is_param, at) for c, at, _ in self.rewritten.model.states)
        listed = ", ".join(names[at] for _, at in states)
        return f"{count} {'member' if count == 1 else 'members'}: {listed}"

    @property
    def columns(self) -> list[tuple[str, str, Column]]:
        """The graphs with a title and what is to be said of them."""
        return [
            ("Before", "as it was traced, of one member", self.before),
            ("Expanded", "on high and low words: the reference", self.expanded),
            ("Lowered", "fp32, with every rounding written out", self.lowered),
        ]

    def _in_source(self, node: Node) -> Node | None:
        """Return the source node that a node of the expanded graph stems from."""
        between = self._canonical.get(node.meta.get(ORIGIN, ""))
        if between is None:
            return None
        return self._source.get(between.meta.get(ORIGIN, between.name))

    def _in_expanded(self, node: Node) -> Node | None:
        """Return the node of the expanded graph that one of the lowered graph stems from."""
        return self._expanded.get(node.meta.get(ORIGIN, ""))

    def _name_before(self, node: Node) -> str:
        """Return the name in the graph before, if this is what that value has become."""
        origin = self._in_source(node)
        if origin is None or self._last.get(origin) is not node:
            return ""
        return self.before.names.get(origin, "")

    def _written_expanded(self) -> Column:
        inputs: dict[Node, str] = {}
        states = {at for _, at, _ in self.rewritten.model.states}
        count = len(self.rewritten.model.inputs)
        nodes = graph_of(self.rewritten.expanded).graph.find_nodes(op="placeholder")
        for at, node in enumerate(nodes):
            origin = self._in_source(node)
            generic = at < count and at not in states
            known = self.before.names.get(origin, "") if origin is not None else ""
            taken = known in inputs.values()
            inputs[node] = known if generic and known and not taken else node.name
        prefix = f"{self.number}e"
        return self._written(self.rewritten.expanded, inputs, prefix, name=self._name_before)

    def _written_lowered(self) -> Column:
        def source(node: Node) -> Source | None:
            origin = self._in_expanded(node)
            return None if origin is None else source_of(origin.meta.get("stack_trace"))

        inputs = {
            node: self.expanded.names.get(self._expanded.get(node.name, node), node.name)
            for node in graph_of(self.rewritten.lowered).graph.find_nodes(op="placeholder")
        }
        prefix = f"{self.number}l"
        return self._written(self.rewritten.lowered, inputs, prefix, source=source, brief=False)

    def _written(
        self, module: GraphModule | None, inputs: dict[Node, str], prefix: str, **how: Any
    ) -> Column:
        """Return the expanded or the lowered graph as code; its results are named as stored."""
        rewritten, model = self.rewritten, self.rewritten.model
        places = [n.name for n in graph_of(rewritten.expanded).graph.find_nodes(op="placeholder")]
        stored = {new: places[at] for _, at, new in model.states}
        names = [stored.get(node, "result") for node in model.outputs]
        names += places[len(model.inputs) :][: rewritten.residual_count]
        graph = graph_of(module).graph
        nodes = [n for n in graph.nodes if n.op == "call_function"]
        outputs: tuple[Node, ...] = graph.output_node().args[0]  # type: ignore[assignment]
        results = dict(zip(outputs, names, strict=True))
        return Text(nodes, inputs, results, prefix, **how).column()

    def _add(self, value: str, stem: str) -> None:
        known = self.stems.setdefault(value, [])
        if stem not in known:
            known.append(stem)

    def _link_expanded(self) -> None:
        """Link the expanded graph to the one before."""
        before, expanded = self.before.ids, self.expanded.ids
        kept: set[str] = set()
        for node in self._expanded.values():
            origin = self._in_source(node)
            if node in self.expanded.made and origin in before:
                self._add(expanded[node], before[origin])
                kept.add(before[origin])
        # What is put together with what takes it, as lerp is: it goes where that goes.
        for node in reversed(self.member.nodes):
            mine = before.get(node, "")
            if mine and mine not in kept and stands_for(node, self.member.pick) is None:
                users = [u for u in node.users if before.get(u, mine) != mine]
                for value, stems in list(self.stems.items()):
                    if any(before[u] in stems for u in users):
                        self._add(value, mine)

    def _link_lowered(self) -> None:
        """Link the lowered graph to the expanded one, and the words of kernels to it."""
        lowered, expanded = self.lowered.ids, self.expanded.ids
        for node in graph_of(self.rewritten.lowered).graph.nodes:
            origin = self._in_expanded(node)
            if node in lowered and origin in expanded:
                self._add(lowered[node], expanded[origin])
        for kernel in self.kernels:
            for value, nodes in kernel.values.items():
                for node in nodes:
                    if node in lowered:
                        self._add(value, lowered[node])
