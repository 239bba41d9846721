"""A step that multiplies gradients by a number before it reads them, or leaves zeros there.

Dynamo traces the product with the step, so that kernels multiply in registers. Where Python does
the step, to be recorded, each gradient is replaced by the product for as long as the step takes.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer

from collage_fx.gradients.norm import gradients_of
from collage_fx.optimizer.ownership import family, params_of, source_name
from collage_fx.passes.dedup.graph_scan import memory_of, overwrites
from collage_fx.runtime.errors import UnsupportedError
from collage_fx.runtime.residuals.dtensor import shard_of
from collage_fx.runtime.residuals.memory import has_memory
from collage_fx.runtime.residuals.residual import version
from collage_fx.runtime.trees import tree_leaves

FACTOR = "_collage_factor"
"""Attribute of an optimizer within a step: the 0-d tensor that gradients are multiplied with."""
MULTIPLIED = "_collage_multiplied"
"""Attribute of an optimizer within a step: `Multiplied`, of the same step."""


class Multiplied:
    """Gradients that a recorded step has products of, and reads nowhere else."""

    def __init__(self) -> None:
        self.storages: dict[int, StorageWeakRef] = {}
        self.factors: set[int] = set()
        """The storages of what they are multiplied by."""

    def note(self, gradient: Tensor, factor: Tensor) -> None:
        """Note a gradient of which a product is made."""
        shard = shard_of(gradient)
        if has_memory(shard):
            storage = shard.untyped_storage()
            self.storages[storage._cdata] = StorageWeakRef(storage)
            self.factors.add(factor.untyped_storage()._cdata)

    def refuse(self, func: Any, read: Iterable[Tensor], where: Callable[[], str]) -> None:
        """Raise UnsupportedError if an operation reads a gradient that is to be multiplied.

        Args:
            func: the operation.
            read: its operands, but for those that it overwrites.
            where: returns the line of code that calls it.
        """
        keys = {t.untyped_storage()._cdata for t in read if has_memory(t)}
        found = map(self.storages.get, keys)
        if not any(storage is not None and not storage.expired() for storage in found):
            return
        if func is torch.ops.aten.mul.Tensor and not keys.isdisjoint(self.factors):
            return
        raise UnsupportedError(
            f"clip_grad_norm: {func} reads the memory of a gradient, though not by way of p.grad, "
            f"at {where()}, so that it would not be clipped: clip the gradients before the step"
        )


def with_gradients(step: Callable[..., Any], *, zeros: bool) -> Callable[..., Any]:
    """Return a step that multiplies gradients by `FACTOR`, where its optimizer has one.

    Args:
        step: the function of an optimizer's class, or one put around it.
        zeros: whether gradients are zero after it.
    """

    @functools.wraps(step)
    def step_with_gradients(self: Any, *args: Any, **kwargs: Any) -> Any:
        factor = getattr(self, FACTOR, None)
        if not torch.compiler.is_dynamo_compiling():
            return _in_python(step, self, args, kwargs, zeros=zeros)
        # Dynamo looks into a function that it has not been given only if that names torch.
        if torch.is_tensor(factor):
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.grad.mul_(factor)
        result = step(self, *args, **kwargs)
        if zeros:
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.grad.zero_()
        return result

    return step_with_gradients


@torch.compiler.disable(recursive=False)  # what is beneath may be traced
def _in_python(
    step: Callable[..., Any], optimizer: Any, args: Any, kwargs: dict[str, Any], *, zeros: bool
) -> Any:
    factor = getattr(optimizer, FACTOR, None)
    if factor is None:
        result = step(optimizer, *args, **kwargs)
    else:
        products = _Products(optimizer, factor)
        args = map(products.around, args)
        kwargs = {name: products.around(value) for name, value in kwargs.items()}
        products.put()
        try:
            result = step(optimizer, *args, **kwargs)
        finally:
            products.take_back()
    if zeros:
        zero_gradients(optimizer)
    return result


@torch.no_grad()
def zero_gradients(optimizer: Optimizer) -> None:
    """Overwrite the gradients of an optimizer with zeros."""
    for g in gradients_of(optimizer):
        g.zero_()


class _Products:
    """The gradients of an optimizer multiplied by a number, in the places of the gradients."""

    def __init__(self, optimizer: Optimizer, factor: Tensor) -> None:
        self.params = {id(p): p for one in family(optimizer) for p in params_of(one)}.values()
        self.factor = factor
        self.multiplied: Multiplied = vars(optimizer)[MULTIPLIED]
        self.made: dict[int, tuple[Tensor, Tensor, int]] = {}
        """Gradient, by its id, with the product and the version of that."""

    @torch.compiler.disable
    @torch.no_grad()
    def put(self) -> None:
        """Put the products in the places of gradients."""
        self.made.clear()
        for p in self.params:
            if (g := p.grad) is None:
                continue
            if id(g) not in self.made:
                factor = self.factor.to(g.device)
                self.multiplied.note(g, factor)
                product = _product(g, factor)
                self.made[id(g)] = g, product, version(product)
            p.grad = self.made[id(g)][1]

    @torch.compiler.disable
    @torch.no_grad()
    def take_back(self) -> None:
        """Put the gradients back; what was written to a product is written to its gradient."""
        gradients = {id(product): g for g, product, _ in self.made.values()}
        for p in self.params:
            if (g := gradients.get(id(p.grad))) is not None:
                p.grad = g
        for g, product, before in self.made.values():
            if version(product) != before:
                g.copy_(product)
        self.made.clear()

    def around(self, argument: Any) -> Any:
        """Return an argument of the step; a closure, which computes gradients, with them back."""
        if not callable(argument):
            return argument

        def computing(*args: Any, **kwargs: Any) -> Any:
            self.take_back()
            result = argument(*args, **kwargs)
            self.put()
            return result

        return computing


@torch.no_grad()
def multiply(optimizer: Optimizer) -> None:
    """Multiply the gradients of an optimizer by `FACTOR`, in place, if it has one."""
    if (factor := vars(optimizer).get(FACTOR)) is not None:
        for g in gradients_of(optimizer):
            g.mul_(factor.to(g.device))


def _product(gradient: Any, factor: Any) -> Any:
    """Return the product, in the dtype of the gradient: that of two 0-d tensors would be wider."""
    if gradient.dim():
        return torch.mul(gradient, factor)
    return torch.mul(gradient.unsqueeze(0), factor).squeeze(0)


def multiply_apart(gm: GraphModule) -> bool:
    """Have a Dynamo graph leave the gradients that it multiplies by `FACTOR` as they are, in place.

    Before::

        grad.mul_(factor)
        exp_avg.lerp_(grad, 0.1)

    After::

        mul = torch.mul(grad, factor)
        exp_avg.lerp_(mul, 0.1)

    A gradient that the step itself writes is left alone: what it writes is the user's.

    Returns:
        whether there is such a product.
    """
    inputs = {n for n in gm.graph.find_nodes(op="placeholder") if _is_factor(n)}
    found = [n for n in gm.graph.find_nodes(op="call_method", target="mul_") if n.args[1] in inputs]
    if not found:
        return False
    written = _overwritten(gm, set(found))
    apart: dict[Node, Node] = {}
    for node in found:
        gradient = node.args[0]
        assert isinstance(gradient, Node)
        if memory_of(gradient.meta["example_value"]) in written:
            continue
        if gradient not in apart:  # a parameter may be in its group twice
            readers = [user for user in gradient.users if user is not node and _is_read(user)]
            with gm.graph.inserting_before(node):
                product = _append_product(gm.graph, node)
            apart[gradient] = product
            for user in readers:
                user.replace_input_with(gradient, product)
        node.replace_all_uses_with(apart[gradient])
        gm.graph.erase_node(node)
    gm.recompile()
    return True


def _append_product(graph: Graph, node: Node) -> Node:
    """Append what `_product` does to the operands of an operation in a Dynamo graph."""
    gradient, factor = node.args
    assert isinstance(gradient, Node)
    value = gradient.meta["example_value"]
    if value.dim():
        product = graph.call_function(torch.mul, node.args)
        product.meta = dict(node.meta)
        return product
    row = graph.call_function(torch.unsqueeze, (gradient, 0))
    wide = graph.call_function(torch.mul, (row, factor))
    product = graph.call_function(torch.squeeze, (wide, 0))
    with torch.no_grad():
        rows = value.unsqueeze(0), torch.empty_like(value).unsqueeze(0)
    for made, example in zip((row, wide, product), (*rows, rows[1].squeeze(0)), strict=True):
        made.meta = {**node.meta, "example_value": example}
    return product


def _is_factor(node: Node) -> bool:
    return source_name(getattr(node, "_dynamo_source", None)).endswith(f".{FACTOR}")


def _overwritten(gm: GraphModule, products: set[Node]) -> set[int]:
    """Return the memory that a graph overwrites, but by these operations or by zeros at the end."""
    found: set[int] = set()
    ends = True
    for node in reversed(gm.graph.nodes):
        if node.op == "output" or node in products:
            continue
        ends &= node.op == "call_method" and node.target == "zero_" and not node.users
        if ends or not node.op.startswith("call"):
            continue
        targets = node.args[:1] if overwrites(node) else ()
        given = (targets, node.kwargs.get("out"))
        written = (n.meta.get("example_value") for n in tree_leaves(given) if isinstance(n, Node))
        found |= {memory_of(t) for t in tree_leaves(list(written)) if isinstance(t, Tensor)}
    return found


def _is_read(user: Node) -> bool:
    """Return True if an operation does more with a gradient than to overwrite it with zeros."""
    return not (user.op == "call_method" and user.target == "zero_")
