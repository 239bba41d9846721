"""Pass 2: one operation per tensor and one rounding per operation."""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._inductor.inductor_prims  # registers torch.ops.prims.fma
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from collage_fx.passes.program import LOW_PRECISION, Program, is_tensor, value_of
from collage_fx.runtime.eft import WIDER

aten, prims = torch.ops.aten, torch.ops.prims

# _foreach_<name> -> the operation on one tensor; overloads that differ by the second operand's kind
# all accept a Python number or a tensor there.
_FOREACH: dict[str, Any] = {
    "_foreach_abs": aten.abs.default,
    "_foreach_add": aten.add.Tensor,
    "_foreach_addcdiv": aten.addcdiv.default,
    "_foreach_addcmul": aten.addcmul.default,
    "_foreach_clamp_max": aten.clamp_max.Tensor,
    "_foreach_clamp_min": aten.clamp_min.Tensor,
    "_foreach_copy": aten.copy.default,
    "_foreach_div": aten.div.Tensor,
    "_foreach_exp": aten.exp.default,
    "_foreach_lerp": aten.lerp.Tensor,
    "_foreach_log": aten.log.default,
    "_foreach_maximum": aten.maximum.default,
    "_foreach_minimum": aten.minimum.default,
    "_foreach_mul": aten.mul.Tensor,
    "_foreach_neg": aten.neg.default,
    "_foreach_norm": aten.linalg_vector_norm.default,
    "_foreach_pow": aten.pow.Tensor_Tensor,
    "_foreach_reciprocal": aten.reciprocal.default,
    "_foreach_rsqrt": aten.rsqrt.default,
    "_foreach_sign": aten.sign.default,
    "_foreach_sqrt": aten.sqrt.default,
    "_foreach_sub": aten.sub.Tensor,
    "_foreach_tanh": aten.tanh.default,
}
# Where the operand is a Python number these overloads take it.
_WITH_NUMBER: dict[Any, Any] = {
    aten.clamp_max.Tensor: aten.clamp_max.default,
    aten.clamp_min.Tensor: aten.clamp_min.default,
    aten.lerp.Tensor: aten.lerp.Scalar,
    aten.pow.Tensor_Tensor: aten.pow.Tensor_Scalar,
}


