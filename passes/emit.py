"""Pass 8: stamp the lowered slices out for every member, with residuals as inputs."""

import contextlib
from typing import Any

import torch
from collage_fx.passes.program import Program, Rewritten, Slice, graph_of, value_of
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

aten = torch.ops.aten


def emit(program: Program) -> None:
    """Make the graph that Inductor compiles.

    The residual of each compensated state is an input after the graph's own inputs, and is
    overwritten at the end like the states themselves::

        copy_ = aten.copy_.default(arg0_1, hi)        # as before
        copy__1 = aten.copy_.default(arg0_1_lo, lo)   # new

    Every node of a rewritten slice is replaced; nodes in no such slice are copied.
    """
    _Emitter(program).run()


class _Emitter:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.canonical = graph_of(program.canonical)
        self.graph = Graph()
        self.env: dict[Node, Node] = {}
        self.stamps: dict[Node, _Stamp] = {}
        """Every node of a rewritten slice -> the stamp of its member."""
        self.residual_new: list[tuple[Node, _Stamp, int]] = []

    def run(self) -> None:
        """Fill in `result` and `residual_inputs` of the program."""
        nodes = list(self.canonical.graph.nodes)
        placeholders = [n for n in nodes if n.op == "placeholder"]
        mode = next((m for n in placeholders if (m := _fake_mode(n))), contextlib.nullcontext())
        with mode:
            for node in placeholders:
                self._copy(node)
            for rewritten in self.program.rewritten:
                for member in rewritten.members:
                    self._member(rewritten, member)
            for node in nodes[len(placeholders) :]:
                self._take(node)
        self.graph.lint()
        self.program.result = GraphModule(self.canonical, self.graph)

    def _copy(self, node: Node) -> None:
        new = self.graph.node_copy(node, lambda n: self.env[n])
        self.env[node] = new

    def _member(self, rewritten: Rewritten, member: Slice) -> None:
        """Append the residual placeholders of a member and prepare its stamp."""
        residuals = []
        for i in rewritten.compensated:
            carried, at, _ = member.states[i]
            lo = self.graph.placeholder(f"{member.inputs[at].name}_lo")
            lo.meta["val"] = torch.zeros_like(carried.val)
            residuals.append(lo)
            self.program.residual_inputs.append(carried)
        stamp = _Stamp(self, graph_of(rewritten.lowered), member, residuals)
        self.stamps.update(dict.fromkeys(member.nodes, stamp))
        self.residual_new += [(lo, stamp, i) for i, lo in enumerate(residuals)]

    def _take(self, node: Node) -> None:
        stamp = self.stamps.get(node)
        if stamp is None:
            if node.op == "output":
                self._residual_copies()
            self._copy(node)
        elif node in stamp.outputs:
            # Its inputs precede it in the old graph, so they are in the new one by now.
            self.env[node] = stamp.output(stamp.outputs[node])

    def _residual_copies(self) -> None:
        for lo, stamp, i in self.residual_new:
            new = self.graph.call_function(
                aten.copy_.default, (lo, stamp.output(len(stamp.outputs) + i))
            )
            new.meta["val"] = lo.meta["val"]


class _Stamp:
    """The lowered graph of a class with the tensors of one member, appended output by output.

    Output by output, because a reduction outside the slice may lie between two of its outputs.
    """

    def __init__(
        self, emitter: _Emitter, lowered: GraphModule, member: Slice, residuals: list[Node]
    ) -> None:
        self.emitter = emitter
        self.member = member
        self.outputs = {node: i for i, node in enumerate(member.outputs)}
        self.results: tuple[Node, ...] = lowered.graph.output_node().args[0]  # type: ignore[assignment]
        self.sources: dict[Node, Node] = {}
        self.env: dict[Node, Node] = {}
        placeholders = lowered.graph.find_nodes(op="placeholder")
        for placeholder, node in zip(placeholders, member.inputs, strict=False):
            self.sources[placeholder] = node
        for placeholder, lo in zip(placeholders[len(member.inputs) :], residuals, strict=True):
            self.env[placeholder] = lo

    def output(self, i: int) -> Node:
        """Return the i-th result of the lowered graph, appending what it needs."""
        stack = [self.results[i]]
        while stack:
            node = stack[-1]
            missing = [a for a in node.all_input_nodes if not self._has(a)]
            if missing:
                stack += missing
                continue
            stack.pop()
            if not self._has(node):
                self._append(node)
        return self._get(self.results[i])

    def _has(self, node: Node) -> bool:
        return node in self.env or node in self.sources

    def _get(self, node: Node) -> Node:
        return self.env[node] if node in self.env else self.emitter.env[self.sources[node]]

    def _append(self, node: Node) -> None:
        new = self.emitter.graph.node_copy(node, self._get)
        new.meta = {"val": _result(node.meta["dtype"], [value_of(a) for a in new.all_input_nodes])}
        self.env[node] = new


def _result(dtype: torch.dtype, operands: list[Tensor]) -> Tensor:
    """Return a fake tensor of the shape that the operands broadcast to."""
    largest = max(operands, key=lambda t: t.dim())
    if any(t.dim() and t.shape != largest.shape for t in operands):
        shape: Any = torch.broadcast_shapes(*(t.shape for t in operands))
        return torch.empty(shape, dtype=dtype, device=largest.device)
    return torch.empty_strided(largest.shape, largest.stride(), dtype=dtype, device=largest.device)


def _fake_mode(node: Node) -> Any:
    return getattr(node.meta.get("val"), "fake_mode", None)
