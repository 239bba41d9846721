"""Before deduplication: merge equal per-parameter Python step counts into one guarded input.

An optimizer that counts the steps of each parameter in Python gives Dynamo's graph a symbol for
each count, and no member of a class would be like another. All of them advance together: one stands
for all that are equal where the graph is compiled, and Dynamo compiles anew once they are not.
"""

from torch import SymInt, Tensor
from torch.fx import GraphModule, Node

from collage_fx.passes.frontend.read_numbers import hint_of


def unify_equal_counts(gm: GraphModule, least: int) -> None:
    """Let one input stand for all ints that have its value, and guard that they are equal.

    Sizes of tensors are left alone. So are floats: a guard on one makes Dynamo take it for a
    constant, and compile in every step.

    Args:
        gm: a Dynamo graph, which is changed.
        least: how many there are at least where one does.
    """
    inputs = gm.graph.find_nodes(op="placeholder")
    sizes = {s.node.expr for node in inputs for s in _symbolic_sizes(node)}
    equal: dict[float | None, list[Node]] = {}
    for node in inputs:
        count = node.meta.get("example_value")
        if isinstance(count, SymInt) and count.node.expr not in sizes:
            equal.setdefault(hint_of(count), []).append(node)
    for value, (first, *others) in equal.items():
        if value is None or len(others) + 1 < least:
            continue
        for node in others:
            if node.meta["example_value"] == first.meta["example_value"]:  # this is the guard
                node.replace_all_uses_with(first)


def _symbolic_sizes(node: Node) -> list[SymInt]:
    value = node.meta.get("example_value")
    sizes = (*value.shape, *value.stride()) if isinstance(value, Tensor) else ()
    return [s for s in sizes if isinstance(s, SymInt)]
