"""The registry of rules, and what a rule may use to build the expanded graph."""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.fx import Node

Pair = tuple[Node, Node]
"""An expansion in the expanded graph: the nodes of hi and lo."""


class Builder(Protocol):
    """The side of `expand` that rules see. Operands are those of the node being rewritten."""

    dtype: torch.dtype
    """The dtype of the state on whose carried path the node lies."""

    def plain(self, operand: Any) -> Any:
        """Return operand in the new graph; of an expansion the high word; a number as it is."""

    def rounded(self, operand: Any) -> Node:
        """Return a tensor operand rounded to the storage dtype, once."""

    def is_number(self, operand: Any) -> bool:
        """Tell whether operand is a Python number."""

    def op(self, target: Any, *args: Any, dtype: torch.dtype) -> Node:
        """Append an operation with one result."""

    def pair(self, target: Any, *args: Any) -> Pair:
        """Append a collage:: operation that returns an expansion."""

    def again(self, node: Node, args: list[Any], dtype: torch.dtype) -> Node:
        """Append the operation of node on other operands, with its keyword arguments."""

    def joined(self, node: Node) -> None:
        """Note for the plan that node ran as join - op - split."""


Rule = Callable[[Builder, Node, Pair, int], Pair]
"""(builder, node, expansion on the path, its position in node.args) -> expansion."""

RULES: dict[Any, Rule] = {}


def rule(*targets: Any) -> Callable[[Rule], Rule]:
    """Register a rule for these operations; raises ValueError if one of them has a rule."""

    def register(function: Rule) -> Rule:
        for target in targets:
            if target in RULES:
                raise ValueError(f"{target} has a rule already: {RULES[target].__name__}")
            RULES[target] = function
        return function

    return register
