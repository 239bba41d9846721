"""Pass 2: one operation per tensor and one rounding per operation."""

import operator
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from collage_fx.passes.frontend.decompose import (
    DECOMPOSITIONS,
    DIVIDING,
    constant_of,
    like,
    parts_of,
)
from collage_fx.passes.frontend.single_elements import combines_single_elements, returns_operand
from collage_fx.passes.frontend.slice import shape_of
from collage_fx.passes.frontend.whole_reads import read_whole
from collage_fx.passes.ir.graph_memory import ORIGIN, OpOverload, base_of, note_origin
from collage_fx.passes.ir.program import CONVERT, Program, compensable_in, is_tensor, value_of

aten = torch.ops.aten

FOREACH: dict[str, Any] = {
    f"_foreach_{name}": getattr(getattr(aten, name), overload)
    for overload, names in {
        "default": "abs addcdiv addcmul copy exp log maximum minimum neg reciprocal rsqrt sign sqrt"
        " tanh",
        "Tensor": "add clamp_max clamp_min div lerp mul sub",
        "Tensor_Tensor": "pow",
    }.items()
    for name in names.split()
}
"""Operation on lists -> that on one tensor; overloads that differ by the kind of the second operand
all accept a Python number or a tensor there."""

# Where the operand is a Python number these overloads take it.
_WITH_NUMBER: dict[Any, Any] = {
    aten.maximum.default: aten.clamp_min.default,
    aten.minimum.default: aten.clamp_max.default,
    aten.clamp_max.Tensor: aten.clamp_max.default,
    aten.clamp_min.Tensor: aten.clamp_min.default,
    aten.lerp.Tensor: aten.lerp.Scalar,
    aten.pow.Tensor_Tensor: aten.pow.Tensor_Scalar,
}


_WITH_ABS = frozenset({torch.bfloat16, torch.float16, torch.float32, torch.float64})
"""Dtypes of which the absolute value has the dtype itself, and is compared."""
SAME_ELEMENTS = (aten.clone.default, aten.alias.default, aten.expand.default, aten.view.default)
"""Operations that return their operand where nothing is overwritten, if it is laid out alike."""

_WITH_TENSOR = {number: tensor for tensor, number in _WITH_NUMBER.items()}
"""The other way round, where the number is symbolic and becomes a 0-d tensor."""


def single_overload(target: Any, args: tuple[Any, ...]) -> Any:
    """Return the overload of a value of FOREACH that takes these operands, numbers among them."""
    if target is aten.pow.Tensor_Tensor and not isinstance(args[0], Node | Tensor):
        return aten.pow.Scalar
    if target in _WITH_NUMBER and not isinstance(args[-1], Node | Tensor):
        return _WITH_NUMBER[target]
    return target


@cache
def _numbers(op: Any) -> tuple[int, ...]:
    """Return the positions of the arguments of op that are no tensors."""
    return tuple(i for i, a in enumerate(op._schema.arguments) if "Tensor" not in str(a.type))


def _with_tensors(op: Any, args: tuple[Any, ...]) -> Any:
    """Return the overload of op that takes these operands, of which some numbers are now tensors.

    Raises NotImplementedError if there is none: as a number, one would be taken for a constant.
    """
    if op in _WITH_TENSOR and isinstance(args[-1], Node):
        return _WITH_TENSOR[op]
    if not any(isinstance(args[i], Node) for i in _numbers(op) if i < len(args)):
        return op
    if op._overloadname == "Scalar" and "Tensor" in op.overloadpacket.overloads():
        return op.overloadpacket.Tensor
    raise NotImplementedError(f"{op} with a number that changes")


