"""The registry of rules, and what a rule may use to build the expanded graph."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.fx import Node

Pair = tuple[Node, Node]
"""An expansion in the expanded graph: the nodes of hi and lo."""


@dataclass(frozen=True)
class Decayed:
    """An expansion that was multiplied by a factor near one, x + (factor - 1)*x, not yet added up.

    A decay is mostly followed by the update. The terms of both are added to each other in the wide
    dtype and then to the expansion, once: one rounding less, and no factor whose distance from one
    is rounded. The Collage paper folds weight decay into the update for the same reason.
    """

    pair: Pair
    term: Node
    """(factor - 1) * x, of the wide dtype."""
    small: bool
    """Whether the term is at most 5u of x, so that rounding it to one float costs no more than the
    5u^2 of a product."""


Expanded = Pair | Decayed


class Builder(Protocol):
    """The side of `expand` that rules see. Operands are those of the node being rewritten."""

    dtype: torch.dtype
    """The dtype of the state on whose carried path the node lies."""

    def plain(self, operand: Any) -> Any:
        """Return operand in the new graph; of an expansion one value; a number as it is."""

    def rounded(self, operand: Any) -> Node:
        """Return a tensor operand rounded to the storage dtype, once."""

    def narrowed(self, node: Node) -> Node:
        """Return a node of the new graph rounded to the storage dtype, once."""

    def widened(self, operand: Any) -> Any:
        """Return a 16-bit tensor operand in the wide dtype; any other operand as it is."""

    def is_number(self, operand: Any) -> bool:
        """Tell whether operand is a Python number."""

    def op(self, target: Any, *args: Any, dtype: torch.dtype) -> Node:
        """Append an operation with one result."""

    def pair(self, target: Any, *args: Any) -> Pair:
        """Append a collage:: operation that returns an expansion."""

    def settle(self, x: Expanded) -> Pair:
        """Add up a decayed expansion."""

    def again(self, node: Node, args: list[Any], dtype: torch.dtype) -> Node:
        """Append the operation of node on other operands, with its keyword arguments."""

    def joined(self, node: Node) -> None:
        """Note for the plan that node ran as join - op - split."""


Rule = Callable[[Builder, Node, Expanded, int], Expanded]
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
