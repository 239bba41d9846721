"""States that a graph reads and does not write, with the residuals that they have."""

from collections.abc import Iterable

import torch
from torch.fx import Graph, Node

from collage_fx.passes.frontend.decompose import like
from collage_fx.passes.frontend.slice import elementwise, shape_of
from collage_fx.passes.ir.program import CONVERT, Carried, Program, graph_of, low_word, value_of
from collage_fx.runtime.expansion.eft import WIDER
from collage_fx.runtime.ops import JOIN
from collage_fx.runtime.storage.registry import STORAGES


def readable_whole(program: Program, read: Iterable[Carried]) -> set[int]:
    """Return the positions of the states of which slices can take the whole values.

    They are computed in fp32 then, what reads these is elementwise, and members that were left out
    have residuals in the same storages.

    Args:
        program: with its canonical graph.
        read: states that the graph only reads, with residuals.
    """
    inputs = graph_of(program.canonical).graph.find_nodes(op="placeholder")
    return {
        carried.index
        for carried in read
        if program.settings.arithmetic == "wide"
        and not STORAGES[carried.present].packed
        and all(c.present == carried.present for c in program.alike(carried))
        and _is_read_by_elements(inputs[carried.index])
    }


def _is_read_by_elements(state: Node) -> bool:
    same = (elementwise(user) and shape_of(user) == shape_of(state) for user in _readers(state))
    return all(same)


def _readers(state: Node) -> list[Node]:
    """Return the operations that read a state: what zeroes a gradient only writes it."""
    return [u for u in state.users if u.target is not torch.ops.aten.copy_.default]


def read_whole(program: Program, graph: Graph) -> None:
    """Have a graph read the states in `Program.read_whole` with their residuals.

    Before::

        sub = aten.sub.Tensor(value, average)

    After::

        low = low_word(value, 0)
        join = collage.join.remainder16(value, low)                         # float32
        rounded = prims.convert_element_type(join, torch.bfloat16)
        sub = aten.sub.Tensor(rounded, average)

    Slices in arithmetic `wide` leave such a rounding out.
    """
    inputs = graph.find_nodes(op="placeholder")
    for index in sorted(program.read_whole):
        state = inputs[index]
        users, val = _readers(state), value_of(state)
        kind = STORAGES[program.describe(index, state).present]
        dtypes = kind.residuals[val.dtype]
        with graph.inserting_before(inputs[-1].next):
            lows = [graph.call_function(low_word, (state, k)) for k in range(len(dtypes))]
            join = graph.call_function(JOIN[kind.name], (state, *lows))
            rounded = graph.call_function(CONVERT, (join, val.dtype))
        for low, dtype in zip(lows, dtypes, strict=True):
            low.meta["val"] = like(val, dtype)
        join.meta["val"], rounded.meta["val"] = like(val, WIDER[val.dtype]), like(val, val.dtype)
        for user in users:
            user.replace_input_with(state, rounded)
