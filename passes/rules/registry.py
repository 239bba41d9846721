"""The registry of rules, and what a rule may use to build the expanded graph."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

Term = Any
"""A tensor that a builder knows: a node of the graph it builds, or a real tensor in its place.

Rules may read its `.meta["dtype"]` and `.meta["scalar"]` (0-d), and nothing else of it."""
Components = tuple[Term, ...]
"""An expansion: hi and lo, or hi, mid and lo."""


class Call(Protocol):
    """The operation that a rule rewrites, on the operands of the user's program."""

    @property
    def target(self) -> Any:
        """The operation."""

    @property
    def args(self) -> tuple[Any, ...]:
        """Its positional operands."""

    @property
    def kwargs(self) -> Any:
        """Its keyword operands."""


@dataclass(frozen=True)
class Decayed:
    """An expansion that was multiplied by a factor near one, x + (factor - 1)*x, not yet added up.

    A decay is mostly followed by the update. The terms of both are added to each other in the wide
    dtype and then to the expansion, once: one rounding less, and no factor whose distance from one
    is rounded. The Collage paper folds weight decay into the update for the same reason.
    """

    pair: Components
    term: Term
    """(factor - 1) * x, of the wide dtype."""
    small: bool
    """Whether the term is at most 5u of x, so that rounding it to one float costs no more than the
    5u^2 of a product."""


Expanded = Components | Decayed


class Builder(Protocol):
    """What a rule may use. Operands are those of the operation being rewritten."""

    dtype: torch.dtype
    """The dtype of the state on whose carried path the node lies."""

    @property
    def count(self) -> int:
        """How many components an expansion has: two or three."""

    def plain(self, operand: Any) -> Any:
        """Return an operand as one value: of an expansion the high word or, where the operand is
        wider than the storage, the join in its dtype; a number as it is."""

    def expansion(self, operand: Any) -> Components | None:
        """Return the expansion, of the storage dtype, that operand is; None if it is plain."""

    def rounded(self, operand: Any) -> Term:
        """Return a tensor operand rounded to the storage dtype, once."""

    def narrowed(self, term: Term) -> Term:
        """Return a result of this builder rounded to the storage dtype, once."""

    def join(self, x: Components) -> Term:
        """Return the whole value of an expansion, in the wide dtype."""

    def split(self, term: Term) -> Components:
        """Return a value of the wide dtype as an expansion of the storage dtype."""

    def widened(self, operand: Any) -> Any:
        """Return a 16-bit operand in the wide dtype, an expansion joined, others as they are."""

    def is_number(self, operand: Any) -> bool:
        """Tell whether operand is a Python number."""

    def op(self, target: Any, *args: Any, dtype: torch.dtype) -> Term:
        """Append an operation with one result."""

    def pair(self, target: Any, *args: Any) -> Components:
        """Append a collage:: operation that returns an expansion, as `form` names it."""

    def form(self, target: Any) -> Any:
        """Return a collage:: operation, named as for two components, as it is for `count`."""

    def settle(self, x: Expanded) -> Components:
        """Add up a decayed expansion."""

    def again(self, node: Call, args: list[Any], dtype: torch.dtype) -> Term:
        """Append the operation of node on other operands, with its keyword arguments."""

    def joined(self, node: Call) -> None:
        """Note for the plan that node ran as join - op - split."""


Rule = Callable[[Builder, Call, Expanded, int], Expanded]
"""(builder, operation, expansion on the path, its position in args) -> expansion.

The same expansion may stand at other positions too. Where an operation takes a list of tensors the
position is that of the list."""

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
