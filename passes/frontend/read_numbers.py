"""Before AOTAutograd: numbers that a step reads back by `item()` become tensors again.

Dynamo traces `tensor.item()`, and the arithmetic of Python on what it gives, as symbols. As tensors
of float64, in which Python computes, and without dimensions, these are values of the graph like all
others: nothing waits for their data, and what has low words is read with them.
"""

import builtins
import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from collage_fx.runtime.torch_private import (
    inductor_prims as inductor_prims,  # registers torch.ops.prims.fma
)


class CannotRead(Exception):
    """A number that a step reads back enters what takes no tensor in its place."""


def read_numbers(gm: GraphModule) -> None:
    """Compute the numbers that a graph reads back as tensors of float64, in place.

    Raises CannotRead where one enters anything but arithmetic; the graph is spoiled then.

    Before::

        item = norm.item()
        truediv = item / 8.0
        sym_max = torch.sym_max(1.0, truediv)
        add_ = param.add_(update, alpha=sym_max)

    After::

        to = norm.to(torch.float64, copy=True)
        truediv = to / 8.0
        gt = truediv > 1.0
        where = torch.where(gt, truediv, 1.0)
        mul = update * where
        add_ = param.add_(mul)

    Args:
        gm: a Dynamo graph, whose values are `meta["example_value"]`.
    """
    read: set[Node] = set()
    for node in list(gm.graph.nodes):
        if _is_read(node) or not read.isdisjoint(node.all_input_nodes):
            with gm.graph.inserting_before(node):
                new = _Rewriter(gm.graph, node).as_in_step()
            if isinstance(node.meta.get("example_value"), torch.SymFloat):
                read.add(new)
            node.replace_all_uses_with(new)
            gm.graph.erase_node(node)
    gm.recompile()


def reads_numbers(gm: GraphModule) -> bool:
    """Return True if a graph reads numbers back from tensors."""
    return any(map(_is_read, gm.graph.nodes))


def _is_read(node: Node) -> bool:
    """Return True if a node reads a number back, and not one that Dynamo has put into a tensor."""
    if node.op != "call_method" or node.target != "item":
        return False
    (source,) = node.all_input_nodes
    return not getattr(source.meta.get("grapharg"), "pass_arg_as_tensor", False)


_TORCH: Any = torch
_SAME = (
    *(operator.neg, operator.add, operator.sub, operator.mul, operator.truediv, operator.pow),
    *(torch.add, torch.sub, torch.mul, torch.div),  # Dynamo of torch 2.11 multiplies by `alpha`
)
_ROOT = {_TORCH._sym_sqrt: torch.sqrt}  # of math.sqrt
_ARITHMETIC: dict[Any, Any] = {**dict(zip(_SAME, _SAME, strict=True)), **_ROOT}
"""Operation on numbers -> the one that does the same to tensors."""
_CHOICES: dict[Any, Any] = {
    **dict.fromkeys((torch.sym_max, builtins.max), operator.gt),
    **dict.fromkeys((torch.sym_min, builtins.min), operator.lt),
}
"""Choice of one of two numbers -> the comparison by which it takes the second: as Python does,
to which a comparison with NaN is false."""
_FMA = torch.ops.prims.fma.default
_META = ("stack_trace", "nn_module_stack", "source_fn_stack")


def _enters_arithmetic(node: Node) -> bool:
    """Return True if what reads a value without dimensions takes it in any dtype."""
    promoted = [node]  # it grows
    for user in (user for one in promoted for user in one.users):
        target: Any = user.target
        name = target if isinstance(target, str) else getattr(target, "__name__", "")
        if name.removesuffix("_") not in _PROMOTING:
            return False
        value = user.meta.get("example_value")
        if isinstance(value, Tensor) and not value.dim() and user not in promoted:
            promoted.append(user)
    return True


_PROMOTING = frozenset(
    {
        *("add", "sub", "rsub", "mul", "div", "truediv", "true_divide", "maximum", "minimum"),
        *("neg", "abs", "pow", "sqrt", "rsqrt", "square"),
    }
)
"""Operations that take operands of any dtypes."""


