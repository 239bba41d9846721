"""Roundings of the step's own: stochastic ones, and those of which it keeps the errors.

An expansion needs no stochastic rounding on the bits of fp32. Optimizers that keep bf16 parameters
unbiased add random bits to an fp32 value and cut them off:
x.view(int32), integer arithmetic, .view(float32), and a conversion to bf16 that is exact. The lines
of a segment are followed from the first of these to the last; where that finds x rounded to bf16 by
chance, up or down, it takes x itself, and the low word holds the rest. All other arithmetic on bits
is left as it is.

A conversion x.bfloat16() rounds nothing in a segment on whole values. Where a later line takes it
from x (two words of the step's own, error feedback), the difference would be zero, and what the
step keeps it for would be lost: such a conversion does round.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from collage_fx.runtime.residuals.memory import has_memory
from collage_fx.runtime.residuals.residual import version
from collage_fx.runtime.trees import tree_leaves
from collage_fx.segments.memory import storage_key
from collage_fx.segments.trie import Value, leaves

if TYPE_CHECKING:
    from collage_fx.segments.segment import Line, Segment

aten = torch.ops.aten
_FOLLOWED = frozenset(
    {"add", "sub", "bitwise_and", "bitwise_or", "where", "lt", "le", "gt", "ge", "copy"}
    | {"clone", "_to_copy", "alias", "detach", "view", "_unsafe_view"}
)
_CONVERSIONS = frozenset({aten._to_copy.default, aten.copy_.default})
_ADDING = frozenset({"add", "sub", "rsub", "_foreach_add", "_foreach_sub"})
_WIDE = (torch.float32, torch.float64)
_UNIT = 2.0**-7
"""A unit in the last place of bf16 is at most this much of the value."""


@dataclass(frozen=True)
class _Bits:
    """Origin of a value: the bits of an fp32 value, random bits, or both."""

    value: int | None = None
    """The number of that value."""
    version: int = 0
    """Number of times that its memory had been written when its bits were taken."""
    random: bool = False


def undone(rounded: Tensor, value: Tensor) -> Tensor:
    """Return value where it was rounded to bf16 by chance, else what it was rounded to."""
    exact = (rounded.float().view(torch.int32) & 0xFFFF) == 0
    near = (rounded - value).abs() <= _UNIT * value.abs()
    return torch.where(exact & near, value, rounded)


class UserRounding:
    """Trace of the bits of fp32 values through the lines of a segment."""

    def __init__(self, segment: "Segment", random: set[int]) -> None:
        """Begin before the first line.

        Args:
            segment: what is followed; it gets lines that undo a rounding.
            random: the numbers of the inputs that hold random bits.
        """
        self.segment = segment
        self.bits = {at: _Bits(random=True) for at in random}
        """Memory -> what is in it."""
        self.versions: dict[int, int] = {}
        """Memory -> how often it was written."""
        self.found = False

    def follow(self, line: "Line") -> None:
        """Follow one line, and add it to the segment; one before it, if that needs to be."""
        if not self.bits:  # nothing random: nothing was rounded by chance
            self.segment.lines.append(line)
            return
        root, written = self.segment.root, line.writes
        name = getattr(line.func, "_opname", "").removesuffix("_")
        operands = [v for v in leaves((line.args, line.kwargs)) if type(v) is Value]
        if line.func in _CONVERSIONS and operands:
            self._undo(line, operands[-1] if line.func is aten.copy_.default else operands[0])
        known = [b for v in operands if (b := self._of(v.at)) is not None]
        target = next(iter(written), None)
        if name in _FOLLOWED and known and (line.made or target is not None):
            source = next((b for b in known if b.value is not None), _Bits())
            random = any(b.random for b in known)
            if target is not None and source.value is not None and root[source.value] == target:
                kept = self.segment.insert(aten.clone.default, (Value(source.value),))
                source = _Bits(kept.at, 0, source.random)  # as it was before it is changed in place
            made = _Bits(source.value, source.version, random)
            for memory in written or {root[at] for at in line.made}:
                self.bits[memory] = made
        else:
            for memory in written:
                self.bits.pop(memory, None)
        for memory in written:
            self.versions[memory] = self.versions.get(memory, 0) + 1
        self.segment.lines.append(line)

    def _of(self, at: int) -> _Bits | None:
        """Return the known bits of a value; of any fp32 value, that value."""
        memory = self.segment.root[at]
        found = self.bits.get(memory)
        if found is None and at in self.segment.bit_views:
            source = self.segment.bit_views[at]
            return _Bits(source, self.versions.get(memory, 0))
        return found

    def _undo(self, line: "Line", operand: Value) -> None:
        """Have a conversion take what was rounded by chance as it was before."""
        found = self.bits.get(self.segment.root[operand.at])
        if found is None or not found.random or found.value is None:
            return
        memory = self.segment.root[found.value]
        if self.versions.get(memory, 0) != found.version:
            return
        value = self.segment.insert(undone, (operand, Value(found.value)))
        line.args = tuple(value if a is operand else a for a in line.args)
        self.found = True


@dataclass(frozen=True, eq=False)
class _Origin:
    """Origin of what is in some memory, as `_Bits`: the fp32 value itself, as long as it lasts."""

    memory: StorageWeakRef
    """The memory, whose address no other gets meanwhile."""
    value: Tensor | None
    version: int | None
    random: bool


class RoundingAtOnce:
    """Trace of the bits of fp32 values through operations that are done one by one."""

    def __init__(self, random: Container[int]) -> None:
        """Begin with no values.

        Args:
            random: the memory in which the step has drawn random bits.
        """
        self.random = random
        self.origins: dict[int, _Origin] = {}

    def before(self, func: Any, args: Any) -> tuple[Any, tuple[Tensor | None, bool]]:
        """Return the operands of an operation without a rounding by chance, and what `after` is to
        be given: the value whose bits it takes, and whether they are mixed with random ones."""
        tensors = [t for t in tree_leaves(args) if isinstance(t, Tensor) and has_memory(t)]
        name = getattr(func, "_opname", "")
        if func in _CONVERSIONS:
            at = int(func is aten.copy_.default)
            value, random = self._of(tensors[at : at + 1])
            if random and value is not None and args[at].shape == value.shape:
                args = (*args[:at], undone(args[at], value), *args[at + 1 :])
            return args, (None, False)
        if name.removesuffix("_") not in _FOLLOWED:
            return args, (None, False)
        value, random = self._of(tensors)
        bits = [t for t in tensors if t.dtype is torch.int32 and t.dim()]
        fresh = [t for t in bits if not random or storage_key(t) not in self.random]
        if value is None and fresh:
            value = fresh[0].view(torch.float32)
            value = value.clone() if name.endswith("_") else value
        return args, (value, random)

    def _of(self, tensors: Sequence[Tensor]) -> tuple[Tensor | None, bool]:
        """Return the value whose bits are in these, if it is as it was, and if any are random."""
        keys = [storage_key(t) for t in tensors]
        found = [o for key in keys if (o := self.origins.get(key)) is not None]
        values = [o.value for o in found if o.value is not None and version(o.value) == o.version]
        random = any(o.random for o in found) or any(key in self.random for key in keys)
        return next(iter(values), None), random

    def after(self, origin: tuple[Tensor | None, bool], made: Any, written: Sequence[Any]) -> None:
        """Note the origin of what an operation has made and written."""
        value, random = origin
        for t in [*tree_leaves(made), *written]:
            if isinstance(t, Tensor) and has_memory(t):
                self.origins.pop(storage_key(t), None)
                if value is not None or random:
                    memory = StorageWeakRef(t.untyped_storage())
                    at = None if value is None else version(value)
                    self.origins[storage_key(t)] = _Origin(memory, value, at, random)


def to_bfloat16(x: Tensor) -> Tensor:
    """Round to bf16; return the dtype of x."""
    return x.to(torch.bfloat16).to(x.dtype)


def to_float16(x: Tensor) -> Tensor:
    """Round to fp16; return the dtype of x."""
    return x.to(torch.float16).to(x.dtype)


ROUNDING: dict[Any, Callable[[Tensor], Tensor]] = {
    torch.bfloat16: to_bfloat16,
    torch.float16: to_float16,
}


def conversions(line: "Line") -> Iterator[tuple[Value, int]]:
    """Yield the operands that a line converts, or copies, and the values that it makes of them."""
    if line.func is aten._to_copy.default and type(line.args[0]) is Value:
        yield line.args[0], line.made[0]
    elif getattr(line.func, "_opname", "") in ("copy_", "_foreach_copy_"):
        for to, x in zip(leaves(line.args[0]), leaves(line.args[1]), strict=True):
            if type(x) is Value:
                yield x, to.at


_Source: TypeAlias = tuple[int, int, Any]
"""A value that is converted: its memory, how often that was written before, and the dtype."""


def with_errors(segment: "Segment", lines: Sequence["Line"]) -> set[int]:
    """Return the values converted to 16 bits whose rounding error a later line computes.

    That is a difference of a value and its conversion. All conversions of the value are such ones
    then: a state that took it whole, beside another that takes the error, would have that twice.
    """
    root, dtype = segment.root, segment.dtype
    written: Counter[int] = Counter()
    """Memory -> how often it was written."""
    rounded: dict[int, _Source] = {}
    """Memory -> the value that was converted into it."""
    where: defaultdict[_Source, set[int]] = defaultdict(set)
    found: set[_Source] = set()
    for k, line in enumerate(lines):
        for a, b in _terms(line):
            for x, y in ((root[a], root[b]), (root[b], root[a])):
                if y in rounded and rounded[y][:2] == (x, written[x]):
                    found.add(rounded[y])
        made = {}
        for source, to in conversions(line):
            x = root[source.at]
            if dtype[to] in ROUNDING and dtype[source.at] in _WIDE:
                made[root[to]] = (x, written[x], dtype[to])
                where[x, written[x], dtype[to]].add(k)
            elif x in rounded:
                made[root[to]] = rounded[x]
        for memory in line.writes:
            written[memory] += 1
            rounded.pop(memory, None)
        rounded |= made
    return {k for source in found for k in where[source]}


def _terms(line: "Line") -> Iterator[tuple[int, int]]:
    """Yield the terms that a line adds or subtracts, two by two."""
    name = getattr(line.func, "_opname", "").removesuffix("_")
    if name in _ADDING and len(line.args) > 1:
        for a, b in zip(leaves(line.args[0]), leaves(line.args[1]), strict=False):
            if type(a) is type(b) is Value:
                yield a.at, b.at
