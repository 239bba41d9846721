"""From a graph of the first parameters of classes to one of all that they stand for."""

from typing import Any

from torch import Tensor
from torch.fx import Node

from collage_fx.compilation.graph_inputs import AbsentInput, Inputs
from collage_fx.passes.dedup.deduplicate import Group, Narrow, represented
from collage_fx.passes.ir.program import Settings, Unlike
from collage_fx.runtime.residuals.memory import empty_as
from collage_fx.runtime.storage.registry import compensable_dtypes
from collage_fx.stand_in.members import GRAD, Member


def narrowed(classes: list[list[Member]], settings: Settings, inputs: Inputs) -> Narrow | Unlike:
    """Return a graph of Dynamo's as the narrow graph of all that its parameters stand for.

    Or say why it does not do to all of them what it does to those that stand for them.

    Args:
        classes: those that are alike; the first of each is in the graph.
        settings: of the passes.
        inputs: those of the graph.
    """
    place = {
        id(t): (k, at) for k, one in enumerate(classes) for at, t in enumerate(one[0].tensors())
    }

    def where(node: Node) -> tuple[int, int] | None:
        return place.get(id(inputs.tensor(inputs.source_of(node))))

    def stands(node: Node) -> int | None:
        return found[0] if (found := where(node)) is not None else None

    parts = represented(inputs.gm, stands, len(classes), compensable_dtypes(settings.storage))
    if isinstance(parts, Unlike):
        return parts
    fakes = _Fakes(inputs)
    groups = []
    for k, nodes in parts:
        members: list[list[Any]] = [nodes]
        facts = [inputs.fact(node, settings) for node in nodes]
        places = [found[1] for node in nodes if (found := where(node)) is not None]
        assert len(places) == len(nodes)
        for member in classes[k][1:]:
            if len(member.tensors()) <= max(places):
                return Unlike("a parameter got its states while the step was traced")
            row = [fakes.like(n, member, at) for n, at in zip(nodes, places, strict=True)]
            if None in facts or [inputs.fact(one, settings) for one in row] != facts:
                return Unlike("parameters of one shape are kept in different ways")
            members.append(row)
        groups.append(Group(members, [[] for _ in members], set()))
    count = len(inputs.gm.graph.find_nodes(op="placeholder"))
    return Narrow(inputs.gm, list(range(count)), [], {}, groups)


class _Fakes:
    """Fake tensors, one for each layout."""

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs
        self.made: dict[Any, Tensor] = {}

    def like(self, node: Node, member: Member, at: int) -> AbsentInput:
        """Return what another member has in the place of an input, one of a member's tensors."""
        tensor = member.tensors()[at]
        key = tensor.shape, tensor.stride(), tensor.dtype, tensor.device
        if key not in self.made:
            with self.inputs.value(node).fake_mode:
                self.made[key] = empty_as(tensor)
        static = isinstance(self.inputs.source_of(node), str)
        _, param = self.inputs.owners[id(member.param)]
        name = f"{param.name}.grad" if at == GRAD else node.name
        return AbsentInput(member.finder(at), static, self.made[key], name)
