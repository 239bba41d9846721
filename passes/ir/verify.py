"""The specification of the graph between passes, checked after each of them."""

from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from collage_fx.passes.ir.graph_memory import base_of, mutations
from collage_fx.passes.ir.program import (
    CONVERT,
    LOW_PRECISION,
    Program,
    Rewritten,
    graph_of,
    is_tensor,
    value_of,
)
from collage_fx.runtime.errors import LegalityError
from collage_fx.runtime.ops import collage

aten = torch.ops.aten


def verify(program: Program, after: str) -> None:
    """Raise LegalityError if the program is not what the pass named after promises."""
    _CHECKS[after](program)


def _demand(holds: bool, what: str) -> None:
    if not holds:
        raise LegalityError(f"{what}; please report this with the output of collage_fx.explain")


def _captured(program: Program) -> None:
    """A carried state is a tensor input that the graph overwrites, and none is forgotten."""
    placeholders = program.source.graph.find_nodes(op="placeholder")
    found = [placeholders[c.index] for c in program.carried]
    _demand(set(found) == set(mutations(program.source.graph)), "a carried state was not captured")
    _demand(len(found) == len(set(found)), "a carried state was captured twice")


def _canonical(program: Program) -> None:
    """No sum rounds twice; inputs, states and results are those of the source."""
    source, graph = program.source.graph, graph_of(program.canonical).graph
    for node in graph.nodes:
        scaled = node.target in (aten.add.Tensor, aten.sub.Tensor) and node.kwargs
        if scaled:  # to write a node down takes longer than to look at it
            _demand(False, f"{node.format_node()} rounds twice")
    names = [[n.name for n in g.find_nodes(op="placeholder")] for g in (source, graph)]
    _demand(names[0] == names[1], "an input was lost")
    written = [sorted(n.name for n in mutations(g)) for g in (source, graph)]
    _demand(written[0] == written[1], "a state is not overwritten any more")
    _stored(source, graph)
    _returned(source, graph)


def _stored(source: Graph, graph: Graph) -> None:
    """Stored values have the dtype that they have in the source, or that of the state."""
    before = {state.name: new for state, new in mutations(source).items()}
    for state, new in mutations(graph).items():
        dtypes = value_of(before[state.name]).dtype, value_of(state).dtype
        _demand(value_of(new).dtype in dtypes, f"what is stored in {state} has another dtype")


def _returned(source: Graph, graph: Graph) -> None:
    """A result has the dtype that it has in the source, and shares no more memory than there."""
    olds: Any = source.output_node().args[0]
    news: Any = graph.output_node().args[0]
    _demand(len(olds) == len(news), "a result was lost")
    stands_for: dict[Node, Node] = {}
    for old, new in zip(olds, news, strict=True):
        if is_tensor(old):
            _demand(value_of(old).dtype == value_of(new).dtype, f"result {old} has another dtype")
            memory, base = (base_of(n, items=False) for n in (new, old))
            alone = stands_for.setdefault(memory, base) is base
            _demand(alone, f"result {old} shares the memory of another")


def _recurrences(program: Program) -> None:
    """Each state of a class has a recurrence, whose path lies in the representative."""
    for group in program.classes:
        part = group.representative
        _demand(len(group.recurrences) == len(part.states), "a state has no recurrence")
        inside = set(part.nodes)
        paths = (n for r in group.recurrences for n in r.carried_path)
        _demand(all(n in inside for n in paths), "a carried path leaves its slice")


def _escaped(program: Program) -> None:
    """States that are read with their high word only are inputs that the graph does not write."""
    written = {c.index for c in program.carried}
    _demand(not written & set(program.reads), "a state that is written counts as only read")