class _Rewriter:
    """Rewriter of a node that reads a number back, or takes one that was read."""

    def __init__(self, graph: Graph, node: Node) -> None:
        self.graph, self.node = graph, node
        examples = (n.meta["example_value"] for n in node.all_input_nodes)
        self.mode: Any = next(x.fake_mode for x in examples if hasattr(x, "fake_mode"))

    def as_in_step(self) -> Node:
        """Return the node that does the same on tensors.

        A tensor without dimensions is promoted by another one, but not by a number. Arithmetic goes
        on with what is wider; raises CannotRead where it is read by anything else.
        """
        new, old = self.of_tensors(), self.node.meta.get("example_value")
        wider = isinstance(old, Tensor) and new.meta["example_value"].dtype != old.dtype
        if wider and not _enters_arithmetic(self.node):
            raise CannotRead
        return new

    def of_tensors(self) -> Node:
        """Return the node that does the same on tensors."""
        target: Any = self.node.target
        args, kwargs = self.node.args, self.node.kwargs
        if _is_read(self.node):
            return self._read(*self.node.all_input_nodes)
        if target in _CHOICES and len(args) == 2:
            first, second = args
            return self._call(torch.where, self._call(_CHOICES[target], second, first), *args[::-1])
        if target is _FMA:
            a, b, x = args
            return self._call(operator.add, x, self._call(operator.mul, a, b))
        if target in _ARITHMETIC and not kwargs:
            return self._call(_ARITHMETIC[target], *args)
        if self.node.op == "call_method":
            return self._method(str(target), args, dict(kwargs))
        raise CannotRead

    def _read(self, source: Node) -> Node:
        value, number = source.meta["example_value"], self.node.meta["example_value"]
        # Of an input of float64 Dynamo reads the old value, also where it is overwritten before.
        if not isinstance(number, torch.SymFloat) or hint_of(number) is not None:
            raise CannotRead
        if value.dim() or value.requires_grad:
            raise CannotRead
        return self._call("to", source, torch.float64, copy=True)  # it may be overwritten

    def _method(self, target: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Node:
        """Return a method of tensors with its number as a factor, as far as it has one."""
        name = target.removesuffix("_")
        add, scale = target.replace(name, "add"), kwargs.pop("alpha", kwargs.pop("value", None))
        if kwargs:
            raise CannotRead
        if name in ("mul", "div") and scale is None:
            return self._call(target, *args)
        if name in ("add", "sub"):
            return self._call(target, args[0], self._times(args[1], scale))
        if name == "lerp" and len(args) == 3:
            gap = self._call(operator.sub, args[1], args[0])
            return self._call(add, args[0], self._times(gap, args[2]))
        if name in ("addcmul", "addcdiv"):
            both = self._call(operator.mul if name == "addcmul" else operator.truediv, *args[1:])
            return self._call(add, args[0], self._times(both, scale))
        raise CannotRead

    def _times(self, x: Any, scale: Any) -> Any:
        return x if scale is None else self._call(operator.mul, x, scale)

    def _lifted(self, a: Any) -> Any:
        """Return an operand, one that is a symbol for an input as a tensor."""
        if not isinstance(a, Node) or not isinstance(a.meta["example_value"], torch.SymFloat):
            return a
        return self._made(operator.add, self._made(torch.tensor, 0.0, dtype=torch.float64), a)

    def _call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        return self._made(target, *map(self._lifted, args), **kwargs)

    def _made(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        op = "call_method" if isinstance(target, str) else "call_function"
        new = self.graph.create_node(op, target, args, kwargs)
        new.meta = {k: v for k, v in self.node.meta.items() if k in _META}
        values = [a.meta["example_value"] if isinstance(a, Node) else a for a in args]
        do = getattr(Tensor, target) if isinstance(target, str) else target
        try:
            with self.mode, torch.no_grad():
                new.meta["example_value"] = do(*values, **kwargs)
        except Exception as error:  # whatever an operation's own check of its operands raises
            raise CannotRead from error
        return new


def hint_of(number: torch.SymInt | torch.SymFloat) -> float | None:
    """Return its value where the graph is compiled, without a guard; None if it has none."""
    hint: float | None = number.node.hint
    return hint
