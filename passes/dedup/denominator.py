"""Before AOTAutograd: keep a quotient finite where a learning rate is 0.

For a step that is compiled or captured torch.optim's Adam and AdamW compute, one tensor at a time,
with step_size = lr / bias_correction1,

    param += exp_avg / (sqrt(v) / (bias_correction2_sqrt * -step_size) + eps / -step_size)

which is eager's `-step_size * exp_avg / (sqrt(v) / bias_correction2_sqrt + eps)` for every rate but
0: there eps / -0 is infinite, 0 / -0 is NaN, and so is the parameter wherever v is 0. See
docs/stock-defects.md.
"""

import operator
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node


def one_denominator(gm: GraphModule) -> None:
    """Rewrite a / (b * s) + c / s, s being 0-d and c a number, to (a / b + c) / s, in place.

    In torch.optim's own code only: of a user's formula the result is what the user gets in eager
    PyTorch.

    Before::

        mul = bias_correction2_sqrt * step_size_neg
        truediv = sqrt / mul
        truediv_1 = 1e-08 / step_size_neg
        denom = truediv.add_(truediv_1)

    After::

        truediv = sqrt / bias_correction2_sqrt
        add_ = truediv.add_(1e-08)
        denom = add_ / step_size_neg

    Args:
        gm: a Dynamo graph, whose tensors are `meta["example_value"]`.
    """
    found = [node for node in gm.graph.nodes if _matches(node)]
    for node in found:
        _rewrite(gm.graph, node)
    if found:
        gm.recompile()


def _matches(node: Node) -> bool:
    """Return True if a node adds such quotients, the first being used for nothing else."""
    if node.op != "call_method" or node.target != "add_" or len(node.args) != 2 or node.kwargs:
        return False
    first, second = node.args
    if not (_is(first, operator.truediv) and _is(second, operator.truediv)):
        return False
    product, (number, divisor) = first.args[1], second.args
    return (
        "/torch/optim/" in node.meta.get("stack_trace", "")
        and _number(number)
        and _is(product, operator.mul)
        and product.args[1] is divisor
        and _scalar(divisor)
        and _scalar(product.args[0])
        and set(first.users) == {node}
    )


def _rewrite(graph: Graph, node: Node) -> None:
    first, second = node.all_input_nodes
    (a, product), (number, divisor) = first.args, second.args
    assert isinstance(product, Node)
    first.args = (a, product.args[0])
    node.args = (first, number)
    with graph.inserting_after(node):
        quotient = graph.call_function(operator.truediv, (node, divisor))
    quotient.meta = dict(node.meta)
    node.replace_all_uses_with(quotient, lambda user: user is not quotient)
    for old in (product, second):
        if not old.users:
            graph.erase_node(old)


def _is(x: Any, function: Any) -> TypeGuard[Node]:
    return isinstance(x, Node) and x.target is function


def _number(x: Any) -> bool:
    """Return True if an operand is a number, or the symbol of one that changes."""
    value = x.meta.get("example_value") if isinstance(x, Node) else x
    return isinstance(value, int | float | torch.SymInt | torch.SymFloat)


def _scalar(x: Any) -> bool:
    value = x.meta.get("example_value") if isinstance(x, Node) else None
    return isinstance(value, Tensor) and value.dim() == 0