def _slices(program: Program) -> None:
    """A node is in one slice, a state in at most one, and members of a class look alike."""
    members = [m for group in program.classes for m in group.members]
    nodes = [n for m in members for n in m.nodes]
    _demand(len(nodes) == len(set(nodes)), "two slices share a node")
    states = [c.index for m in members for c, _, _ in m.states]
    _demand(len(states) == len(set(states)), "two slices share a carried state")
    for group in program.classes:
        shape = {(len(m.inputs), len(m.outputs), len(m.states)) for m in group.members}
        _demand(len(shape) == 1, "members of a class differ in inputs, outputs or states")


def _plan(program: Program) -> None:
    """Each carried state has one verdict with a reason, and those compensated are rewritten."""
    planned = [s.index for s in program.plan]
    expected = [c.index for own in program.carried for c in program.alike(own)]
    _demand(sorted(planned) == sorted(expected), "a carried state has no verdict")
    _demand(all(s.reason for s in program.plan), "a verdict has no reason")
    compensated = {s.index for s in program.plan if s.compensated}
    states = (part.states[i][0] for part, i in program.compensated())
    rewritten = {c.index for own in states for c in program.alike(own)}
    _demand(compensated == rewritten, "what is compensated by plan is not what is rewritten")


def _expanded(program: Program) -> None:
    for r in program.rewritten:
        _signature(r, r.expanded)


def _lowered(program: Program) -> None:
    """16-bit values are only converted: no operation on them is left to the compiler."""
    for r in program.rewritten:
        _signature(r, r.lowered)
        for node in graph_of(r.lowered).graph.nodes:
            low = node.op != "output" and node.meta["dtype"] in LOW_PRECISION
            if low and node.op == "placeholder":
                widened = all(u.op == "output" or u.target == CONVERT for u in node.users)
                _demand(widened, f"{node.name} is read without being widened")
            elif node.op == "call_function":
                text, target = node.format_node(), str(node.target)
                _demand(not low or node.target == CONVERT, f"{text} computes in 16 bits")
                stored = all(u.op == "output" for u in node.users)
                _demand(not low or stored, f"{text} is narrowed and then used")
                _demand("collage" not in target or "round" in target, f"{text} was not lowered")


def _signature(r: Rewritten, module: GraphModule | None) -> None:
    part, extra, graph = r.model, r.residual_count, graph_of(module).graph
    inputs = len(graph.find_nodes(op="placeholder"))
    _demand(
        inputs == len(part.inputs) + extra + 2 * bool(r.by_chance),
        "a rewritten slice has other inputs",
    )
    outputs: Any = graph.output_node().args[0]
    _demand(len(outputs) == len(part.outputs) + extra, "a rewritten slice has other outputs")


def _joined(program: Program) -> None:
    if program.result is not None:
        _emitted(program)


def _emitted(program: Program) -> None:
    """Every carried state is written exactly once, and so is every residual of one.

    Those of gradients, which a graph reads and zeroes, are cleared after it.
    """
    assert program.result is not None
    nodes = program.result.graph.nodes
    placeholders = [n for n in nodes if n.op == "placeholder"]
    written = [n.args[0] for n in nodes if n.target is aten.copy_.default]
    for node in nodes:
        if node.target is collage.multi_tensor.default:
            written += [a for a in node.args[0] if a.op == "placeholder"]
    # A graph that is called for each member writes one of them.
    own = program.carried if program.called else program.plan
    expected: list[Node] = [placeholders[c.index] for c in own]
    compensated = {s.index for s in program.plan if s.compensated}
    read = {c.index for c in program.residual_inputs if c.gradient} - compensated
    places = (program.residual_places.get(c.index, ()) for c in own if c.index not in read)
    expected += [placeholders[k] for found in places for k in found]
    _demand(sorted(map(str, written)) == sorted(map(str, expected)), "a write was lost or doubled")


_CHECKS = {
    "capture": _captured,
    "canonicalize": _canonical,
    "reductions": _canonical,
    "moves": _canonical,
    "recurrence": _recurrences,
    "escape": _escaped,
    "join": _joined,
    "slice_": _slices,
    "plan": _plan,
    "expand": _expanded,
    "lower": _lowered,
    "emit": _emitted,
}
