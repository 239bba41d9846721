"""Builder of rules: operands, expansions, how to append operations; and the registry of rules."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from collage_fx.passes.ir.program import LOW_PRECISION, is_value, value_of
from collage_fx.runtime.expansion.eft import WIDER
from collage_fx.runtime.ops import JOIN, SPLIT, THREE, collage
from collage_fx.runtime.storage.registry import EXPANSIONS

Term = Any
"""A tensor that a builder knows: a node of the graph it builds, or a real tensor in its place.

Rules may read its `.meta["dtype"]` and `.meta["scalar"]` (0-d), and nothing else of it."""
Components = tuple[Term, ...]
"""An expansion: hi and lo, or hi, mid and lo."""


class Call(Protocol):
    """The operation that a rule rewrites, on the operands of the user's program."""

    target: Any
    args: tuple[Any, ...]
    kwargs: Any


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
    """True if the term is at most 5u of x, so that rounding it to one float costs no more than the
    5u^2 of a product."""


Expanded = Components | Decayed


class Builder(ABC):
    """Operations and expansions for rules. Operands are those of the operation being rewritten.

    Subclasses say how an operation is done: as a node of a graph, or on real tensors.
    """

    dtype: torch.dtype
    """The dtype of the state on whose carried path the operation lies."""
    storage: str = "mcf2"
    """Storage, by which expansions are laid out."""
    env: Any
    """Operand -> what it is here: one value or an expansion."""

    @property
    def count(self) -> int:
        """Number of components of an expansion: two or three."""
        return EXPANSIONS[self.storage]

    @abstractmethod
    def op(self, target: Any, *args: Any, dtype: torch.dtype, **kwargs: Any) -> Term:
        """Do an operation with one result of this dtype."""

    @abstractmethod
    def components(self, target: Any, *args: Any, dtype: torch.dtype) -> Components:
        """Do an operation whose result is an expansion of this dtype."""

    @abstractmethod
    def convert(self, x: Any, dtype: torch.dtype) -> Term:
        """Return a value in dtype."""

    @abstractmethod
    def joined(self, node: Call) -> None:
        """Note for the plan that an operation ran as join - op - split."""

    def settled(self, node: Any) -> Components:
        """Return the expansion that a node of the slice became."""
        if isinstance(self.env[node], Decayed):
            self.env[node] = self.settle(self.env[node])
        return self.env[node]

    def plain(self, operand: Any) -> Any:
        """Return an operand as one value, a number as it is.

        Of an expansion that is the high word or, where the operand is wider than the storage, the
        join in its dtype.
        """
        if not is_value(operand):
            return operand
        if not isinstance(self.env[operand], tuple | Decayed):
            return self.env[operand]
        pair, dtype = self.settled(operand), value_of(operand).dtype
        if dtype in LOW_PRECISION or not dtype.is_floating_point:
            return self.convert(pair[0], dtype)
        return self.convert(self.join(pair), dtype)

    def expansion(self, operand: Any) -> Components | None:
        """Return the expansion, of the storage dtype, that an operand is; None if it is plain."""
        if not is_value(operand) or not isinstance(self.env[operand], tuple | Decayed):
            return None
        pair = self.settled(operand)
        if pair[0].meta["dtype"] == self.dtype:
            return pair
        return self.split(self.join(pair))

    def join(self, x: Components) -> Term:
        """Return the whole value of an expansion, in the wide dtype."""
        return self.op(JOIN[self.storage], *x, dtype=WIDER[x[0].meta["dtype"]])

    def split(self, term: Any) -> Components:
        """Return a value of the wide dtype as an expansion of the storage dtype."""
        return self.pair(SPLIT[self.storage], term, self.dtype)

    def rounded(self, operand: Any) -> Term:
        """Return a tensor operand rounded to the storage dtype, once."""
        return self.convert(self.plain(operand), self.dtype)

    def widened(self, operand: Any) -> Any:
        """Return a 16-bit tensor operand in the wide dtype; others, and numbers, as they are."""
        if is_value(operand) and isinstance(self.env[operand], tuple | Decayed):
            return self.join(self.settled(operand))
        plain = self.plain(operand)
        if not is_value(plain):
            return plain
        dtype, wide = plain.meta["dtype"], WIDER[self.dtype]
        narrow = dtype.is_floating_point and dtype.itemsize < wide.itemsize
        if not narrow or (plain.meta["scalar"] and dtype not in LOW_PRECISION):
            return plain
        return self.convert(plain, wide)

    def settle(self, x: Expanded) -> Components:
        """Add up a decayed expansion."""
        if not isinstance(x, Decayed):
            return x
        dtype = x.pair[0].meta["dtype"]
        if x.small and self.count == 2:  # of three, one float is no longer within the bounds
            small = self.convert(x.term, dtype)
            return self.components(self.form(collage.grow.default), *x.pair, small, dtype=dtype)
        term = self.components(SPLIT[self.storage], x.term, dtype, dtype=dtype)
        return self.components(self.form(collage.add.default), *x.pair, *term, dtype=dtype)

    def form(self, target: Any) -> Any:
        """Return an operation, named by its form for two components, as it is for `count`."""
        return THREE.get(target, target) if self.storage == "mcf3" else target

    def is_number(self, operand: Any) -> bool:
        """Return True if operand is a Python number."""
        return isinstance(operand, int | float)

    def pair(self, target: Any, *args: Any) -> Components:
        """Do a collage:: operation that returns an expansion of the storage dtype; see `form`."""
        return self.components(self.form(target), *args, dtype=self.dtype)

    def again(self, node: Call, args: list[Any], dtype: torch.dtype) -> Any:
        """Do the operation of node on other operands, with its keyword arguments."""
        kwargs = torch.fx.node.map_arg(dict(node.kwargs), self.plain)
        return self.op(node.target, *args, dtype=dtype, **kwargs)


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
