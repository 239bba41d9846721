"""Pieces of memory: the states in them, the parts that have low words, and where these lie."""

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from collage_fx.optimizer.checkpoints.state_dicts import attached
from collage_fx.optimizer.ownership import Owned, owners_of
from collage_fx.runtime.residuals.checksum import same_bits
from collage_fx.runtime.residuals.memory import empty_as, has_memory, is_dense, tensor_on
from collage_fx.runtime.residuals.residual import Residual, warn_of_cleared
from collage_fx.runtime.residuals.store import STORE
from collage_fx.runtime.storage.registry import join_in, split_into
from collage_fx.runtime.storage.state_name import StateName
from collage_fx.segments.operations import piece_of
from collage_fx.segments.trie import Layout, layout_of

copy_ = torch.ops.aten.copy_.default

NOWHERE = -1
"""The group of a state that is in no place that is looked at."""


@dataclass(slots=True)
class Piece:
    """A state in a piece of memory, as it was when an operation on that memory was noted."""

    owned: Owned
    data: Tensor
    """The state's memory of then: `p.data = ...` gives it another."""
    residual: Residual | None
    layout: Layout
    """Layout of the data."""

    @property
    def moved(self) -> bool:
        """True if the state has other memory by now."""
        state = self.owned.tensor
        return state.dtype is not self.layout[0] or not state.is_set_to(self.data)


@dataclass(slots=True)
class Input:
    """Memory that a segment reads or writes, and that was there before it."""

    data: Tensor
    layout: Layout
    """Layout of the data."""
    key: int
    """The storage of the data."""
    pieces: list[Piece]
    """The states in it."""
    tensor: Tensor | None = None
    """The tensor that was met there, if it is none that is known to be a state."""

    @property
    def present(self) -> Tensor | None:
        """The tensor that was met there, unless it has got other memory since."""
        there = self.tensor is not None and memory_key(self.tensor) == self.key
        return self.tensor if there else None


class Part(NamedTuple):
    """A part of a piece of memory that has low words."""

    view: tuple[Any, ...]
    """Size, stride, and offset from the beginning of the piece; empty for all of it."""
    storage: str
    words: int
    """Number of low words of each element."""

    @classmethod
    def of(cls, whole: Layout, part: Layout, storage: str = "", words: int = 0) -> "Part":
        """Return a part of memory with these layouts."""
        if whole is part or whole == part:
            return cls((), storage, words)
        return cls((*part[1:3], part[3] - whole[3]), storage, words)


Lows: TypeAlias = Sequence[tuple[Part, Sequence[Any]]]
"""The parts of a piece of memory, with their low words: tensors, or nodes of a graph."""
Do: TypeAlias = Callable[..., Any]
"""Function that does an operation, or appends it to a graph: (operation, *operands) -> result."""


def join(do: Do, hi: Any, dtype: torch.dtype, lows: Lows) -> Any:
    """Return the whole value of a piece of memory in a wider dtype, in memory of its own."""
    if len(lows) == 1 and not lows[0][0].view:
        ((part, words),) = lows
        return do(join_in, dtype, part.storage, hi, *words)
    whole = do(widened, hi, dtype)
    for part, words in lows:
        high, to = (do(piece_of, x, *part.view) if part.view else x for x in (hi, whole))
        do(copy_, to, do(join_in, dtype, part.storage, high, *words))
    return whole


def split(do: Do, x: Any, hi: Any, dtype: torch.dtype, lows: Lows) -> None:
    """Write a whole value over a piece of memory of a dtype, and into its low words."""
    if not (len(lows) == 1 and not lows[0][0].view):
        do(copy_, hi, x)
    for part, words in lows:
        value, high = (do(piece_of, y, *part.view) if part.view else y for y in (x, hi))
        made = do(split_into, part.storage, value, dtype)
        for k, to in enumerate((high, *words)):
            do(copy_, to, do(operator.getitem, made, k))


