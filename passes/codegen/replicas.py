"""Members that `deduplicate` left out, as operands of what updates whole classes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.fx import Graph, Node

from collage_fx.passes.ir.program import Carried, Copies, Program, Slice, Unlike, value_of
from collage_fx.passes.rewrite.residual_inputs import add_members
from collage_fx.runtime.ops import collage


@dataclass
class LeftOutMember:
    """A member of a class that the graph of Dynamo was does not have; see `deduplicate`."""

    instead: dict[Node, Node]
    """Input of the member that stayed -> what this one has in its place."""
    like: Tensor
    """A tensor of the shape and strides of all its tensors that are not 0-d."""

    def operands(self, nodes: Sequence[Node]) -> list[Node]:
        """Return this member's nodes in the places of these."""
        return [self.instead.get(n, n) for n in nodes]

    def unlike(
        self, inputs: Sequence[Node], written: Sequence[int], read: Sequence[int]
    ) -> Unlike | None:
        """Return the reason why it has no kernel that writes and reads some of these nodes.

        What it may have in common with the member that stayed are inputs, and 0-d tensors: these
        are computed from nothing that only one member has, which `narrow` made sure of.
        """
        if any(inputs[i] not in self.instead for i in written):
            return Unlike("members overwrite the same")
        given = (inputs[i] for i in read if inputs[i] not in self.instead)
        if any(n.op != "placeholder" and _full(n) for n in given):
            return Unlike("a member takes what is computed elsewhere")
        return None


class LeftOutMembers:
    """All members that were left out, on their way into the graph that `emit` makes."""

    def __init__(self, program: Program, graph: Graph) -> None:
        self.program = program
        self.graph = graph
        self.copies: dict[Node, Copies] = {}
        """Input of a member that stands for others, before `emit` -> the `Copies` it stands for."""
        self.inputs: dict[Copies, list[LeftOutMember]] = {}
        self.made: dict[Node, list[Node]] = {}
        """Result of such a member, before `emit` -> the results of the others."""

    def add_inputs(self, env: dict[Node, Node]) -> None:
        """Append the inputs of the members.

        Args:
            env: placeholder before `emit` -> after it.
        """
        placeholders = list(env)
        added = iter(add_members(self.program, self.graph, placeholders))
        for copies in self.program.copies:
            stayed = [placeholders[i] for i in copies.inputs]
            mine = (n for k, n in enumerate(stayed) if k not in copies.shared)
            self.copies |= dict.fromkeys(mine, copies)
            self.inputs[copies] = []
            for carried in copies.others:
                instead = dict(zip(map(env.__getitem__, stayed), next(added), strict=True))
                full = next(c.val for c in carried if c.val.dim())
                self.inputs[copies].append(LeftOutMember(instead, full))

    def mixes(self, member: Slice) -> bool:
        """Return True if a member takes what belongs to several that stand for others; note it."""
        if len(self._copies_of(member)) < 2:
            return False
        self.note(Unlike("members that have nothing in common are updated together"))
        return True

    def note(self, unlike: Unlike | None) -> None:
        """Note the first reason found why a member cannot stand for others."""
        self.program.unlike = self.program.unlike or unlike

    def _copies_of(self, member: Slice) -> set[Copies]:
        return {self.copies[n] for n in member.inputs if n in self.copies}

    def of(self, member: Slice) -> list[LeftOutMember]:
        """Return the members that this one stands for."""
        found = self._copies_of(member)
        return [
            LeftOutMember(dict(o.instead), o.like) for copies in found for o in self.inputs[copies]
        ]

    def instead_of(self, index: int) -> list[Carried]:
        """Return the inputs that left-out members have in the place of one of its own."""
        for copies in self.program.copies:
            for k, i in enumerate(copies.inputs):
                if i == index and k not in copies.shared:
                    return [other[k] for other in copies.others]
        return []

    def taken_alone(self, member: Slice) -> set[Node] | None:
        """Return, before `emit`, what only this member takes; None if it stands for no others."""
        found = self._copies_of(member)
        return {n for n, copies in self.copies.items() if copies in found} if found else None

    def add_results(self, output: Node) -> None:
        """Append what the members make to the results.

        Args:
            output: that of the graph before `emit`.
        """
        if self.program.called:
            return
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
        """Note it if something is done to a member that stayed, but not to others."""
        placeholders = list(self.graph.find_nodes(op="placeholder"))
        for copies in self.program.copies if not self.program.called else ():
            for k, index in enumerate(copies.inputs):
                users = placeholders[index].users if k not in copies.shared else ()
                if any(user.target is not collage.multi_tensor.default for user in users):
                    self.note(Unlike("a member is updated by itself"))


def _full(node: Node) -> bool:
    return node.meta.get("val") is not None and value_of(node).dim() > 0
