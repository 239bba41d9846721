"""Residuals as inputs of a graph that is being built."""

from collections.abc import Sequence

from torch.fx import Graph, Node

from collage_fx.passes.frontend.decompose import like
from collage_fx.passes.ir.program import Carried, Program
from collage_fx.runtime.storage.registry import STORAGES


def add_residuals(
    program: Program, graph: Graph, carried: Carried, name: str, storage: str
) -> list[Node]:
    """Append the residuals of a state to the inputs of a graph, and note them in the program.

    Args:
        program: of which the graph is to be the result.
        graph: that graph.
        carried: the state.
        name: how the inputs are called, with a number from the second on.
        storage: that of the residuals.
    """
    lows, kind = [], STORAGES[storage]
    dtypes = kind.in_memory(carried.val.dtype)
    first = len(graph.find_nodes(op="placeholder"))
    program.residual_places[carried.index] = [first + k for k in range(len(dtypes))]
    for k, dtype in enumerate(dtypes):
        lows.append(graph.placeholder(f"{name}{k or ''}"))
        (size,) = kind.shape_in_memory(carried.val.shape) if kind.packed else (None,)
        lows[-1].meta["val"] = like(carried.val, dtype, size)
        program.static_residuals.append(carried.static)
    program.residual_inputs.append(carried)
    return lows


def add_members(program: Program, graph: Graph, placeholders: Sequence[Node]) -> list[list[Node]]:
    """Append the inputs of members that were left out; return those of each in turn.

    Args:
        program: of which the graph is to be the result.
        graph: that graph.
        placeholders: the inputs of the graph in the passes.
    """
    made: list[list[Node]] = []
    for copies in program.copies:
        for carried in copies.others:
            made.append([])
            for index, c in zip(copies.inputs, carried, strict=True):
                made[-1].append(graph.placeholder(f"{placeholders[index].name}_other{c.index}"))
                made[-1][-1].meta["val"] = c.val
    return made
