"""A lowered slice as one node of Inductor's graph: `collage::region`.

Stamped out node by node, an eft AdamW step is some 200 operations for each tensor, whose values
have two or three users each; Inductor then keeps a buffer for every dozen of them and takes five
times as long to compile them as the plain step (measured: 5.0 s against 1.0 s for each tensor). As
one node a slice is as many buffers as it has outputs. Each is a pointwise loop over the whole
arithmetic that it depends on; they are fused into one kernel, in which Inductor's common
subexpression elimination leaves every operation once.
"""

import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from collage_fx.passes.ir.program import CONVERT
from collage_fx.runtime import torch_versions
from collage_fx.runtime.ops import collage
from collage_fx.runtime.torch_private import (
    Pointwise,
    TensorBox,
    lowerings,
    make_pointwise,
    register_lowering,
)
from collage_fx.runtime.torch_private import inductor_ops as ops

aten = torch.ops.aten

_REGIONS: dict[str, GraphModule] = {}

_LIBRARY = torch.library.Library("collage", "FRAGMENT")
_LIBRARY.define("region(Tensor[] inputs, str key) -> Tensor[]")


def register_region(lowered: GraphModule) -> str:
    """Return the key under which collage::region finds this lowered graph.

    The key is a digest of the graph's text, so that equal graphs share it, in every process, and
    it stands for the graph in the key of Inductor's cache.
    """
    register_lowerings()
    lines = [f"{n.format_node()} {n.meta.get('dtype')}" for n in lowered.graph.nodes]
    key = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
    _REGIONS.setdefault(key, lowered)
    return key


def region_graph(key: str) -> Graph:
    """Return the lowered graph that a key stands for."""
    return _REGIONS[key].graph


def _run(inputs: list[Tensor], key: str) -> list[Tensor]:
    return list(_REGIONS[key](*inputs))


def _run_meta(inputs: list[Tensor], key: str) -> list[Tensor]:
    results: Any = _REGIONS[key].graph.output_node().args[0]
    dtypes = [node.meta["dtype"] for node in results]
    largest = max(inputs, key=lambda t: t.dim())
    shape = torch.broadcast_shapes(*(t.shape for t in inputs))
    if shape == largest.shape:
        return [torch.empty_like(largest, dtype=dtype) for dtype in dtypes]
    return [largest.new_empty(shape, dtype=dtype) for dtype in dtypes]


_LIBRARY.impl("region", _run, "CompositeExplicitAutograd")
_LIBRARY.impl("region", _run_meta, "Meta")


