"""Cache of the states that steps may carry, looked for anew only where something has changed."""

import weakref
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from collage_fx.optimizer.discovery import FunctionStates, StateStorage
from collage_fx.optimizer.ownership import Owned
from collage_fx.runtime.errors import Warn
from collage_fx.runtime.residuals.checksum import same_bits
from collage_fx.runtime.residuals.memory import address
from collage_fx.runtime.residuals.store import STORE
from collage_fx.runtime.storage.state_name import StateName
from collage_fx.segments.low_words import LowWords
from collage_fx.segments.memory import Input, Piece, memory_key, storage_key
from collage_fx.segments.segment import Call, Segment
from collage_fx.segments.trie import layout_of


@dataclass(eq=False)
class KnownStates:
    """The states of an optimizer or function that may be compensated.

    What there was when they were looked for must not be kept alive.
    """

    discovery: FunctionStates
    storages: StateStorage
    """Storages of the states, which say which of them may be compensated."""
    warn: Warn
    generation: int = -1
    """Generation of the store when they were looked for."""
    memory: list[int] = field(default_factory=list)
    """The storage of each tensor that there was then."""
    tensors: list[weakref.ref[Tensor]] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    """The ids of the tensors."""
    states: list[int] = field(default_factory=list)
    """Positions of the tensors that may be compensated."""
    identities: list[int] = field(default_factory=list)
    """The ids of the parameters and states when they were looked for."""

    def find(self) -> list[Owned]:
        """Return the states that there are now: those of before, if all tensors are the same."""
        found = list(self.discovery.all())
        memory = [memory_key(o.tensor) for o in found]
        same = (STORE.generation, memory) == (self.generation, self.memory) and all(
            tensor() is o.tensor for tensor, o in zip(self.tensors, found, strict=True)
        )
        if not same:
            at = {id(o.tensor): i for i, o in reversed(list(enumerate(found)))}
            states = self.discovery.find(self.storages.is_compensable, self.warn)
            self.tensors = [weakref.ref(o.tensor) for o in found]
            self.ids = [id(o.tensor) for o in found]
            self.states = [at[id(o.tensor)] for o in states]
            # Looking for them may have dropped residuals.
            self.generation, self.memory = STORE.generation, memory
            self.identities = self.discovery.identities()
        return [found[i] for i in self.states]

    def renew(self, new: Mapping[int, Tensor]) -> bool:
        """Know tensors that have taken the places of others, by the ids of these; False if not."""
        identities = [id(new[i]) if i in new else i for i in self.identities]
        if identities != self.discovery.identities():
            return False
        for k, t in [(k, new[i]) for k, i in enumerate(self.ids) if i in new]:
            self.tensors[k], self.ids[k], self.memory[k] = weakref.ref(t), id(t), memory_key(t)
        self.generation, self.identities = STORE.generation, identities
        return True

    def __len__(self) -> int:
        """Return the number of states found last."""
        return len(self.states)

    def are_present(self) -> bool:
        """Return True if those that were found last are those that there are now."""
        if self.discovery.changed() or self.identities != self.discovery.identities():
            return False
        return all([self.tensors[i]() is not None for i in self.states])

    def alive(self) -> Iterator[Tensor]:
        """Yield the states found last that are still there."""
        found = (self.tensors[i]() for i in self.states)
        return (t for t in found if t is not None)


