"""Run the sweeps of a rewritten graph without Inductor's wrapper around them.

Inductor's own time grows with the number of inputs of a graph, and a step of a thousand parameters
has ten thousand. What is a sweep needs nothing of it: its kernel is compiled once, for any number
of members. Inductor gets what is left, which is often nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx._lazy_graph_module import _LazyGraphModule

from collage_fx.passes.program import value_of
from collage_fx.passes.sweep import run_sweep
from collage_fx.runtime.ops import collage

aten = torch.ops.aten


@dataclass
class Call:
    """One sweep: where the operands of `run_sweep` are among the values of a run."""

    operands: list[list[int]]
    key: str

    def run(self, values: list[Any]) -> None:
        """Update all members."""
        written, read, vectors = ([values[i] for i in at] for at in self.operands)
        run_sweep(written, read, vectors, self.key)


@dataclass
class Direct:
    """A rewritten graph as what Inductor compiles of it, and the sweeps after that."""

    rest: GraphModule | None
    """Takes some of the graph's inputs; returns the graph's results, then what the sweeps need.
    None if nothing is left for Inductor."""
    inputs: list[int]
    """Which of the graph's inputs it takes."""
    results: int
    """How many results the graph has."""
    vectors: list[tuple[int, torch.dtype, torch.device]]
    """The memory that sweeps need: its size in elements, dtype and device."""
    calls: list[Call]
    """Their operands are numbered: the graph's inputs, the vectors, what `rest` makes for them."""

    def bind(self, rest: Callable[[list[Any]], Any] | None) -> Callable[[list[Any]], Any]:
        """Return the boxed callable of the whole graph.

        Args:
            rest: the boxed callable of `rest`.
        """

        def run(args: list[Any]) -> Any:
            values = list(args)
            args.clear()
            made = [None] * self.results
            if rest is not None:
                made = list(rest([values[i] for i in self.inputs]))
            for size, dtype, device in self.vectors:
                values.append(torch.empty(size, dtype=dtype, device=device))
            values += made[self.results :]
            for call in self.calls:
                call.run(values)
            return made[: self.results]

        run._boxed_call = True  # type: ignore[attr-defined]
        return run


def split(gm: GraphModule) -> Direct | None:
    """Take the sweeps out of a rewritten graph; None if there are none, or they cannot be last."""
    placeholders = list(gm.graph.find_nodes(op="placeholder"))
    sweeps = [n for n in gm.graph.nodes if n.target is collage.sweep.default]
    operands = {a for n in sweeps for a in n.all_input_nodes}
    copied = {n.args[0] for n in gm.graph.nodes if n.target is aten.copy_.default}
    if not sweeps or operands & copied:
        return None  # a sweep reads the old value of a state that the rest overwrites
    memory = [
        n for n in operands if n.target is aten.empty.memory_format and set(n.users) <= set(sweeps)
    ]
    made = [n for n in operands if n.op != "placeholder" and n not in memory]
    number = {n: i for i, n in enumerate([*placeholders, *memory, *made])}
    rest, inputs = _rest(gm, placeholders, {*sweeps, *memory}, made)
    results: Any = gm.graph.output_node().args[0]
    return Direct(
        rest,
        inputs,
        len(results),
        [(v.numel(), v.dtype, v.device) for v in map(value_of, memory)],
        [_call(n, number) for n in sweeps],
    )


def _call(sweep: Node, number: dict[Node, int]) -> Call:
    *operands, key = sweep.args
    return Call([[number[n] for n in nodes] for nodes in operands], str(key))  # type: ignore[union-attr, index]


def _rest(
    gm: GraphModule, placeholders: list[Node], without: set[Node], made: list[Node]
) -> tuple[GraphModule | None, list[int]]:
    """Return what is left of a graph, with more results, and which of its inputs that takes."""
    output = gm.graph.output_node()
    kept = [n for n in gm.graph.nodes if n.op != "output" and n not in without]
    used = {a for n in [*kept, output] for a in n.all_input_nodes}
    graph = Graph()
    env: dict[Node, Node] = {}
    for node in kept:
        if node.op != "placeholder" or node in used:
            env[node] = graph.node_copy(node, lambda n: env[n])
    results: Any = output.args[0]
    graph.output((*torch.fx.node.map_arg(results, lambda n: env[n]), *(env[n] for n in made)))
    graph.output_node().meta = dict(output.meta)
    if not env:
        return None, []
    return _LazyGraphModule(gm, graph), [i for i, n in enumerate(placeholders) if n in env]
