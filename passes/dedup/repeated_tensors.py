"""Before AOTAutograd: divide an in-place `_foreach_*` of a list that has a tensor twice.

Eager PyTorch updates such a tensor twice, one update after the other: parameters that share a dict
of states have it so. Functionalization computes both updates from the old value, and keeps the
last.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.fx import GraphModule

Given = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of a call, by place and by name."""


def divide_repeated(gm: GraphModule) -> None:
    """Divide calls that write a tensor more than once, in place.

    Before::

        _foreach_add_([m, n, m], [g0, g1, g2])

    After::

        _foreach_add_([m, n], [g0, g1])
        _foreach_add_([m], [g2])

    Args:
        gm: a Dynamo graph. It has no tensor with a number for each: Dynamo raises there.
    """
    changed = False
    for node in list(gm.graph.nodes):
        if node.op == "call_function" and not node.users and writes_list(node.target):
            with gm.graph.inserting_before(node):
                parts = divided(node.args, node.kwargs)
                for args, kwargs in parts:
                    gm.graph.call_function(node.target, args, kwargs).meta = dict(node.meta)
            if parts:
                gm.graph.erase_node(node)
                changed = True
    if changed:
        gm.recompile()


def writes_list(function: Callable[..., Any]) -> bool:
    """Return True if a function, or an operation, is an in-place `_foreach_*`."""
    name: str = getattr(function, "_opname", "") or getattr(function, "__name__", "")
    return name.startswith("_foreach_") and name.endswith("_")


def divided(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Given]:
    """Return the arguments of calls of which none writes a tensor more than once, in order.

    None where one call does not either.

    Args:
        args: of an in-place `_foreach_*`. Lists, and tensors of one dimension, have an item for
            each tensor that is written.
        kwargs: the same by name.
    """
    written = args[0] if args else kwargs["self"]
    starts: list[int] = []
    seen: set[int] = set()
    for i, tensor in enumerate(written):
        if id(tensor) in seen:
            starts.append(i)
            seen.clear()
        seen.add(id(tensor))
    if not starts:
        return []

    def pick(given: Any, part: slice) -> Any:
        each = isinstance(given, list | tuple) or (isinstance(given, Tensor) and given.ndim == 1)
        return given[part] if each else given

    ends = zip([0, *starts], [*starts, len(written)], strict=True)
    return [
        (tuple(pick(a, part) for a in args), {k: pick(a, part) for k, a in kwargs.items()})
        for part in (slice(*one) for one in ends)
    ]
