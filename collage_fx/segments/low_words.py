"""Low words that a recorded step knows: of states, and of values between two segments."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from collage_fx.gradients.multiplied import Multiplied
from collage_fx.optimizer.ownership import Owned
from collage_fx.runtime.expansion.eft import FP8, WIDER, wider_dtypes
from collage_fx.runtime.expansion.stochastic import Seeds
from collage_fx.runtime.residuals.dtensor import place_of
from collage_fx.runtime.residuals.memory import covers
from collage_fx.runtime.residuals.residual import Residual, clear_stale, next_draw
from collage_fx.runtime.residuals.store import STORE
from collage_fx.runtime.storage.registry import (
    FINEST,
    STORAGES,
    TRANSIENT,
    Storage,
    rounds_residuals,
    split_into,
)
from collage_fx.segments.memory import (
    NOWHERE,
    Input,
    KnownMemory,
    KnownState,
    Lows,
    Memories,
    Part,
    Piece,
    join,
    split,
    storage_key,
)
from collage_fx.segments.operations import piece_of
from collage_fx.segments.trie import layout_of


@dataclass(eq=False)
class LowWords:
    """Low words of memory, joined to wide values, and split off when these are stored.

    A piece of memory may be a state, hold several (a flat buffer of parameters), or be a value on
    the way: that one keeps all of its wide value (`TRANSIENT`), of fp8 as much as `FINEST` does.
    """

    dtypes: InitVar[Iterable[torch.dtype]]
    """Dtypes that are computed with in a wider one."""
    in_float64: InitVar[bool]
    """True if that is float64, which holds what error-free transformations keep; else `WIDER`."""
    storage_for: Callable[[Owned], str]
    """Returns the storage for a state; empty for one that stays plain."""
    by_chance: Callable[[str], bool]
    """Predicate: the last residual of a storage is rounded by chance."""
    seed: int
    """Seed that random roundings begin with."""
    lost: Callable[[str], None]
    """Function that is told the name of a state that loses its low word."""
    named: Callable[[str], str] = str
    """Returns what to call a state in a warning, of its name."""
    memory: Memories = field(default_factory=Memories)
    """Storage -> what is known of it."""
    of_tensor: dict[int, KnownState] = field(default_factory=dict)
    """Tensor -> what is known of it."""
    writes: bool = False
    """True if a state was written in this step."""
    plain: bool = False
    """True if no state was of a dtype with low words when the step began."""
    scalars: bool = False
    """True if a state of such a dtype was a 0-d tensor when the step began."""
    multiplied: Multiplied = field(default_factory=Multiplied)
    """Gradients of which the step has products."""
    drawn: int = 0
    """Roundings by chance that a state had when the step began, at most: one that a tensor made in
    the step replaces goes on from there, with another seed in each step."""

    def __post_init__(self, dtypes: Iterable[torch.dtype], in_float64: bool) -> None:
        self.wide, self.computed = wider_dtypes(dtypes, in_float64=in_float64)
        self.transient = {
            d: STORAGES[FINEST[d]] if d in FP8 else TRANSIENT[wide] for d, wide in self.wide.items()
        }
        """dtype -> the layout of values on the way."""

    def begin(self, states: Sequence[Owned]) -> None:
        """Begin a step with these states; clear residuals that do not belong to their values."""
        self.forget()
        self.memory.begin(states)
        self.plain = all(o.tensor.dtype not in self.wide for o in states)
        self.scalars = any(not o.tensor.dim() and o.tensor.dtype in self.wide for o in states)
        fitting, stale = [], []
        for owned in states:
            tensor = owned.tensor
            residual = STORE.get(tensor)
            if residual is None:
                self.of_tensor[id(tensor)] = KnownState(tensor)
            elif not residual.fits(tensor):
                stale.append((tensor, residual))
            else:
                STORE.follow(tensor, residual)
                self.of_tensor[id(tensor)] = KnownState(tensor, residual)
                fitting.append((tensor, residual))
        clear_stale([*stale, *fitting], self.named)
        self.drawn = max((residual.draws for _, residual in fitting), default=0)

    def take_up(self, found: Iterable[Owned]) -> None:
        """Know states that the step has made, if they are not known yet."""
        new = []
        for owned in found:
            states = self.memory[storage_key(owned.tensor)].states
            if all(known.tensor is not owned.tensor for known in states):
                states.append(owned)
                new.append(owned)
        self.adopt(new)

    def forget(self) -> None:
        """Drop what is known of a step."""
        self.memory.forget()
        self.of_tensor.clear()
        self.writes = False

    def _state(self, tensor: Tensor) -> KnownState:
        """Return the record of the tensor of a state."""
        known = self.of_tensor.get(id(tensor))
        if known is None:
            known = self.of_tensor[id(tensor)] = KnownState(tensor)
        return known

    def mark_written(self, owned: Owned) -> None:
        """Note a state that the step has written."""
        self._state(owned.tensor).written = self.writes = True

    def has_written(self, tensor: Tensor) -> bool:
        """Return True if the step has written a state, as far as it was recorded."""
        return (known := self.of_tensor.get(id(tensor))) is not None and known.written

    def _memory_of(self, t: Tensor) -> KnownMemory:
        """Return the known memory of the storage of t."""
        return self.memory[storage_key(t)]

    def input(self, t: Tensor) -> Input:
        """Return the input of a segment for memory that it did not make."""
        key = storage_key(t)
        if self.memory[key].states and t.dtype in self.wide:
            self._keep_left(t, key)
        given = Input(t.data, layout_of(t), key, [])
        if not self.memory[key].states or t.dtype not in self.wide:
            given.tensor = t
            return given
        if self.is_state(t, key):
            (o,) = self.memory[key].states
            given.pieces.append(Piece(o, given.data, self.of_state(o), given.layout))
            return given
        for o in self.states_in(t):
            data, layout = o.tensor.data, layout_of(o.tensor)
            given.pieces.append(Piece(o, data, self.of_state(o), layout))
        return given

    def _keep_left(self, t: Tensor, key: int) -> None:
        """Keep low words with memory that its state has left, by `p.data = ...`, and t is in."""
        states, storage = self.memory[key].states, t.untyped_storage()
        residual = STORE.get(states[0].tensor) if len(states) == 1 else None
        if residual is None or storage_key(states[0].tensor) == key:
            return
        offset, rest = divmod(residual.address - storage.data_ptr(), t.itemsize)
        if rest or not 0 <= offset * t.itemsize < max(storage.nbytes(), 1):
            return  # it has gone on to what the state has by now
        whole = t.data.as_strided(residual.shape, residual.stride, offset)
        layout = layout_of(whole)
        self.hold(Input(whole, layout, key, [Piece(states[0], whole, residual, layout)]))

    def hold(self, given: Input) -> None:
        """Have memory keep the low words of its state, as that of no state."""
        value = self.joined(given)
        given.pieces = []
        self.memory[given.key].states = []
        self.keep(given.data, value)

    def is_state(self, t: Tensor, key: int) -> bool:
        """Return True if t, in the storage of this key, is a state, and the only one in there."""
        states = self.memory[key].states
        return len(states) == 1 and states[0].tensor is t

    def _near(self, t: Tensor) -> list[Owned]:
        """Return the states that are in the storage of t by now, of its dtype."""
        key = storage_key(t)
        found = self._memory_of(t).states if t.dtype in self.wide else ()
        return [o for o in found if o.tensor.dtype is t.dtype and storage_key(o.tensor) == key]

    def states_in(self, t: Tensor) -> list[Owned]:
        """Return the states that t covers, of its dtype."""
        key = storage_key(t)
        states = self.memory[key].states
        if not states:
            return []
        if self.is_state(t, key) and t.dtype in self.wide:
            return list(states)
        return [o for o in self._near(t) if covers(t, o.tensor)]

    def around(self, t: Tensor) -> Owned | None:
        """Return the state of which t is a part; None where it is all of one, or more."""
        near = self._near(t)
        if any(covers(t, o.tensor) for o in near):
            return None
        return next((o for o in near if covers(o.tensor, t)), None)

    def of_state(self, owned: Owned) -> Residual | None:
        """Return the residual of a state, which belongs to its present value."""
        tensor = owned.tensor
        residual = STORE.get(tensor)
        if residual is not None and not residual.fits(tensor):
            return None  # it goes when the state is written
        if residual is not None and (known := self._state(tensor)).residual is None:
            STORE.clear_stale([(tensor, residual)], self.named)
            known.residual = residual
        return residual

    def known(self, t: Tensor) -> bool:
        """Return True if t, or some of it, has a low word."""
        if t.dtype not in self.wide:
            return False
        return bool(self._lows(t)) or any(self.of_state(o) is not None for o in self.states_in(t))

    def _lows(self, t: Tensor) -> tuple[Tensor, ...] | None:
        between = self._memory_of(t).between
        if between is None or between.storage.expired() or between.dtype is not t.dtype:
            return None
        return between.like(t)

    def joined(self, given: Input) -> Tensor:
        """Return the whole value in the wide dtype, in memory of its own."""
        lows = self.parts(given, written=False)
        whole: Tensor = join(_done, given.data, self.wide[given.data.dtype], lows)
        return whole

    def parts(self, given: Input, *, written: bool) -> Lows:
        """Return the parts of memory that have low words, or, where it is written, get some."""
        if mine := self.between(given, written=written):
            return self._all_of(given.data, mine)
        found = []
        for piece in given.pieces:
            if written:
                self.mark_written(piece.owned)
                piece.residual = self.ensure(piece.owned)
            if (r := piece.residual) is not None:
                part = Part.of(given.layout, piece.layout, r.storage, len(r.components))
                found.append((part, r.components))
        return found

    def _all_of(self, t: Tensor, lows: tuple[Tensor, ...]) -> Lows:
        return [(Part((), self.transient[t.dtype].name, len(lows)), lows)]

    def born(self, t: Tensor, storage: Storage | None = None) -> None:
        """Note memory without a value yet: it gets low words when a segment writes it, or now."""
        if t.dtype in self.wide:
            self.memory[storage_key(t)].hold(t, storage.residuals[t.dtype] if storage else ())

    def store(self, given: Input, wide: Tensor) -> None:
        """Write a wide value over memory, and what does not fit in there into low words."""
        t = given.data
        if not given.pieces and self._memory_of(t).between is not None:
            return self.keep(t, wide)
        if not any(piece.layout == given.layout for piece in given.pieces):
            t.copy_(wide)
        for piece in given.pieces:
            view = Part.of(given.layout, piece.layout).view
            part = piece_of(wide, *view) if view else wide
            if piece.moved:
                piece.data.copy_(part)
            else:
                self._store_state(piece.owned, part)
        return None

    def _store_state(self, owned: Owned, x: Tensor) -> None:
        self.mark_written(owned)
        tensor, residual = owned.tensor, self.ensure(owned)
        data = tensor.data
        if residual is None:
            data.copy_(x)
            return
        hi, *lows = self._split(STORAGES[residual.storage], x, owned, residual)
        data.copy_(hi)
        residual.expected = None
        residual.hold(lows)

    def ensure(self, owned: Owned) -> Residual | None:
        """Return the residual of a state, made if it has none; None for one that stays plain."""
        tensor = owned.tensor
        before = STORE.get(tensor)
        name = self.storage_for(owned)
        if not name or tensor.dtype not in STORAGES[name].residuals:
            return None
        residual = STORE.ensure(tensor, name, owned.state_name, before, place_of(owned.whole))
        residual.provisional |= before is None
        residual.found |= before is None and owned.group == NOWHERE
        self._state(tensor).residual = residual
        return residual

    def _split(
        self, storage: Storage, x: Tensor, owned: Owned, residual: Residual
    ) -> tuple[Tensor, ...]:
        dtype = owned.tensor.dtype
        if self.by_chance(storage.name):
            residual.draws = max(residual.draws, self.drawn)
            (seed,) = Seeds(self.seed, [x.device]).draw(next_draw([residual]))
            return storage.draw(x.to(WIDER[dtype]), dtype, seed, place_of(owned.whole))
        return split_into(storage.name, x, dtype)

    def keep(self, t: Tensor, wide: Tensor) -> None:
        """Write a wide value over t, which is no state, with low words as long as it lives."""
        split(_done, wide, t, t.dtype, self.new_parts(t))

    def adopt(self, states: Iterable[Owned]) -> None:
        """Make the low words of values that the step has put in states' places the states'."""
        adopted = set()
        for owned in states:
            lows = self._lows(owned.tensor)
            if lows is not None:
                adopted.add(storage_key(owned.tensor))
                if lows:
                    self._adopt(owned, lows)
        # Else they would be looked for in two places. Several states may be parts of one result.
        for key in adopted:
            self.memory[key].between = None

    def _adopt(self, owned: Owned, lows: tuple[Tensor, ...]) -> None:
        data, residual = owned.tensor.data, self.ensure(owned)
        name = "" if residual is None else residual.storage
        if residual is None or not rounds_residuals(name, data.dtype) or self.by_chance(name):
            whole = join(_done, data, self.wide[data.dtype], self._all_of(data, lows))
            return self._store_state(owned, whole)
        self.mark_written(owned)
        residual.expected = None
        residual.components[0].copy_(lows[0])  # the exact one, rounded to nearest
        return None

    def between(self, given: Input, *, written: bool) -> tuple[Tensor, ...]:
        """Return the low words of memory that is no state; where it is written, all that it is to
        have."""
        if self.memory[given.key].between is None:
            return ()
        t = given.data
        if written and not given.pieces:
            self.born(t, self.transient[t.dtype])
        return self._lows(t) or ()

    def new_parts(self, t: Tensor) -> Lows:
        """Return the parts of memory that is no state and is written; none of other dtypes."""
        if t.dtype not in self.wide:
            return ()
        known = self._memory_of(t).hold(t, self.transient[t.dtype].residuals[t.dtype])
        return self._all_of(t, known.like(t))

    def wrote(self, tensor: Tensor) -> list[Owned]:
        """Note a state that a compiled graph has written, with its residual; return it."""
        found = self.states_in(tensor)
        for owned in found:
            self.mark_written(owned)
        if (residual := STORE.get(tensor)) is not None:
            self._state(tensor).residual = residual
        return found

    def exact(self, t: Tensor) -> Residual | None:
        """Return the residual of the state that t itself is; None if it is none, or has none."""
        found = (o for o in self.states_in(t) if o.tensor is t)
        return next((self.of_state(o) for o in found), None)

    def say_lost(self, t: Tensor) -> list[Residual]:
        """Warn of states in t that have something in their low words; return their residuals."""
        known = ((o.name, self.of_state(o)) for o in self.states_in(t))
        found = [(name, r) for name, r in known if r is not None and r.has_content()]
        for name, _ in found:
            self.lost(name)
        return [residual for _, residual in found]

    def overwritten(self, t: Tensor) -> None:
        """Drop the low words of memory that something has written which knows none."""
        self._memory_of(t).between = None
        for owned in self.states_in(t):
            self.mark_written(owned)
        for residual in self.say_lost(t):
            residual.clear()

    def results(self, memory: Iterable[Tensor]) -> None:
        """Note the results of a segment."""
        for t in memory:
            self.memory[storage_key(t)].made = StorageWeakRef(t.untyped_storage())

    def is_result(self, t: Tensor) -> bool:
        """Return True if a segment has made t, from whole values: it may have more bits than a
        graph would give it."""
        return self.has_made(t) and self.may_be_state(t)

    def may_be_state(self, t: Tensor) -> bool:
        """Return True if t may be the value of a state, and no number."""
        return t.is_floating_point() and (t.dim() > 0 or self.scalars)

    def has_made(self, t: Tensor) -> bool:
        """Return True if a segment of this step has made t."""
        made = self._memory_of(t).made
        return made is not None and not made.expired()

    def dropped(self, t: Tensor) -> bool:
        """Return True if t, which is no state, has something in its low words."""
        return any(bool(lo.any()) for lo in self._lows(t) or ())

    def settle(self, written: Iterable[Tensor] | None = None) -> None:
        """Record that residuals belong to the present values, whatever versions were counted.

        Only when no operation is under way: autograd counts after the operation.

        Args:
            written: the tensors that may have another version by now; those of all states if None.
        """
        if written is None:
            self.memory.expect_same()
            for known in self.of_tensor.values():
                known.settle()
            return
        for t in written:
            for owned in self._memory_of(t).states:  # views count versions together
                if (found := self.of_tensor.get(id(owned.tensor))) is not None:
                    found.settle()


def _done(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)
