"""Whether the arguments of a graph still have the layouts for which it was compiled.

Dynamo does not guard the gradients of an optimizer but for being there, and a kernel that walks
over memory takes another order of strides for the same.
"""

from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo.guards import TensorGuards
from torch.fx import GraphModule
from torch.nn import Parameter

from collage_fx.runtime.errors import CollageError


def guards_of(tensors: list[Any]) -> TensorGuards:
    """Return what tells whether other tensors are like these: type, dtype, device, sizes, strides.

    Also, no two of them may be the same.
    """
    # Without the keyword arguments it crashes.
    return TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)


class Layouts:
    """The layouts of some arguments of a graph, as they were at its first call."""

    def __init__(self, places: list[int], args: tuple[Any, ...]) -> None:
        self.places = [i for i in places if is_plain(args[i])]
        tensors = [args[i] for i in self.places]
        self.guards = guards_of(tensors) if len({*map(id, tensors)}) == len(tensors) else None

    def hold(self, args: tuple[Any, ...]) -> bool:
        """Tell whether the arguments of another call are like them."""
        return self.guards is None or bool(self.guards.check(*(args[i] for i in self.places)))

    def check(self, args: tuple[Any, ...]) -> None:
        """Raise CollageError unless they are."""
        if not self.hold(args):
            raise CollageError(
                "a gradient has other strides, or another dtype, than when this step was compiled, "
                "and torch.compile has not noticed. Nothing was written. Keep its layout, call "
                "torch.compiler.reset(), or use collage_fx.compile, which records such a "
                "step"
            )


def static_inputs(gm: GraphModule) -> list[int]:
    """Return which placeholders of a graph of Dynamo's are tensors of known sizes and strides."""
    values = [n.meta.get("example_value") for n in gm.graph.find_nodes(op="placeholder")]
    return [
        i
        for i, value in enumerate(values)
        if isinstance(value, Tensor)
        and value.layout is torch.strided
        and all(type(n) is int for n in (*value.shape, *value.stride()))
    ]


def is_plain(tensor: Any) -> bool:
    """Tell whether this is a tensor of no other class, with strides."""
    return type(tensor) in (Tensor, Parameter) and tensor.layout is torch.strided
