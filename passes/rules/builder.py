"""What the graph and the eager engine have in common when they apply a rule."""

from abc import ABC, abstractmethod
from typing import Any

import torch

from collage_fx.passes.ir.program import LOW_PRECISION, is_value, value_of
from collage_fx.passes.rules.registry import Call, Components, Decayed, Expanded
from collage_fx.runtime.expansion.eft import WIDER
from collage_fx.runtime.ops import JOIN, SPLIT, THREE, collage
from collage_fx.runtime.storage.registry import EXPANSIONS


class RuleBuilder(ABC):
    """A `registry.Builder`, but for how an operation is done and what an operand has become."""

    dtype: torch.dtype
    storage: str = "mcf2"
    """How expansions are laid out."""
    env: Any
    """Operand -> what it is here: one value or an expansion."""

    @property
    def count(self) -> int:
        """How many components an expansion has."""
        return EXPANSIONS[self.storage]

    @abstractmethod
    def op(self, target: Any, *args: Any, dtype: torch.dtype, **kwargs: Any) -> Any:
        """Do an operation with one result of this dtype."""

    @abstractmethod
    def components(self, target: Any, *args: Any, dtype: torch.dtype) -> Any:
        """Do an operation whose result is an expansion of this dtype."""

    @abstractmethod
    def convert(self, x: Any, dtype: torch.dtype) -> Any:
        """Return a value in dtype."""

    def settled(self, node: Any) -> Components:
        """Return the expansion that a node of the slice became."""
        if isinstance(self.env[node], Decayed):
            self.env[node] = self.settle(self.env[node])
        return self.env[node]

    def plain(self, operand: Any) -> Any:
        """Return operand in the new graph; of an expansion the high word, or the wider join."""
        if not is_value(operand):
            return operand
        if not isinstance(self.env[operand], tuple | Decayed):
            return self.env[operand]
        pair, dtype = self.settled(operand), value_of(operand).dtype
        if dtype in LOW_PRECISION or not dtype.is_floating_point:
            return self.convert(pair[0], dtype)
        return self.convert(self.join(pair), dtype)

    def expansion(self, operand: Any) -> Components | None:
        """Return the expansion that operand is, in the storage dtype, or None."""
        if not is_value(operand) or not isinstance(self.env[operand], tuple | Decayed):
            return None
        pair = self.settled(operand)
        if pair[0].meta["dtype"] == self.dtype:
            return pair
        return self.split(self.join(pair))

    def join(self, x: Components) -> Any:
        """Return the whole value of an expansion, in the wide dtype."""
        return self.op(JOIN[self.storage], *x, dtype=WIDER[x[0].meta["dtype"]])

    def split(self, term: Any) -> Components:
        """Return a value of the wide dtype as an expansion of the storage dtype."""
        return self.pair(SPLIT[self.storage], term, self.dtype)

    def rounded(self, operand: Any) -> Any:
        """Return a tensor operand in the storage dtype."""
        return self.convert(self.plain(operand), self.dtype)

    def narrowed(self, node: Any) -> Any:
        """Return a node of the new graph in the storage dtype."""
        return self.convert(node, self.dtype)

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
        """Tell whether operand is a Python number."""
        return isinstance(operand, int | float)

    def pair(self, target: Any, *args: Any) -> Components:
        """Append an operation that returns an expansion of the storage dtype; see `form`."""
        return self.components(self.form(target), *args, dtype=self.dtype)

    def again(self, node: Call, args: list[Any], dtype: torch.dtype) -> Any:
        """Append the operation of node on other operands."""
        kwargs = torch.fx.node.map_arg(dict(node.kwargs), self.plain)
        return self.op(node.target, *args, dtype=dtype, **kwargs)