def canonicalize(program: Program) -> None:
    """Rewrite the graph into single-tensor operations that round at most once.

    - `_foreach_*` lists become one node for each tensor.
    - `lerp`, which Dynamo expands into a difference and its multiple, is put together again;
      `prims.fma` becomes addcmul or add.
    - In 16 bits, operations that PyTorch computes in fp32 and rounds once (addcmul, addcdiv, add
      with alpha) become fp32 operations and one conversion, so that the rounding is in the graph.
    - What `split` and `unbind` return are slices, and elements of an axis.
    - What reductions, sorts and views make of single elements is these elements: see
      `single_elements`. Their roundings are then those of the elements, and no comparison of an
      element with the largest, which it is itself, can tell them apart.
    - A copy of an old value is that value, since states are overwritten last: from 2.14 on torch
      leaves clones of overwritten tensors in the graph, where it took them out before.
    - A gradient that is overwritten with zeros has a new value by elements, in the slice that reads
      it.
    - A state that takes over the old value of another has an operation for it, a clone. So has a
      result that begins as a copy of what has memory already: an input, or another result; and a
      value that is stored in two states, where their storages differ and each splits it by itself.

    Before::

        _foreach_addcmul = aten._foreach_addcmul.Scalar([v0, v1], [g0, g1], [g0, g1], 0.001)

    After, for each tensor::

        v32 = prims.convert_element_type(v0, torch.float32)
        g32 = prims.convert_element_type(g0, torch.float32)
        mul = aten.mul.Tensor(g32, 0.001)
        mul_1 = aten.mul.Tensor(mul, g32)
        add = aten.add.Tensor(v32, mul_1)
        v_new = prims.convert_element_type(add, torch.bfloat16)
    """
    # An input that no operation uses may have no value.
    inputs = [n.meta.get("val") for n in program.source.graph.find_nodes(op="placeholder")]
    tensors = [v for v in inputs if isinstance(v, Tensor)]
    builder = _Builder(max(tensors, key=lambda t: t.dim(), default=torch.empty(())))
    builder.results = _memory_of_results(program.source.graph)
    for node in program.source.graph.nodes:
        builder.take(node)
    _one_value_for_each_storage(program, builder.graph)
    _zeros_by_elements(program, builder.graph)
    read_whole(program, builder.graph)
    builder.graph.eliminate_dead_code(
        is_impure_node=lambda n: (
            n.op in ("placeholder", "output") or n.target is aten.copy_.default or n.is_impure()
        )
    )
    program.canonical = GraphModule(program.source, builder.graph)


def _memory_of_results(graph: Graph) -> set[Node]:
    """Return the nodes in whose memory the results of a graph are."""
    results = (n for n in graph.output_node().all_input_nodes if is_tensor(n))
    return {base_of(n, items=False) for n in results if n.target is not aten.copy_.default}


def _one_value_for_each_storage(program: Program, graph: Graph) -> None:
    inputs = graph.find_nodes(op="placeholder")
    storage = {
        inputs[c.index]: compensable_in(c, program.settings.storage) for c in program.carried
    }
    first: dict[Node, str] = {}
    for write in graph.find_nodes(op="call_function", target=aten.copy_.default):
        state, new = write.args
        if state in storage and first.setdefault(new, storage[state]) != storage[state]:
            with graph.inserting_before(write):
                own = graph.call_function(aten.clone.default, (new,))
            kept = ("val", "stack_trace", ORIGIN)
            own.meta = {k: v for k, v in new.meta.items() if k in kept}
            write.args = (state, own)


def _zeros_by_elements(program: Program, graph: Graph) -> None:
    """Have a gradient that is overwritten with zeros belong to the slice that reads it.

    Its new value is abs(g) < 0 as a number, of which each element depends on one of g.
    """
    inputs = graph.find_nodes(op="placeholder")
    gradients = {inputs[c.index] for c in program.carried if c.gradient}
    for write in graph.find_nodes(op="call_function", target=aten.copy_.default):
        g, zeros = write.args
        if g not in gradients or constant_of(zeros) != 0 or shape_of(g) != shape_of(zeros):
            continue
        val = value_of(g)
        if val.dtype not in _WITH_ABS:
            continue
        with graph.inserting_before(write):
            size = graph.call_function(aten.abs.default, (g,))
            never = graph.call_function(aten.lt.Scalar, (size, 0))
            new = graph.call_function(CONVERT, (never, val.dtype))
        for node, dtype in ((size, val.dtype), (never, torch.bool), (new, val.dtype)):
            node.meta = {k: v for k, v in zeros.meta.items() if k in ("stack_trace", ORIGIN)}
            node.meta["val"] = like(val, dtype)
        write.args = (g, new)


def _strides(val: Tensor) -> list[str]:
    # Strings, since a symbolic stride must not be compared as a number: that would add a guard.
    return [str(s) for s in val.stride()]


