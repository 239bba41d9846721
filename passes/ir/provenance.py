"""Which value of the graph before each value of a graph stems from, for who looks at both."""

from torch.fx import Node

ORIGIN = "origin"
"""The key in a node's meta: the name of a node of the graph before, which is the source for the
canonical graph, that for the expanded one, and that for the lowered one."""


def note_origin(node: Node, origin: Node | None) -> None:
    """Note which node of the graph before a node stems from, and where the user wrote that."""
    if origin is not None:
        node.meta[ORIGIN] = origin.name
        if "stack_trace" in origin.meta:
            node.meta["stack_trace"] = origin.meta["stack_trace"]
