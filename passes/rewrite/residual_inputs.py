"""Residuals as inputs of a graph that is being built."""

import math
from collections.abc import Sequence

import torch
from torch.fx import Graph, Node

from collage_fx.passes.frontend.decompose import like
from collage_fx.passes.ir.program import Carried, Program
from collage_fx.runtime.storage import changed_bits
from collage_fx.runtime.storage.registry import STORAGES


def add_residuals(
    program: Program,
    graph: Graph,
    carried: Carried,
    name: str,
    storage: str,
    *,
    marked: bool = False,
) -> list[Node]:
    """Append the residuals of a state to the inputs of a graph, and note them in the program.

    Behind them come the bits of a marked state.

    Args:
        program: of which the graph is to be the result.
        graph: that graph.
        carried: the state.
        name: how the inputs are called, with a number from the second on.
        storage: that of the residuals.
        marked: whether the graph notes which elements of the state change.
    """
    lows, kind = [], STORAGES[storage]
    shape = carried.val.shape
    (size,) = kind.shape_in_memory(shape) if kind.packed else (None,)
    carried.marked = marked
    made = [(f"{name}{k or ''}", d, size) for k, d in enumerate(kind.in_memory(carried.val.dtype))]
    if marked:
        made.append((f"{name}_changed", torch.uint8, changed_bits.size_of(math.prod(shape))))
    first = len(graph.find_nodes(op="placeholder"))
    program.residual_places[carried.index] = [first + k for k in range(len(made))]
    for one, dtype, length in made:
        lows.append(graph.placeholder(one))
        lows[-1].meta["val"] = like(carried.val, dtype, length)
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
