"""Pass 8: replace collage:: operations by their arithmetic and make every rounding explicit."""

import math
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from collage_fx.passes.frontend.torch_internals import select_decomp_table, unset_fake_temporarily
from collage_fx.passes.ir.program import LOW_PRECISION, Program, graph_of
from collage_fx.runtime.expansion.eft import WIDER
from collage_fx.runtime.ops import collage
from collage_fx.runtime.storage.registry import LAST

aten, prims = torch.ops.aten, torch.ops.prims

_CONVERT = prims.convert_element_type.default
_CASTS = {_CONVERT, aten._to_copy.default}
_NUMBERS = {aten.full.default: 1, aten.scalar_tensor.default: 0}
# By which of the two sides are numbers.
_WHERE: dict[tuple[bool, ...], Any] = {
    (False, False): aten.where.self,
    (False, True): aten.where.ScalarOther,
    (True, False): aten.where.ScalarSelf,
    (True, True): aten.where.Scalar,
}
# Results that are one of the operands, or its negation: nothing to round.
_EXACT = {
    aten.neg.default,
    aten.abs.default,
    aten.where.self,
    aten.maximum.default,
    aten.minimum.default,
    aten.clone.default,
    aten.alias.default,
}


_BEYOND = {
    dtype: factor
    for dtype, factor in ((torch.float8_e4m3fn, math.nan), (torch.float8_e5m2, math.inf))
    if not math.isfinite(torch.tensor(1e6).to(dtype).item())
}
"""dtype -> what numbers beyond its largest are multiplied by to become what they are in it; none
where PyTorch has the largest in their place, as for e4m3fn in 2.13."""


def lower(program: Program) -> None:
    """Make the lowered graph of each class: fp32 operations and collage::round, nothing else.

    A compiler that fuses bf16 operations keeps their results in fp32, and an error-free
    transformation then finds no error. So the graph it gets has no bf16 operation: 16-bit inputs
    are widened, each operation is an fp32 one followed by a rounding that the compiler cannot see
    through, and outputs are narrowed, exactly. An fp32 result of + - * / sqrt on 16-bit operands,
    rounded to 16 bits, is the correctly rounded one (24 >= 2p + 2).

    Before::

        grow = collage.grow(hi, lo, a)

    After (the first of its 2Sum)::

        hi32 = prims.convert_element_type(hi, torch.float32)
        a32 = prims.convert_element_type(a, torch.float32)
        add = aten.add.Tensor(hi32, a32)
        s = collage.round(add, torch.bfloat16)
    """
    for rewritten in program.rewritten:
        expanded = graph_of(rewritten.expanded)
        rewritten.lowered = _Rounding(_trace(expanded), expanded).run()


def _trace(expanded: GraphModule) -> GraphModule:
    """Trace the expanded graph through the arithmetic, on real tensors of two elements."""
    with unset_fake_temporarily(), torch.no_grad():
        inputs = [
            torch.ones(() if n.meta["scalar"] else (2,), dtype=n.meta["dtype"])
            for n in expanded.graph.find_nodes(op="placeholder")
        ]
        return make_fx(expanded, decomposition_table=select_decomp_table())(*inputs)