def _viewed(x: Node, val: Tensor) -> Node | None:
    """Return x, or what it is a view of, that has the shape of val; None if nothing has."""
    shape, base = tuple(val.shape), x
    while base.target is aten.view.default and tuple(value_of(base).shape) != shape:
        base = base.args[0]  # type: ignore[assignment]
    return base if tuple(value_of(base).shape) == shape else None


def _has_symbol(node: Node) -> bool:
    """Return True if an elementwise operation has a symbolic number among its operands."""
    return torch.Tag.pointwise in getattr(node.target, "tags", ()) and any(
        isinstance(a.meta.get("val"), torch.SymFloat) for a in node.all_input_nodes
    )


def _has_known_sizes(vals: Sequence[Tensor]) -> bool:
    """Return True if no size is a symbol, which would stand in no node of the graph."""
    return all(type(size) is int for val in vals for size in val.shape)


class _Builder:
    """Builder of the canonical graph, node by node."""

    def __init__(self, sample: Tensor) -> None:
        self.graph = Graph()
        self.sample = sample
        """A tensor of the graph that is on the device where it computes."""
        self.env: dict[Node, Any] = {}
        self.widened: dict[Node, Node] = {}
        self.origin: Node | None = None
        self.numbers: dict[Node, Node] = {}
        """Symbolic number -> the 0-d tensor that holds it."""
        self.results: set[Node] = set()
        """The nodes of the source graph in whose memory its results are."""
        self.taken: set[Node] = set()
        """Nodes in whose memory such nodes are now."""

    def take(self, node: Node) -> None:
        """Translate one node of the source graph."""
        self.origin = node
        single = combines_single_elements(node)
        given = {a: self.env[a] for a in node.all_input_nodes} if single else {}
        # Read what an operand is a view of, if that has the shape of the result.
        self.env |= {a: _viewed(x, value_of(node)) or x for a, x in given.items()}
        self._translate(node)
        self.env |= given
        if node in self.results and is_tensor(node) and node.op != "placeholder":
            self.env[node] = self._memory_for(node, self.env[node])
            self.taken.add(base_of(self.env[node], items=False))

    def _memory_for(self, node: Node, made: Node) -> Node:
        """Return a result, as a clone where it would be in memory of another.

        So would a copy, of which nothing else is left, and it would be laid out as the other is.
        """
        val = value_of(node)
        if _strides(value_of(made)) != _strides(val):
            layout = torch.contiguous_format if val.is_contiguous() else torch.preserve_format
            return self.call(aten.clone.default, made, val=val, memory_format=layout)
        base = base_of(made, items=False)
        if base in self.taken or base.op == "placeholder":
            return self.call(aten.clone.default, made, val=val)
        return made

    def _translate(self, node: Node) -> None:
        name = node.target._schema.name if isinstance(node.target, OpOverload) else ""
        if node.target is operator.getitem and isinstance(self.env[node.args[0]], list):  # type: ignore[index]
            self.env[node] = self.env[node.args[0]][node.args[1]]  # type: ignore[index]
        elif name.startswith("aten::_foreach_") and name[6:] in FOREACH:
            self.env[node] = self._each(node, FOREACH[name[6:]])
        elif node.target in DIVIDING and _has_known_sizes(node.meta["val"]):
            self.env[node] = self._parts(node)
        elif is_tensor(node) and (
            node.target in DECOMPOSITIONS or node.target in _WITH_TENSOR or _has_symbol(node)
        ):
            args, kwargs = self._map(node.args), self._map(node.kwargs)
            self.env[node] = self._single(node.target, value_of(node), args, kwargs)
        elif node.target in SAME_ELEMENTS and self._is_laid_out_alike(node):
            self.env[node] = self.env[node.args[0]]  # type: ignore[index]
        elif returns_operand(node):
            self.env[node] = self._operand_itself(node)
        elif node.target is aten.copy_.default and self._is_old(node.args[1]):
            written, taken = (self.env[a] for a in node.args[:2])  # type: ignore[index]
            moved = self.call(aten.clone.default, taken, val=value_of(taken))
            self.env[node] = self.graph.call_function(node.target, (written, moved))
            self.env[node].meta = {**node.meta, ORIGIN: node.name}
        else:
            new = self.graph.node_copy(node, lambda n: self.env[n])
            new.meta[ORIGIN] = node.name
            self.env[node] = new

    def _operand_itself(self, node: Node) -> Any:
        """Return the operand in the shape of a result that has its elements.

        Where there are several results, a list; indices of elements are zero.
        """
        vals: Any = node.meta["val"]
        source = self.env[node.args[0]]  # type: ignore[index]
        results: list[Node] = []
        for val in vals if isinstance(vals, list | tuple) else (vals,):
            if val.is_floating_point():
                results.append(self._in_shape_of(val, self.convert(source, val.dtype)))
                continue
            made = {"dtype": val.dtype, "device": val.device}
            results.append(self.call(aten.full.default, list(val.shape), 0, val=val, **made))
        return results if isinstance(vals, list | tuple) else results[0]

    def _in_shape_of(self, val: Tensor, x: Node) -> Node:
        """Return a view of x; where x is a view of what has this shape already, the latter."""
        return _viewed(x, val) or self.call(aten.view.default, x, list(val.shape), val=val)

    def _is_laid_out_alike(self, clone: Node) -> bool:
        """Return True if a clone, `p.data`, or a view, is the very thing it is made of.

        It is where nothing is overwritten.
        """
        source: Any = clone.args[0]
        if not is_tensor(self.env[source]):
            return False
        alike = shape_of(self.env[source]) == shape_of(clone)
        return alike and _strides(value_of(self.env[source])) == _strides(value_of(clone))

    def _is_old(self, node: Any) -> bool:
        """Return True if a node has become an input, or a view of one."""
        return is_tensor(node) and base_of(self.env[node]).op == "placeholder"

    def _map(self, tree: Any) -> Any:
        return torch.fx.node.map_arg(tree, self._operand)

    def _operand(self, node: Node) -> Any:
        """Return the new node for a node; for a symbolic number a 0-d tensor, for slices."""
        new = self.env[node]
        number = node.meta.get("val")
        if not isinstance(number, torch.SymFloat | torch.SymInt):
            return new
        if node not in self.numbers:
            dtype = torch.float64 if isinstance(number, torch.SymFloat) else torch.int64
            val = like(self.sample, dtype).new_empty(())
            target, device = aten.scalar_tensor.default, self.sample.device
            self.numbers[node] = self.call(target, new, val=val, dtype=dtype, device=device)
        return self.numbers[node]

    def _each(self, node: Node, target: Any) -> list[Node]:
        """Return one node for each tensor of a _foreach operation."""
        vals: Sequence[Tensor] = node.meta["val"]
        results = []
        for i, val in enumerate(vals):
            args = [a[i] if isinstance(a, list | tuple) else a for a in node.args]
            args, kwargs = self._map(tuple(args)), self._map(dict(node.kwargs))
            op = single_overload(target, args)
            results.append(self._single(op, val, args, kwargs))
        return results

    def _parts(self, node: Node) -> list[Node]:
        """Return one node for each part that an operation divides a tensor into."""
        vals, (x, *given) = node.meta["val"], node.args
        assert isinstance(x, Node)
        parts = parts_of(node.target, self.env[x], given, vals)
        return [self.call(*one, val=val) for one, val in zip(parts, vals, strict=True)]

    def _single(self, op: Any, val: Tensor, args: Any, kwargs: Any) -> Any:
        op = _with_tensors(op, args)
        if op in DECOMPOSITIONS:
            return DECOMPOSITIONS[op](self, val, *args, **kwargs)
        return self.call(op, *args, val=val, **kwargs)

    def call(self, target: Any, *args: Any, val: Tensor, **kwargs: Any) -> Node:
        """Append a node that has the value val and the provenance of the node being translated."""
        node = self.graph.call_function(target, args, kwargs)
        node.meta["val"] = val
        note_origin(node, self.origin)
        return node

    def convert(self, x: Node, dtype: torch.dtype) -> Node:
        """Return x in dtype."""
        val = value_of(x)
        if val.dtype == dtype:
            return x
        if x not in self.widened or value_of(self.widened[x]).dtype != dtype:
            self.widened[x] = self.call(CONVERT, x, dtype, val=like(val, dtype))
        return self.widened[x]