def widened(t: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor in another dtype, with its strides, if none of its elements share memory."""
    return t.to(dtype) if is_dense(t) or 0 in t.stride() else empty_as(t, dtype).copy_(t)


@dataclass(eq=False, slots=True)
class Between:
    """The low words of a tensor that a segment has made, for the segments that follow it."""

    storage: StorageWeakRef
    dtype: torch.dtype
    lows: tuple[Tensor, ...] = ()
    """Each as long as the storage, from its first element on, so that they have views like it."""
    layout: Layout = (torch.float32, (), (), 0)
    """Layout of the tensor, where it has low words."""

    def like(self, t: Tensor) -> tuple[Tensor, ...]:
        """Return the low words of t, which is a view of the storage."""
        layout = layout_of(t)[1:]
        return tuple(
            lo if layout_of(lo)[1:] == layout else lo.as_strided(*layout) for lo in self.lows
        )


@dataclass(eq=False, slots=True)
class KnownMemory:
    """A storage, as a step knows it."""

    states: list[Owned] = field(default_factory=list)
    """States in it."""
    between: Between | None = None
    """Low words of what it holds that is no state."""
    made: StorageWeakRef | None = None
    """The storage, if a segment has made it in this step; of whatever dtype."""

    @property
    def is_of_step(self) -> bool:
        """True if the step has made it, as far as that was seen."""
        of = self.made, None if self.between is None else self.between.storage
        return any(storage is not None and not storage.expired() for storage in of)

    def alive(self) -> Tensor | None:
        """Return the tensor in it that is no state and has low words; None if that is gone."""
        known = self.between
        if known is None or not known.lows or known.storage.expired():
            return None
        return tensor_on(known.storage, *known.layout)

    def hold(self, t: Tensor, dtypes: Sequence[torch.dtype]) -> Between:
        """Note that it is the memory of t, which is no state, with low words of these dtypes."""
        storage, known = t.untyped_storage(), self.between
        if known is None or known.storage.expired() or known.dtype is not t.dtype:
            known = self.between = Between(StorageWeakRef(storage), t.dtype)
        if len(known.lows) < len(dtypes):
            known.layout = layout_of(t)
            count = storage.nbytes() // t.itemsize
            known.lows = tuple(torch.zeros(count, dtype=d, device=t.device) for d in dtypes)
        return known


@dataclass(eq=False, slots=True)
class KnownState:
    """The tensor of a state, as a step knows it."""

    tensor: Tensor
    residual: Residual | None = None
    """Residual, if it was seen to belong to the state in this step."""
    written: bool = False
    """True if the step has written it."""

    def settle(self) -> None:
        """Record that the residual belongs to the present value."""
        if self.residual is not None:
            self.residual.settle(self.tensor)


class Memories(dict[int, KnownMemory]):
    """Storage -> what a step knows of it, among that tensors with residuals in it.

    Those that are in no place where the states of the step are looked for are found when they are
    met: in an object, a closure, a module's buffer, of another optimizer.
    """

    def __init__(self) -> None:
        super().__init__()
        self.own: set[int] = set()
        """The ids of the states that were looked for."""
        self.met: list[Owned] = []
        """States that this step has met elsewhere."""
        self.lasting: list[Owned] = []
        """States among them whose residuals are from earlier steps."""
        self.elsewhere: dict[int, list[Callable[[], Tensor | None]]] = {}
        """See `Aliases.in_storages`."""

    def begin(self, states: Iterable[Owned]) -> None:
        """Know the states of a step, and no other memory."""
        self.forget()
        self.own = {id(owned.tensor) for owned in states}
        for owned in states:
            key = storage_key(owned.tensor)
            if key not in self:
                self[key] = KnownMemory()
            self[key].states.append(owned)
        self.elsewhere = STORE.aliases.in_storages()

    def forget(self) -> None:
        """Drop what is known of a step."""
        self.clear()
        self.met.clear()
        self.lasting.clear()

    def __missing__(self, key: int) -> KnownMemory:
        found: dict[Layout, Tensor] = {}
        for get in self.elsewhere.get(key, ()):
            # By now it may lie elsewhere, or here again, being one that the step has moved.
            if (t := get()) is not None and memory_key(t) == key and id(t) not in self.own:
                found.setdefault(layout_of(t), t)
        states = [self._met(t, r) for t in found.values() if (r := STORE.get(t)) is not None]
        known = self[key] = KnownMemory(states)
        return known

    def meet(self, t: Tensor, name: StateName) -> Owned:
        """Return a tensor as a state that is in no place that is looked at."""
        owned = _elsewhere(t, name)
        self.met.append(owned)
        return owned

    def _met(self, t: Tensor, residual: Residual) -> Owned:
        """Return the same of one that has a residual; that is empty if others fill the tensor."""
        if residual.sums is not None:  # nobody is to know of it after the step
            residual.sums.read = True
            STORE.clear_stale([(t, residual)])
            return _elsewhere(t, residual.name)
        owned = self.meet(t, residual.name)
        expected, residual.expected = residual.expected, None
        if expected(t, *residual.words(t)) if expected else residual.belongs(t):
            residual.found = False
            residual.settle(t)
            self.lasting.append(owned)
        else:
            if not residual.found:  # else a buffer of gradients, say
                warn_of_cleared(
                    [str(residual.name)], "it was written from outside the compiled step"
                )
            residual.begin_anew(t)
        return owned

    def written_as(self, key: int, dtype: torch.dtype) -> None:
        """Drop low words of memory that is written as a tensor of another dtype: of its bits."""
        known = self.get(key)
        if known is not None and known.between is not None and known.between.dtype is not dtype:
            known.between = None

    def expect_same(self) -> None:
        """Have the next reader see whether those that were met in this step are as it leaves them.

        The next reader is a later step, or a graph in this one. Versions do not tell: the states
        may be reached through `.data`, or be views made anew. Of the states of another compiled
        optimizer they do: its steps write them in between.
        """
        others = owners_of(attached()) if self.met else {}
        for owned in self.met:
            residual = STORE.get(owned.tensor) if id(owned.tensor) not in others else None
            if residual is not None:
                residual.expected = same_bits(owned.tensor)


def _elsewhere(t: Tensor, name: StateName) -> Owned:
    return Owned(t, NOWHERE, -1, str(name), name, of_optimizer=False)


def storage_key(t: Tensor) -> int:
    """Return the storage of a tensor with memory, as a key."""
    return t.untyped_storage()._cdata


def memory_key(t: Tensor) -> int:
    """Return the storage of a tensor as a key; 0 for one without memory."""
    return storage_key(t) if has_memory(t) else 0


def gradients(memory: Iterable[KnownMemory]) -> dict[int, str]:
    """Return storage -> name, of the gradients of the parameters that are in some memory."""
    found = {}
    for owned in (owned for known in memory for owned in known.states):
        grad = owned.tensor.grad if owned.tensor.is_leaf else None
        if grad is not None and has_memory(grad):
            found[storage_key(grad)] = f"{owned.name}.grad"
    return found
