"""Pass 11: replace collage:: operations by their arithmetic and make every rounding explicit."""

import functools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_aggregate, map_arg

from collage_fx.passes.ir.graph_memory import ORIGIN, note_origin
from collage_fx.passes.ir.program import CASTS, CONVERT, LOW_PRECISION, Program, graph_of
from collage_fx.runtime.expansion.eft import WIDER, computed_in
from collage_fx.runtime.ops import collage
from collage_fx.runtime.storage.layouts import LAST
from collage_fx.runtime.torch_private import (
    _disable_current_modes,
    select_decomp_table,
)

aten = torch.ops.aten

_NUMBERS = {aten.full.default: 1, aten.scalar_tensor.default: 0}
# By which of the two sides are numbers.
WHERE: dict[tuple[bool, ...], Any] = {
    (False, False): aten.where.self,
    (False, True): aten.where.ScalarOther,
    (True, False): aten.where.ScalarSelf,
    (True, True): aten.where.Scalar,
}
# Results that are one of the operands, or its negation: nothing to round.
EXACT = {
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
        rewritten.lowered = _Rounding(_trace(graph_of(rewritten.expanded))).run()


def _trace(expanded: GraphModule) -> Graph:
    """Return the expanded graph with each operation replaced by its arithmetic."""
    graph = Graph()
    env: dict[Node, Any] = {}
    for node in expanded.graph.find_nodes(op="placeholder"):  # a seed may stand further down
        env[node] = graph.placeholder(node.name)
        env[node].meta.update(dtype=node.meta["dtype"], scalar=node.meta["scalar"])
        note_origin(env[node], node)
    for node in expanded.graph.nodes:
        if node.op == "placeholder":
            continue
        if node.op == "output":
            graph.output(map_arg(node.args[0], lambda n: env[n]))
        elif node.target is operator.getitem:
            env[node] = env[node.args[0]][node.args[1]]
        else:
            args, kwargs = map_arg((node.args, node.kwargs), lambda n: env[n])
            env[node] = _inline(graph, node.target, args, kwargs)
            for new in reversed(graph.nodes):
                if ORIGIN in new.meta:
                    break
                note_origin(new, node)
    return graph


def _inline(graph: Graph, target: Any, args: Any, kwargs: Any) -> Any:
    """Append the arithmetic of an operation; return its result, or a tuple of them."""
    found: dict[Node, int] = {}

    def slot(x: Any) -> Any:
        is_tensor = isinstance(x, Node)
        return found.setdefault(x, len(found)) if is_tensor else _Constant(x, f"{type(x)}{x!r}")

    form, nodes = map_aggregate((args, dict(kwargs)), slot), list(found)
    facts = tuple((n.meta["dtype"], n.meta["scalar"]) for n in nodes)
    # An integer operand becomes one of the default dtype beside a Python float.
    arithmetic = _arithmetic(target, form, facts, torch.get_default_dtype())
    env = dict(zip(arithmetic.find_nodes(op="placeholder"), nodes, strict=True))
    return graph.graph_copy(arithmetic, env)


@dataclass(frozen=True)
class _Constant:
    """An operand that is no tensor."""

    value: Any = field(compare=False)
    text: str
    """Type and writing, by which it is known. 1 equals 1.0 and True, and 0.0 equals -0.0."""


@functools.lru_cache(maxsize=1024)
def _arithmetic(
    target: Any,
    form: Any,
    facts: tuple[tuple[torch.dtype, bool], ...],
    default: torch.dtype,
) -> Graph:
    """Trace one operation through the arithmetic, on real tensors of two elements.

    Args:
        target: the operation.
        form: its operands and those that it takes by name, each a constant or the number of a
            tensor.
        facts: of each tensor, its dtype and whether it is 0-d.
        default: PyTorch's default dtype while it is traced.
    """

    def call(*tensors: Any) -> Any:
        def operand(slot: Any) -> Any:
            return slot.value if isinstance(slot, _Constant) else tensors[slot]

        args, kwargs = map_aggregate(form, operand)
        return target(*args, **kwargs)

    return _traced(call, facts)


def _traced(function: Callable[..., Any], facts: Sequence[tuple[torch.dtype, bool]]) -> Graph:
    """Trace a function of tensors of these dtypes, 0-d or not, on real ones of two elements."""
    with _disable_current_modes(), torch.no_grad():
        inputs = [torch.ones(() if scalar else (2,), dtype=dtype) for dtype, scalar in facts]
        traced = make_fx(function, decomposition_table=select_decomp_table())(*inputs).graph
    for node in traced.nodes:
        if (val := node.meta.pop("val", None)) is not None:
            node.meta = {"dtype": val.dtype, "scalar": val.dim() == 0}
    return traced


def lowered_function(
    function: Callable[..., tuple[Tensor, ...]], facts: Sequence[tuple[torch.dtype, bool]]
) -> Graph:
    """Return the lowered graph of an elementwise function.

    Args:
        function: of tensors, to tensors.
        facts: of each tensor that it takes, its dtype and whether it is 0-d.
    """
    return _Rounding(_traced(function, facts)).run().graph


class _Rounding:
    """Translation of a graph of 16-bit operations; 16-bit values live in fp32 in between."""

    def __init__(self, traced: Graph) -> None:
        self.traced = traced
        self.graph = Graph()
        self.env: dict[Node, Any] = {}
        self.origin: str | None = None
        """Node of the expanded graph that is being translated, from which new nodes stem."""

    def run(self) -> GraphModule:
        """Return the lowered graph."""
        for node in self.traced.nodes:
            self.origin = node.meta.get(ORIGIN)
            if node.op == "placeholder":
                new = self.graph.placeholder(str(node.target))
                new.meta.update(dtype=_dtype(node), **self._provenance())
                self.env[node] = new
                if _dtype(node) in LOW_PRECISION:
                    self.env[node] = (new, None)
            elif node.op == "output":
                self.graph.output(tuple(self._narrow(n) for n in node.args[0]))
            elif node.target in _NUMBERS:
                self.env[node] = node.args[_NUMBERS[node.target]]
            elif node.target in CASTS:
                self.env[node] = self._cast(node)
            else:
                self.env[node] = self._operation(node)
        self.graph.eliminate_dead_code()
        self.graph.lint()
        return GraphModule(torch.nn.Module(), self.graph)

    def _op(self, target: Any, *args: Any, dtype: torch.dtype, **kwargs: Any) -> Node:
        node = self.graph.call_function(target, args, kwargs)
        node.meta.update(dtype=dtype, **self._provenance())
        return node

    def _provenance(self) -> dict[str, str]:
        return {ORIGIN: self.origin} if self.origin else {}

    def _carrier(self, operand: Node) -> Any:
        """Return the fp32 value of an operand; 16-bit inputs are widened at their first use."""
        value = self.env[operand]
        if isinstance(value, tuple):
            placeholder = value[0]
            wide = WIDER[placeholder.meta["dtype"]]
            value = self.env[operand] = self._op(CONVERT, placeholder, wide, dtype=wide)
            value.meta |= {k: v for k, v in placeholder.meta.items() if k == ORIGIN}
        return value

    def _narrow(self, operand: Node) -> Any:
        """Return operand in its own dtype, for an output; exact, since it was rounded before."""
        value, self.origin = self.env[operand], operand.meta.get(ORIGIN)
        if isinstance(value, tuple):
            return value[0]
        dtype = _dtype(operand)
        if dtype in LOW_PRECISION:
            return self._op(CONVERT, value, dtype, dtype=dtype)
        return value

    def _cast(self, node: Node) -> Any:
        source: Node = node.args[0]  # type: ignore[assignment]
        x, to = self._carrier(source), _dtype(node)
        if not isinstance(x, Node):
            return torch.tensor(x, dtype=torch.float64).to(to).item()
        if to not in LOW_PRECISION:
            return x if x.meta["dtype"] == to else self._op(CONVERT, x, to, dtype=to)
        if _dtype(source) == to:
            return x
        if x.meta["dtype"] != WIDER[to]:
            x = self._op(CONVERT, x, WIDER[to], dtype=WIDER[to])
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
        compute = wide = computed_in(dtype)
        if not wide.is_floating_point:  # a comparison
            double = {_dtype(a) for a in node.all_input_nodes} == {torch.float64}
            compute = torch.float64 if double else torch.float32

        def operand(n: Node) -> Any:
            x = self._carrier(n)
            if isinstance(x, Node) and x.meta["dtype"] == torch.float64 != compute:
                return self._op(CONVERT, x, compute, dtype=compute)
            return x

        args = torch.fx.node.map_arg(node.args, operand)
        kwargs = torch.fx.node.map_arg(dict(node.kwargs), operand)
        target = node.target
        if target is aten.where.self:
            numbers = tuple(not isinstance(a, Node) for a in args[1:])
            target = WHERE[numbers]
        new = self._op(target, *args, dtype=wide, **kwargs)
        if dtype in LOW_PRECISION and node.target not in EXACT:
            return self._rounded(new, dtype)
        return new


def _dtype(node: Node) -> torch.dtype:
    dtype: torch.dtype = node.meta["dtype"]
    return dtype