def canonicalize(program: Program) -> None:
    """Rewrite the graph into single-tensor operations that round at most once.

    - `_foreach_*` lists become one node for each tensor.
    - `lerp`, which Dynamo expands into a difference and its multiple, is put together again;
      `prims.fma` becomes addcmul or add.
    - In 16 bits, operations that PyTorch computes in fp32 and rounds once (addcmul, addcdiv, add
      with alpha) become fp32 operations and one conversion, so that the rounding is in the graph.

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
    builder = _Builder()
    for node in program.source.graph.nodes:
        builder.take(node)
    builder.graph.eliminate_dead_code(
        is_impure_node=lambda n: (
            n.op in ("placeholder", "output") or n.target is aten.copy_.default or n.is_impure()
        )
    )
    program.canonical = GraphModule(program.source, builder.graph)


class _Builder:
    """Builds the canonical graph node by node."""

    def __init__(self) -> None:
        self.graph = Graph()
        self.env: dict[Node, Any] = {}
        self.widened: dict[Node, Node] = {}
        self.origin: Node | None = None

    def take(self, node: Node) -> None:
        """Translate one node of the source graph."""
        self.origin = node
        name = node.target._schema.name if isinstance(node.target, torch._ops.OpOverload) else ""
        if node.target is operator.getitem and isinstance(self.env[node.args[0]], list):  # type: ignore[index]
            self.env[node] = self.env[node.args[0]][node.args[1]]  # type: ignore[index]
        elif name.startswith("aten::_foreach_") and name[6:] in _FOREACH:
            self.env[node] = self._each(node, _FOREACH[name[6:]])
        elif node.target in _DECOMPOSED and is_tensor(node):
            args, kwargs = self._map(node.args), self._map(node.kwargs)
            self.env[node] = _DECOMPOSED[node.target](self, value_of(node), *args, **kwargs)
        else:
            new = self.graph.node_copy(node, lambda n: self.env[n])
            self.env[node] = new

    def _map(self, tree: Any) -> Any:
        return torch.fx.node.map_arg(tree, lambda n: self.env[n])

    def _each(self, node: Node, target: Any) -> list[Node]:
        """Return one node for each tensor of a _foreach operation."""
        vals: Sequence[Tensor] = node.meta["val"]
        results = []
        for i, val in enumerate(vals):
            args = [a[i] if isinstance(a, list | tuple) else a for a in node.args]
            args, kwargs = self._map(tuple(args)), self._map(dict(node.kwargs))
            op = target
            if target is aten.pow.Tensor_Tensor and not isinstance(args[0], Node):
                op = aten.pow.Scalar
            elif target in _WITH_NUMBER and not isinstance(args[-1], Node):
                op = _WITH_NUMBER[target]
            if op in _DECOMPOSED:
                results.append(_DECOMPOSED[op](self, val, *args, **kwargs))
            else:
                results.append(self.call(op, *args, val=val, **kwargs))
        return results

    def call(self, target: Any, *args: Any, val: Tensor, **kwargs: Any) -> Node:
        """Append a node that has the value val and the provenance of the node being translated."""
        node = self.graph.call_function(target, args, kwargs)
        node.meta["val"] = val
        if self.origin is not None and "stack_trace" in self.origin.meta:
            node.meta["stack_trace"] = self.origin.meta["stack_trace"]
        return node

    def convert(self, x: Node, dtype: torch.dtype) -> Node:
        """Return x in dtype."""
        val = value_of(x)
        if val.dtype == dtype:
            return x
        if x not in self.widened or value_of(self.widened[x]).dtype != dtype:
            self.widened[x] = self.call(
                prims.convert_element_type.default, x, dtype, val=_as(val, dtype)
            )
        return self.widened[x]

    def once(self, out: Tensor, build: Callable[..., Node], *operands: Any) -> Node:
        """Compute build(wide, *operands) in the precision that PyTorch uses and round it once."""
        if out.dtype not in LOW_PRECISION:
            return build(out, *operands)
        wide = WIDER[out.dtype]
        widened = [x if _is_scalar(x, out) else self.convert(x, wide) for x in operands]
        return self.convert(build(_as(out, wide), *widened), out.dtype)


def _is_scalar(x: Any, out: Tensor) -> bool:
    return not isinstance(x, Node) or (value_of(x).dim() == 0 and out.dim() > 0)


def _as(val: Tensor, dtype: torch.dtype) -> Tensor:
    mode = getattr(val, "fake_mode", None)
    if mode is None:
        return val.to(dtype)
    with mode:
        return torch.empty_strided(val.size(), val.stride(), dtype=dtype, device=val.device)


def _constant(x: Any) -> float | None:
    """Return the number that a full() node holds everywhere, or None."""
    if isinstance(x, Node) and x.target is aten.full.default and isinstance(x.args[1], int | float):
        return x.args[1]
    return None


def _scaled(b: _Builder, wide: Tensor, x: Node, scale: Any) -> Node:
    """Return x * scale in the dtype of wide, or x itself when scale is one."""
    return x if scale == 1 else b.call(aten.mul.Tensor, x, scale, val=_like(wide, x))


def _like(wide: Tensor, x: Node) -> Tensor:
    return _as(value_of(x), wide.dtype)


def _add(b: _Builder, out: Tensor, x: Any, y: Any, *, alpha: Any = 1) -> Node:
    return _add_or_sub(b, out, aten.add.Tensor, x, y, alpha)


def _sub(b: _Builder, out: Tensor, x: Any, y: Any, *, alpha: Any = 1) -> Node:
    return _add_or_sub(b, out, aten.sub.Tensor, x, y, alpha)


def _add_or_sub(b: _Builder, out: Tensor, op: Any, x: Any, y: Any, alpha: Any) -> Node:
    x, y = _scalar(x, out), _scalar(y, out)
    if not isinstance(y, Node):
        return _binary(b, out, op, x, y * alpha)
    if op is aten.add.Tensor:
        polyfill = _lerp(x, y, alpha) or (_lerp(y, x, 1) if alpha == 1 else None)
        if polyfill:
            op = aten.lerp.Tensor if isinstance(polyfill[2], Node) else aten.lerp.Scalar
            return b.call(op, *polyfill, val=out)
    if alpha == 1:
        return _binary(b, out, op, x, y)
    return b.once(out, lambda wide, x, y: b.call(op, x, _scaled(b, wide, y, alpha), val=wide), x, y)


def _binary(b: _Builder, out: Tensor, op: Any, x: Any, y: Any) -> Node:
    """Keep an operation of two tensors; with a scalar, which eager PyTorch may round, go wide."""
    if _is_scalar(x, out) or _is_scalar(y, out):
        return b.once(out, lambda wide, x, y: b.call(op, x, y, val=wide), x, y)
    return b.call(op, x, y, val=out)


def _lerp(x: Any, y: Any, weight: Any) -> tuple[Node, Node, Any] | None:
    """Return (x, end, w) if x + weight*y is lerp(x, end, w) as Dynamo's polyfills write it.

    That is y = end - x with the weight beside it, or y = w * (end - x).
    """
    if isinstance(y, Node) and y.target is aten.mul.Tensor and weight == 1:
        y, weight = y.args  # a scalar stands second, by _mul
    if not isinstance(y, Node) or y.target is not aten.sub.Tensor or y.args[1] is not x:
        return None
    end = y.args[0]
    if not isinstance(end, Node) or not isinstance(x, Node):
        return None
    known = isinstance(weight, float)
    scalar = isinstance(weight, Node) and value_of(weight).dim() == 0 and value_of(x).dim() > 0
    return (x, end, weight) if known or scalar else None


def _scalar(x: Any, out: Tensor) -> Any:
    """Return the number that x is everywhere, if it is a constant and out is not 0-d, or x."""
    number = _constant(x) if out.dim() and isinstance(x, Node) and not value_of(x).dim() else None
    return x if number is None else number


def _mul(b: _Builder, out: Tensor, x: Any, y: Any) -> Node:
    x, y = _scalar(x, out), _scalar(y, out)
    if _is_scalar(x, out):  # eager PyTorch rounds a scalar that comes first, and not one behind
        x, y = y, x
    return b.call(aten.mul.Tensor, x, y, val=out)


def _where(b: _Builder, out: Tensor, condition: Any, x: Any, y: Any) -> Node:
    known = _constant(condition)
    if known is None:
        return b.call(aten.where.self, condition, x, y, val=out)
    chosen: Node = x if known else y
    same = value_of(chosen).shape == out.shape and value_of(chosen).dtype == out.dtype
    return chosen if same else b.call(aten.where.self, condition, x, y, val=out)


def _addcmul(
    b: _Builder, out: Tensor, x: Node, t1: Any, t2: Any, *extra: Any, value: Any = 1
) -> Node:
    value = extra[0] if extra else value
    for weight, other in ((t1, t2), (t2, t1)):
        if _constant(weight) is not None:
            return _add(b, out, x, other, alpha=_constant(weight) * value)
    return b.once(
        out,
        lambda wide, x, t1, t2: b.call(
            aten.add.Tensor,
            x,
            b.call(aten.mul.Tensor, _scaled(b, wide, t1, value), t2, val=wide),
            val=wide,
        ),
        *(x, t1, t2),
    )


def _addcdiv(
    b: _Builder, out: Tensor, x: Node, t1: Node, t2: Node, *extra: Any, value: Any = 1
) -> Node:
    value = extra[0] if extra else value
    return b.once(
        out,
        lambda wide, x, t1, t2: b.call(
            aten.add.Tensor,
            x,
            b.call(aten.div.Tensor, _scaled(b, wide, t1, value), t2, val=wide),
            val=wide,
        ),
        *(x, t1, t2),
    )


def _fma(b: _Builder, out: Tensor, x: Any, y: Any, z: Any) -> Node:
    if isinstance(x, int | float):
        x, y = y, x
    if not isinstance(z, Node) or not isinstance(x, Node):
        return b.call(prims.fma.default, x, y, z, val=out)
    if isinstance(y, Node):
        return _addcmul(b, out, z, x, y)
    if x.target is aten.mul.Tensor and all(isinstance(a, Node) for a in x.args):
        return _addcmul(b, out, z, *x.args, value=y)
    return _add(b, out, z, x, alpha=y)


def _copy(b: _Builder, out: Tensor, x: Node, source: Any, *_: Any, **__: Any) -> Node:
    if isinstance(source, Node) and value_of(source).shape == out.shape:
        return b.convert(source, out.dtype)
    return b.call(aten.copy.default, x, source, val=out)


_DECOMPOSED: dict[Any, Callable[..., Node]] = {
    aten.add.Tensor: _add,
    aten.sub.Tensor: _sub,
    aten.mul.Tensor: _mul,
    aten.where.self: _where,
    aten.div.Tensor: lambda b, out, x, y: _binary(b, out, aten.div.Tensor, x, y),
    aten.pow.Tensor_Scalar: lambda b, out, x, y: _binary(b, out, aten.pow.Tensor_Scalar, x, y),
    aten.addcmul.default: _addcmul,
    aten.addcdiv.default: _addcdiv,
    aten.copy.default: _copy,
    aten._to_copy.default: lambda b, out, x, **_: b.convert(x, out.dtype),
    prims.convert_element_type.default: lambda b, out, x, dtype: b.convert(x, dtype),
    prims.fma.default: _fma,
}