class _Memo:
    """Values of a region's nodes at one index, while one output is being computed.

    Inductor evaluates a pointwise value by calling its operands' loaders, once for each use;
    without a memo, a chain of error-free transformations takes exponentially many calls.
    """

    def __init__(self) -> None:
        self.values: dict[tuple[Any, ...], Any] | None = None

    def loader(self, node: Node, compute: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return compute with its results remembered while the outermost loader runs."""

        def load(index: Sequence[Any]) -> Any:
            outermost = self.values is None
            if self.values is None:
                self.values = {}
            try:
                at = (node, *index)
                if at not in self.values:
                    self.values[at] = compute(index)
                return self.values[at]
            finally:
                if outermost:
                    self.values = None

        return load


def _box(like: TensorBox, loader: Callable[[Any], Any]) -> TensorBox:
    return Pointwise.create(
        device=like.get_device_or_error(),
        dtype=like.get_dtype(),
        inner_fn=loader,
        ranges=list(like.get_size()),
    )


def _divide(x: Any, y: Any) -> TensorBox:
    """Divide. Inductor's lowering multiplies by the reciprocal of a number, on a GPU."""
    boxes = [b for b in (x, y) if isinstance(b, TensorBox)]
    if len({b.get_dtype() for b in boxes}) > 1 or not boxes[0].get_dtype().is_floating_point:
        return lowerings[aten.div.Tensor](x, y)

    def body(*values: Any) -> Any:
        operands = iter(values)
        dtype = boxes[0].get_dtype()
        return ops.truediv(
            *(
                next(operands) if isinstance(b, TensorBox) else ops.constant(b, dtype)
                for b in (x, y)
            )
        )

    return make_pointwise(body)(*lowerings[aten.broadcast_tensors.default](boxes))


def _convert(x: TensorBox, dtype: torch.dtype) -> TensorBox:
    """Convert. A GPU makes the largest number of e5m2 of an infinity: there it is put by its bits.

    x is what the dtype represents, the upper half of an fp16 number.
    """
    if dtype is not torch.float8_e5m2 or x.get_device_or_error().type == "cpu":
        return lowerings[CONVERT](x, dtype)
    source = x.get_dtype()

    def body(value: Any) -> Any:
        half = ops.to_dtype(value, torch.float16, src_dtype=source, use_compute_types=False)
        bits = ops.to_dtype_bitcast(half, torch.int16, torch.float16)
        upper = ops.bitwise_right_shift(bits, ops.constant(8, torch.int16))
        byte = ops.to_dtype(upper, torch.int8, src_dtype=torch.int16)
        return ops.to_dtype_bitcast(byte, dtype, torch.int8)

    return make_pointwise(body, override_return_dtype=dtype)(x)


_LOWERINGS: dict[Any, Callable[..., TensorBox]] = {
    CONVERT: _convert,
    aten.div.Tensor: _divide,
    aten.reciprocal.default: lambda x: _divide(1.0, x),
}


def lower_region(inputs: list[TensorBox], key: str) -> list[TensorBox]:
    """Inductor's lowering: the lowerings of the region's operations, evaluated with a memo."""
    lowered = _REGIONS[key]
    memo = _Memo()
    env: dict[Node, Any] = dict(
        zip(lowered.graph.find_nodes(op="placeholder"), inputs, strict=True)
    )
    for node in lowered.graph.nodes:
        if node.op == "call_function":
            args, kwargs = torch.fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: env[n])
            lower = _LOWERINGS.get(node.target) or lowerings[node.target]
            value = lower(*args, **kwargs)
            env[node] = _box(value, memo.loader(node, value.make_loader()))
    results: Any = lowered.graph.output_node().args[0]
    return [_box(env[n], env[n].make_loader()) for n in results]


_DETOUR = torch_versions.drops_roundings()
"""True if a rounding goes by way of float64, for kernels drop one from fp32 to 16 bits and back."""


def lower_round(x: TensorBox, dtype: torch.dtype) -> TensorBox:
    """Inductor's lowering of collage::round: a conversion to dtype and back that really happens.

    `use_compute_types=False` is what keeps Inductor from treating the 16-bit type as fp32.
    """
    source = x.get_dtype()
    detour = _DETOUR and x.get_device_or_error().type == "cpu"

    def body(value: Any) -> Any:
        rounded, now = ops.to_dtype(value, dtype, src_dtype=source, use_compute_types=False), dtype
        if detour:
            now = torch.float64
            rounded = ops.to_dtype(rounded, now, src_dtype=dtype, use_compute_types=False)
        return ops.to_dtype(rounded, source, src_dtype=now)

    return make_pointwise(body, override_return_dtype=source)(x)


def set_round_lowering(function: Callable[[TensorBox, torch.dtype], TensorBox]) -> None:
    """Make Inductor lower collage::round by function; tests put a wrong one here."""
    register_lowerings()
    register_lowering(collage.round.default, type_promotion_kind=None)(function)


def lower_narrow(x: TensorBox, dtype: torch.dtype) -> TensorBox:
    """Inductor's lowering of collage::narrow: the first half of `lower_round`, and the same code.

    An ordinary conversion is rounded when it is stored, once more, and by Inductor's cache of
    conversions the way back from it is the value before.
    """
    source = x.get_dtype()

    def body(value: Any) -> Any:
        return ops.to_dtype(value, dtype, src_dtype=source, use_compute_types=False)

    return make_pointwise(body, override_return_dtype=dtype)(x)


@functools.cache
def register_lowerings() -> None:
    """Make Inductor lower the operations of collage_fx, before it first compiles one."""
    register_lowering(collage.region.default, type_promotion_kind=None, broadcast=False)(
        lower_region
    )
    register_lowering(collage.round.default, type_promotion_kind=None)(lower_round)
    register_lowering(collage.narrow.default, type_promotion_kind=None)(lower_narrow)
