"""Pass 1: find the carried states of the graph."""

import torch
from torch.fx import Node

from collage_fx.passes.ir.graph_memory import mutations
from collage_fx.passes.ir.program import LOW_PRECISION, Carried, Program, is_scalar
from collage_fx.runtime.expansion.eft import FP8
from collage_fx.runtime.torch_private import SyntheticBaseAOTInput, ViewBaseAOTInput


def capture(program: Program) -> None:
    """List the carried states, each with its name, owner and what forbids a residual for it.

    Before::

        mul = aten.mul.Tensor(arg0_1, 0.999)
        copy_ = aten.copy_.default(arg0_1, mul)

    `arg0_1` is carried. The graph does not change.
    """
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