@dataclass(eq=False)
class OtherMemory:
    """Memory from before a step that the step writes, and that is in no place that is looked at.

    What the step reads before it overwrites it is a state, in an object, a closure or a buffer: it
    gets a residual. The rest, and gradients, keep what is computed from states until the step ends.
    """

    words: LowWords
    finds_params: bool
    """True if a parameter is such a state too, which functions are to be given."""
    storages: Callable[[], Collection[int]]
    """Returns those in which tensors of the optimizer, or arguments of the function, are."""
    met: dict[int, bool] = field(default_factory=dict)
    """Storage -> whether the step has read it before it overwrote it."""
    tried: dict[int, tuple[Segment, int]] = field(default_factory=dict)
    """Storage -> the segment that has written it in this step, of which it is not known whether a
    later one reads it, and the position of that segment in the step."""
    hand_on: list[int] = field(default_factory=list)
    """The positions of those of which a later one does, in checkpoints too."""
    kept: set[int] = field(default_factory=set)
    """Storages that keep low words until the step ends."""

    def begin(self) -> None:
        """Begin a step."""
        for segment, _ in self.tried.values():
            segment.hands_on = False
        self.met.clear()
        self.tried.clear()
        self.kept.clear()

    def see(self, segment: Segment, call: Call) -> None:
        """Note the memory that a segment reads before it overwrites it."""
        for i, given in enumerate(call.inputs):
            if given.pieces:
                continue
            if segment.writes[i]:
                self.words.memory.written_as(given.key, given.layout[0])
            if given.key not in self.met:
                self.met[given.key] = i not in segment.overwrites
            elif given.key in self.tried:
                writer, at = self.tried.pop(given.key)
                writer.hands_on = True
                self.hand_on.append(at)

    def take_up(self, segment: Segment, call: Call, others: Container[int]) -> bool:
        """Know the states in memory that a segment is about to write; tell if there are new ones.

        Args:
            segment: the operations.
            call: what they are done to.
            others: storages without states: of gradients, and what Dynamo graphs have made.
        """
        new: list[Owned] = []
        for i, (written, given) in enumerate(zip(segment.writes, call.inputs, strict=True)):
            if written and given.key not in others and (t := self._state(given)) is not None:
                where = segment.where_written(i)
                name = f"tensor {len(new) + 1} found elsewhere, written at {where}"
                new.append(self.words.memory.meet(t, StateName(name)))
        self.words.take_up(new)
        return bool(new)

    def _state(self, given: Input) -> Tensor | None:
        """Return the tensor of an input that is a state; None if it is none."""
        t = given.tensor
        if t is None or t.dtype not in self.words.wide or not self.met.get(given.key):
            return None
        if given.key in self.storages():  # one that is left alone
            return None
        if t.requires_grad and not self.finds_params:
            return None
        return None if self.words.memory[given.key].is_of_step else t

    def keep_low_words(
        self, segment: Segment, call: Call, filled: Container[int], at: int, *, tries: bool
    ) -> None:
        """Have memory that is no state, and is written from states, keep low words in this step.

        Where a gradient is written from states that the segment writes too, that is mostly a decay,
        and no later segment reads it: it keeps low words until that is known.

        Args:
            segment: the operations.
            call: what they are done to.
            filled: the storages of gradients.
            at: the position of the segment in the step.
            tries: whether to find out, or else to do as a checkpoint says.
        """
        if segment.hands_on is None and not tries:
            segment.hands_on = at in self.hand_on
        # Results in wider dtypes have no low words, and more bits than this memory.
        words = self.words
        states = frozenset(
            i
            for i, x in enumerate(call.inputs)
            if x.pieces or words.known(x.data) or words.is_result(x.data)
        )
        from_others = segment.written_from(states, also_written=False)
        for i in segment.written_from(states, also_written=True):
            given = call.inputs[i]
            if given.layout[0] not in self.words.wide:
                continue
            decay = i not in from_others and given.key in filled
            if decay and segment.hands_on is None:
                self.tried[given.key] = segment, at
            if not decay or segment.hands_on is not False:
                self.words.born(given.data, self.words.transient[given.layout[0]])
                self.kept.add(given.key)

    def adopt(self) -> None:
        """Make what a step has made, and an optimizer keeps in no place that is looked at, states.

        A function returns what it has made.
        """
        if self.finds_params:
            made = list(self._of_step())
            self.words.adopt(made)
            for owned in made:
                if STORE.get(owned.tensor) is not None:
                    STORE.share_by_memory(owned.tensor)

    def watched(self) -> Callable[[], None]:
        """Return a function that drops low words of memory written since, say by a closure.

        It is called behind the recorder's back.
        """
        known = {key: self.words.memory[key] for key in self.kept}
        before = [(m, t, same_bits(t)) for m in known.values() if (t := m.alive()) is not None]

        def drop() -> None:
            for memory, t, expected in before:
                if not expected(t):
                    memory.between = None

        return drop

    def _of_step(self) -> Iterator[Owned]:
        count = 0
        others = {*self.kept, *self.storages()}
        for key, known in list(self.words.memory.items()):
            if known.between is None or known.states or key in others:
                continue
            if (t := known.alive()) is not None and t.dim():
                count += 1
                name = f"tensor {count} of shape {tuple(t.shape)} that the step makes and keeps"
                yield self.words.memory.meet(t, StateName(name))


def resumed(states: list[Owned]) -> bool:
    """Return True if states have residuals from other steps, as of a checkpoint or a copy."""
    residuals = (STORE.get(owned.tensor) for owned in states)
    return any(r is not None and not r.provisional for r in residuals)


# States that take the memory of others, as in p.data = buffer: low words stay with the memory.


def leave_memory(words: LowWords, call: Call, states: Callable[[], Iterable[Owned]]) -> bool:
    """Keep low words with the memory of a segment, if a state has taken that of another by now.

    Whichever state has that memory when the step ends adopts them.

    Args:
        words: what is known of low words.
        call: what the segment is done to.
        states: returns those that there are now.

    Returns:
        whether a state has.
    """
    if not any(piece.moved for given in call.inputs for piece in given.pieces):
        return False
    had = {given.key: words.memory[given.key].states for given in call.inputs if given.pieces}
    now = ((o.tensor, had.get(memory_key(o.tensor))) for o in states())
    if not any(before and all(o.tensor is not t for o in before) for t, before in now):
        return False
    for given in (i for i in call.inputs if len(i.pieces) == 1):
        here = [o.tensor for o in had[given.key] if storage_key(o.tensor) == given.key]
        if given.pieces[0].layout == given.layout and _are_laid_out_as(here, given):
            words.hold(given)
    return True


def take_over(words: LowWords, states: Sequence[Owned]) -> bool:
    """Keep low words with memory that has another state now than when the step began.

    Returns:
        whether there is any.
    """
    present = {id(owned.tensor) for owned in states}
    taken: list[Input] = []
    moved = False
    for owned in states:
        t = owned.tensor
        key = memory_key(t)
        known = words.memory.get(key)
        if t.dtype not in words.wide or known is None or known.alive() is not None:
            continue
        had = known.states
        stays = [id(o.tensor) in present and memory_key(o.tensor) == key for o in had]
        if had and not any(stays) and all(o.place != owned.place for o in had):
            taken += _of_state_before(owned, had, key)
            moved = True
    for given in taken:
        words.hold(given)
    return moved


def _of_state_before(owned: Owned, had: Iterable[Owned], key: int) -> Iterator[Input]:
    """Yield the memory of a state with the low words of one that had it, if these are there."""
    t = owned.tensor
    for before in had:
        r = STORE.get(before.tensor)
        # Else it has gone on to what that state has in the place of this memory.
        if r is None or r.address != address(t):
            continue
        if r.is_shaped_as(t) and r.stride == t.stride():
            layout = layout_of(t.data)
            yield Input(t.data, layout, key, [Piece(before, t.data, r, layout)])


def _are_laid_out_as(tensors: Iterable[Tensor], given: Input) -> bool:
    return all(layout_of(t) == given.layout for t in tensors)
