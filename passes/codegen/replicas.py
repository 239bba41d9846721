"""The members that `deduplicate` left out, as operands of what updates whole classes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.fx import Graph, Node

from collage_fx.passes.ir.program import Copies, Program, Slice, Unlike, value_of
from collage_fx.runtime.ops import collage


@dataclass
class Other:
    """A member that was left out."""

    instead: dict[Node, Node]
    """Input of the member that stayed -> what this one has in its place."""
    like: Tensor
    """A tensor of the shape and strides of all its tensors that are not 0-d."""

    def operands(self, nodes: Sequence[Node]) -> list[Node]:
        """Return what this member has in the places of these nodes.

        What it has in common with the member that stayed are inputs, and 0-d tensors: these are
        computed from nothing that only one member has, which `narrow` made sure of.

        Raises Unlike for anything else.
        """
        if any(n not in self.instead and n.op != "placeholder" and _full(n) for n in nodes):
            raise Unlike("a member takes what is computed elsewhere")
        return [self.instead.get(n, n) for n in nodes]

    def written(self, nodes: Sequence[Node]) -> list[Node]:
        """Return what this member overwrites in the places of these nodes.

        Raises Unlike for what it has in common with others.
        """
        if any(n not in self.instead for n in nodes):
            raise Unlike("members overwrite the same")
        return [self.instead[n] for n in nodes]


class Others:
    """All of them, on their way into the graph that `emit` makes."""

    def __init__(self, program: Program, graph: Graph) -> None:
        self.program = program
        self.graph = graph
        self.copies: dict[Node, Copies] = {}
        """What only a member takes that stands for others, before `emit` -> what it stands for."""
        self.inputs: dict[Copies, list[Other]] = {}
        self.made: dict[Node, list[Node]] = {}
        """What such a member makes, before `emit` -> what the others make."""

    def add_inputs(self, env: dict[Node, Node]) -> None:
        """Append the inputs of the members.

        Args:
            env: placeholder before `emit` -> after it.
        """
        placeholders = list(env)
        for copies in self.program.copies:
            stayed = [placeholders[i] for i in copies.inputs]
            mine = (n for k, n in enumerate(stayed) if k not in copies.shared)
            self.copies |= dict.fromkeys(mine, copies)
            self.inputs[copies] = []
            for carried in copies.others:
                instead = {}
                for node, c in zip(stayed, carried, strict=True):
                    name = f"{node.name}_other{c.index}"
                    new = instead[env[node]] = self.graph.placeholder(name)
                    new.meta["val"] = c.val
                full = next(c.val for c in carried if c.val.dim())
                self.inputs[copies].append(Other(instead, full))

    def of(self, member: Slice) -> list[Other]:
        """Return the members that this one stands for."""
        found = {self.copies[n] for n in member.inputs if n in self.copies}
        if len(found) > 1:
            raise Unlike("members that have nothing in common are updated together")
        return [Other(dict(o.instead), o.like) for copies in found for o in self.inputs[copies]]

    def taken_alone(self, member: Slice) -> set[Node] | None:
        """Return, before `emit`, what only this member takes; None if it stands for no others."""
        found = {self.copies[n] for n in member.inputs if n in self.copies}
        return {n for n, copies in self.copies.items() if copies in found} if found else None

    def add_results(self, output: Node) -> None:
        """Append what the members make to the results.

        Args:
            output: that of the graph before `emit`.
        """
        new = self.graph.output_node()
        results: Any = list(new.args[0])  # type: ignore[arg-type]
        place: Any = {n: k for k, n in enumerate(output.args[0])}  # type: ignore[arg-type]
        for node, made in self.made.items():
            if node in place:
                first = len(results)
                self.program.member_results[place[node]] = list(range(first, first + len(made)))
                results += made
        new.args = (tuple(results),)

    def check(self) -> None:
        """Raise Unlike unless all that is done to the members that stayed is done to the others."""
        placeholders = list(self.graph.find_nodes(op="placeholder"))
        for copies in self.program.copies:
            for k, index in enumerate(copies.inputs):
                users = placeholders[index].users if k not in copies.shared else ()
                if any(user.target is not collage.multi_tensor.default for user in users):
                    raise Unlike("a member is updated by itself")


def _full(node: Node) -> bool:
    return node.meta.get("val") is not None and value_of(node).dim() > 0
