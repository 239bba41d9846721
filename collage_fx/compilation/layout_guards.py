"""Guards on layouts of a graph's inputs that Dynamo does not guard: gradients, and strides.

Dynamo does not guard the gradients of an optimizer but for being there, nor the strides of tensors
that are attributes of its graph; and a kernel that walks over memory takes another order of strides
for the same.
"""

import functools
import operator
import weakref
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.nn import Parameter

from collage_fx.runtime.errors import CollageError
from collage_fx.runtime.torch_private import TensorGuards

StaticInputs: TypeAlias = tuple[list[int], list[weakref.ref[Tensor]]]
"""The positions of those that are arguments, and the attributes of the graph, not kept alive."""


def guards_of(tensors: list[Any]) -> TensorGuards:
    """Return guards on the type, dtype, device, sizes and strides of these tensors.

    Also, no two of them may be the same.
    """
    # Without the keyword arguments it crashes.
    return TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)


class Layouts:
    """The layouts of some inputs of a graph, as they were at its first call."""

    def __init__(self, inputs: StaticInputs, args: tuple[Any, ...]) -> None:
        places, attributes = inputs
        self.places = [i for i in places if is_plain(args[i])]
        self.attributes = [find for find in attributes if is_plain(find())]
        tensors = self._of(args)
        self.guards = guards_of(tensors) if len({*map(id, tensors)}) == len(tensors) else None
        self.sized = self.guards is not None and len(self.places) == sum(map(is_plain, args))
        """True if the guards cover the sizes of all tensor arguments."""

    def _of(self, args: tuple[Any, ...]) -> list[Any]:
        return [*[args[i] for i in self.places], *[find() for find in self.attributes]]

    def hold(self, args: tuple[Any, ...]) -> bool:
        """Return True if the inputs of another call are like them."""
        return self.guards is None or bool(self.guards.check(*self._of(args)))

    def check(self, args: tuple[Any, ...]) -> None:
        """Raise CollageError unless they are."""
        if not self.hold(args):
            raise CollageError(
                "a parameter, state or gradient has other strides, or another dtype, than when "
                "this step was compiled, and torch.compile has not noticed. Nothing was written. "
                "Keep its layout, call torch.compiler.reset(), or use collage_fx.compile, which "
                "records such a step"
            )


def static_inputs(gm: GraphModule) -> StaticInputs:
    """Return the inputs of a Dynamo graph that have known sizes and strides."""
    places = [i for i, n in enumerate(gm.graph.find_nodes(op="placeholder")) if _is_static(n)]
    attributes: list[weakref.ref[Tensor]] = []
    for node in filter(_is_static, gm.graph.find_nodes(op="get_attr")):
        attribute: Any = functools.reduce(getattr, str(node.target).split("."), gm)
        attributes.append(weakref.ref(attribute))
    return places, attributes


def _is_static(node: Node) -> bool:
    value = node.meta.get("example_value")
    return (
        isinstance(value, Tensor)
        and value.layout is torch.strided
        and all(type(n) is int for n in (*value.shape, *value.stride()))
    )


def is_plain(*tensors: Any) -> bool:
    """Return True if these are all tensors of no other class, with strides."""
    return PLAIN.issuperset(map(type, tensors)) and STRIDED.issuperset(map(layout, tensors))


PLAIN, STRIDED = frozenset({Tensor, Parameter}), frozenset({torch.strided})
layout = operator.attrgetter("layout")
