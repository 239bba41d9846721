"""Pass 1: find the carried states of the graph, and comparisons with tensors of one number."""

from typing import Any

import torch
from torch.fx import Graph, Node

from collage_fx.passes.frontend.canonicalize import SAME_ELEMENTS
from collage_fx.passes.frontend.decompose import COMPARISONS
from collage_fx.passes.frontend.slice import shape_of
from collage_fx.passes.ir.graph_memory import behind, mutations
from collage_fx.passes.ir.program import (
    LOW_PRECISION,
    Carried,
    Program,
    is_scalar,
    is_tensor,
    value_of,
)
from collage_fx.runtime.expansion.eft import FP8
from collage_fx.runtime.torch_private import SyntheticBaseAOTInput, ViewBaseAOTInput

aten = torch.ops.aten

_OTHER_WAY = {"eq": "eq", "ne": "ne", "ge": "le", "le": "ge", "gt": "lt", "lt": "gt"}
WITH_NUMBER: dict[Any, tuple[Any, Any]] = {
    getattr(aten, op._opname).Tensor: (op, getattr(aten, _OTHER_WAY[op._opname]).Scalar)
    for op in COMPARISONS
}
"""Comparison of tensors -> that with a number in place of the second, and of the first."""


def capture(program: Program) -> None:
    """List the carried states, each with its name, owner and what forbids a residual for it.

    Before::

        mul = aten.mul.Tensor(arg0_1, 0.999)
        copy_ = aten.copy_.default(arg0_1, mul)

    `arg0_1` is carried. Of the graph only comparisons change, those with tensors that one number
    fills: see `compare_with_numbers`.
    """
    compare_with_numbers(program.source.graph)
    mutated = mutations(program.source.graph)
    placeholders = program.source.graph.find_nodes(op="placeholder")
    labels: set[str] = set()
    for index, placeholder in enumerate(placeholders):
        label = ""
        if placeholder in mutated:
            carried = program.describe(index, placeholder)
            carried.refusal = not_held(placeholder, carried)
            carried.takes_over = index in program.keep
            program.carried.append(carried)
            label = carried.state_name.short
        if is_scalar(placeholder):
            label = label or program.label(placeholder)
            placeholder.meta["label"] = placeholder.name if label in labels else label
            labels.add(label)


def _converts(device: torch.device) -> bool:
    """Return True if kernels for a device can convert to fp8: on GPUs from 8.9 on."""
    if device.type != "cuda":
        return True
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)


def is_merged(descriptor: object) -> bool:
    """Return True if an input is what AOTAutograd made of several that share memory."""
    return isinstance(descriptor, SyntheticBaseAOTInput | ViewBaseAOTInput)


def not_held(placeholder: Node, carried: Carried) -> str:
    """Return the reason why a state cannot have a residual in any way; empty if it can."""
    if is_merged(placeholder.meta.get("desc")):
        return "it overlaps another input in memory; pass tensors that do not share storage"
    dtype = carried.val.dtype
    if dtype in FP8 and not _converts(carried.val.device):
        return f"kernels for {carried.val.device} cannot convert to {dtype}"
    if dtype in LOW_PRECISION:
        return ""
    if dtype.is_complex:
        return f"{dtype} has no storage for residuals; it is updated as it stands"
    if dtype.is_floating_point and dtype.itemsize == 1:
        known = ", ".join(str(d).removeprefix("torch.") for d in FP8)
        return f"{dtype} has no storage for residuals; of 8 bits there are {known}"
    return ""


def compare_with_numbers(graph: Graph) -> None:
    """Have comparisons with filled tensors take the number, in place.

    The tensor holds the number rounded to 16 bits; but the compiler keeps it, and what was clamped
    to the same number, as it is. `decompose.compare` counts both as the rounded one.

    Before::

        full = aten.full.default([8], 0.1, dtype=torch.bfloat16)
        eq = aten.eq.Tensor(clamp, full)

    After::

        eq = aten.eq.Scalar(clamp, 0.1)
    """
    for node in graph.nodes:
        for at, op in enumerate(WITH_NUMBER.get(node.target, ())):
            x, number = node.args[at], _number_in(node.args[1 - at])
            if number is not None and _is_low(x) and shape_of(x) == shape_of(node):
                node.target, node.args = op, (x, number)
                break


def _number_in(x: Any) -> float | None:
    """Return the number that fills an operand, if that is a 16-bit tensor."""
    filled: Any = behind(x, SAME_ELEMENTS) if _is_low(x) else None
    if filled is None or filled.target not in (aten.full.default, aten.scalar_tensor.default):
        return None
    number = filled.args[filled.target is aten.full.default]
    return number if isinstance(number, int | float) else None


def _is_low(x: Any) -> bool:
    """Return True if an operand is a 16-bit tensor."""
    return is_tensor(x) and value_of(x).dtype in LOW_PRECISION