class _Rounding:
    """Translates a graph of 16-bit operations; 16-bit values live in fp32 in between."""

    def __init__(self, traced: GraphModule, expanded: GraphModule) -> None:
        self.traced = traced
        self.names = [n.name for n in expanded.graph.find_nodes(op="placeholder")]
        self.graph = Graph()
        self.env: dict[Node, Any] = {}

    def run(self) -> GraphModule:
        """Return the lowered graph."""
        for node in self.traced.graph.nodes:
            if node.op == "placeholder":
                new = self.graph.placeholder(self.names[len(self.env)])
                new.meta["dtype"] = _dtype(node)
                self.env[node] = new
                if _dtype(node) in LOW_PRECISION:
                    self.env[node] = (new, None)
            elif node.op == "output":
                self.graph.output(tuple(self._narrow(n) for n in node.args[0]))
            elif node.target in _NUMBERS:
                self.env[node] = node.args[_NUMBERS[node.target]]
            elif node.target in _CASTS:
                self.env[node] = self._cast(node)
            else:
                self.env[node] = self._operation(node)
        self.graph.eliminate_dead_code()
        self.graph.lint()
        return GraphModule(torch.nn.Module(), self.graph)

    def _op(self, target: Any, *args: Any, dtype: torch.dtype, **kwargs: Any) -> Node:
        node = self.graph.call_function(target, args, kwargs)
        node.meta["dtype"] = dtype
        return node

    def _carrier(self, operand: Node) -> Any:
        """Return what stands for operand; 16-bit inputs are widened at their first use."""
        value = self.env[operand]
        if isinstance(value, tuple):
            placeholder = value[0]
            wide = WIDER[placeholder.meta["dtype"]]
            value = self.env[operand] = self._op(_CONVERT, placeholder, wide, dtype=wide)
        return value

    def _narrow(self, operand: Node) -> Any:
        """Return operand in its own dtype, for an output; exact, since it was rounded before."""
        value = self.env[operand]
        if isinstance(value, tuple):
            return value[0]
        dtype = _dtype(operand)
        if dtype in LOW_PRECISION:
            return self._op(_CONVERT, value, dtype, dtype=dtype)
        return value

    def _cast(self, node: Node) -> Any:
        source: Node = node.args[0]  # type: ignore[assignment]
        x, to = self._carrier(source), _dtype(node)
        if not isinstance(x, Node):
            return torch.tensor(x, dtype=torch.float64).to(to).item()
        if to not in LOW_PRECISION:
            return x if x.meta["dtype"] == to else self._op(_CONVERT, x, to, dtype=to)
        if _dtype(source) == to:
            return x
        if x.meta["dtype"] != WIDER[to]:
            x = self._op(_CONVERT, x, WIDER[to], dtype=WIDER[to])
        return self._rounded(x, to)

    def _rounded(self, x: Node, to: torch.dtype) -> Node:
        """Return x rounded to a dtype, what is beyond fp8 as eager PyTorch does.

        A GPU makes the largest number of that.
        """
        wide = x.meta["dtype"]
        rounded = self._op(collage.round.default, x, to, dtype=wide)
        if to not in _BEYOND:
            return rounded
        size = self._op(aten.abs.default, x, dtype=wide)
        inside = self._op(aten.le.Scalar, size, LAST[to], dtype=torch.bool)
        beyond = self._op(aten.mul.Tensor, x, _BEYOND[to], dtype=wide)
        return self._op(aten.where.self, inside, rounded, beyond, dtype=wide)

    def _operation(self, node: Node) -> Node:
        dtype = _dtype(node)
        wide = WIDER[dtype] if dtype in LOW_PRECISION else dtype

        compute = wide
        if not wide.is_floating_point:  # a comparison
            double = {_dtype(a) for a in node.all_input_nodes} == {torch.float64}
            compute = torch.float64 if double else torch.float32

        def operand(n: Node) -> Any:
            x = self._carrier(n)
            if isinstance(x, Node) and x.meta["dtype"] == torch.float64 != compute:
                return self._op(_CONVERT, x, compute, dtype=compute)
            return x

        args = torch.fx.node.map_arg(node.args, operand)
        kwargs = torch.fx.node.map_arg(dict(node.kwargs), operand)
        target = node.target
        if target is aten.where.self:
            numbers = tuple(not isinstance(a, Node) for a in args[1:])
            target = _WHERE[numbers]
        new = self._op(target, *args, dtype=wide, **kwargs)
        if dtype in LOW_PRECISION and node.target not in _EXACT:
            return self._rounded(new, dtype)
        return new


def _dtype(node: Node) -> torch.dtype:
    return node.meta["val"].dtype
