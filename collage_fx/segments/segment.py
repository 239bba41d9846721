"""A segment: operations that were recorded, and are done together."""

import functools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from collage_fx.gradients.multiplied import Multiplied
from collage_fx.optimizer.ownership import Owned
from collage_fx.passes.ir.graph_memory import Connected
from collage_fx.passes.rewrite.wider import on_wider
from collage_fx.segments.low_words import LowWords
from collage_fx.segments.memory import Input
from collage_fx.segments.operations import OPERATIONS, compare_with_numbers, is_overwriting
from collage_fx.segments.trie import Constant, Number, Place, Value, leaves, on_one_line
from collage_fx.segments.user_rounding import (
    ROUNDING,
    UserRounding,
    conversions,
    undone,
    with_errors,
)

VIEW_AS = torch.ops.aten.view.dtype


@dataclass
class Line:
    """One operation of a segment."""

    func: Any
    args: Any
    kwargs: tuple[tuple[str, Any], ...]
    made: range
    """The numbers of the values that it makes."""
    many: bool
    """True if it returns a list."""
    dtypes: tuple[Any, ...] = ()
    """The dtypes of the values that it makes, as the step sees them; none for a view."""
    writes: Collection[int] = ()
    """The numbers of the memory that it writes."""
    over: tuple[int, ...] = ()
    """The numbers of the values that are not needed any more after it."""
    stored: tuple[int, ...] = ()
    """Numbers of the memory that no later operation reads or writes: it can be stored."""
    where: str = ""
    """The line of code, as FX keeps it of a node."""
    strand: int = 0
    """The number of the strand that it is in."""


@dataclass
class Strand:
    """Operations that others in a segment have nothing to do with, but for what they only read."""

    inputs: set[int] = field(default_factory=set)
    """The positions of the inputs that they read or write."""
    live: list[int] = field(default_factory=list)
    """Numbers of the values that they make and that live on."""
    dtypes: set[torch.dtype] = field(default_factory=set)
    """The dtypes of these inputs and values."""
    numbers: bool = True
    """True if all inputs and values of the strand are 0-d tensors."""

    def is_plain(self, call: "Call", words: LowWords) -> bool:
        """Return True if there are no low words in it, nor can there be any, in a call.

        Where no state of the step has any, 16-bit values are what the user has made them. Beside
        states that have some they may be a part of such a state's update, as numbers may be.
        """
        if not words.plain:
            return not self.numbers and self.dtypes.isdisjoint(words.wide)
        given, made = [call.inputs[i] for i in self.inputs], [call.memory[k] for k in self.live]
        return not any(i.pieces or words.between(i, written=False) for i in given) and not any(
            words.states_in(t) for t in made if t.dtype in words.wide
        )


class Segment:
    """A structure of operations: what they read, make and write, and when each is over."""

    def __init__(self, places: list[Place], live: tuple[int, ...]) -> None:
        """Note a structure.

        Args:
            places: the way to it in the trie.
            live: the numbers of the values that it makes and that are in use after it.
        """
        self.live = live
        self.history: Any = None
        """History of the runs, kept by what runs the segment."""
        self.hands_on: bool | None = None
        """True if a later segment of the step reads a gradient that this one writes from states
        that it writes too; None if that is not known."""
        self._written_from: dict[Any, frozenset[int]] = {}
        self.inputs: list[int] = []
        """The numbers of the values that are inputs."""
        self.lines: list[Line] = []
        self.root: list[int] = []
        """Value -> the value whose memory it is in."""
        self.dtype: list[Any] = []
        """Value -> its dtype, as the step sees it."""
        self.sized: set[int] = set()
        """The numbers of the inputs, and of the values that are made, that have a dimension."""
        self.written: set[int] = set()
        """The numbers of the inputs that are written, and of the values that are made in place."""
        self.copies: list[tuple[int, int]] = []
        """Inputs that are written, each with the input that was copied into it as it is."""
        self.bit_views: dict[int, int] = {}
        """View of a value as integers -> that value."""
        random: set[int] = set()
        lines = []
        for place in places:
            if place.line[0] == "input":
                self._add_input(place, random)
            else:
                lines.append(self._line(place))
        compare_with_numbers(self, lines, places)
        rounding, kept = UserRounding(self, random), with_errors(self, lines)
        for k, line in enumerate(lines):
            if k in kept:
                self._round(line)
            rounding.follow(line)
        self.undoes_rounding = rounding.found
        """True if a value is taken as it was before the step rounded it by chance."""
        self.writes_bits = self._writes_bits()
        """True if it writes what it sees as integers too, in the memory that both have."""
        self.opaque = any("_fused_" in str(line.func) for line in self.lines)
        """True if it has kernels that no compiler looks into, as fused optimizers do."""
        self._find_ends()
        self.strands = self._find_strands()
        self.writes = [at in self.written for at in self.inputs]
        """Flags of the inputs: True if the segment writes one."""

    def _add_input(self, place: Place, random: set[int]) -> None:
        at = len(self.root)
        self.inputs.append(at)
        self.root.append(at)
        self.dtype.append(place.line[1][0])
        if place.line[1][1]:
            self.sized.add(at)
        if place.line[-1]:
            random.add(at)

    def written_from(self, states: frozenset[int], *, also_written: bool) -> frozenset[int]:
        """Return the inputs that are no states and are written with what is computed of some.

        Args:
            states: the positions of the inputs that are states.
            also_written: whether of all states, or only of those that the segment leaves alone.
        """
        if (found := self._written_from.get((states, also_written))) is not None:
            return found
        sources = {self.inputs[i] for i in states}
        reached = sources if also_written else sources - self.written
        for line in self.lines:
            read = {self.root[v.at] for v in leaves((line.args, line.kwargs)) if type(v) is Value}
            if not read.isdisjoint(reached):
                reached = reached | set(line.writes) | {self.root[at] for at in line.made}
        others = {i for i, at in enumerate(self.inputs) if at in reached and at in self.written}
        found = self._written_from[states, also_written] = frozenset(others - states)
        return found

    def plain(self, call: "Call", words: LowWords) -> frozenset[int]:
        """Return the numbers of the strands that are done as they stand, in a call."""
        if words.wide.keys().isdisjoint(self.dtype):
            return frozenset(range(len(self.strands)))
        return frozenset(k for k, s in enumerate(self.strands) if s.is_plain(call, words))

    def only_in(self, strands: frozenset[int]) -> set[int]:
        """Return the inputs, and the values that live on, that no other strands have."""
        if not strands:
            return set()
        mine = [s for k, s in enumerate(self.strands) if k in strands]
        others = {i for k, s in enumerate(self.strands) if k not in strands for i in s.inputs}
        inputs = {self.inputs[i] for s in mine for i in s.inputs - others}
        return inputs | {self.live[k] for s in mine for k in s.live}

    def computed(self, words: LowWords) -> dict[Any, torch.dtype]:
        """Return dtype -> what is computed in for it, in the strands that are not plain."""
        return words.wide if self.writes_bits else words.computed

    @functools.cached_property
    def overwrites(self) -> frozenset[int]:
        """The positions of the inputs that are overwritten as a whole before they are read."""
        found, met = set(), set[int]()
        for line in self.lines:
            touched = [v.at for v in leaves((line.args, line.kwargs)) if type(v) is Value]
            for at in touched if is_overwriting(line.func) else ():
                if at in line.writes and at not in met and touched.count(at) == 1:
                    found.add(at)
            met.update(self.root[v] for v in touched)
        return frozenset(i for i, at in enumerate(self.inputs) if at in found)

    def refuse_reads(self, call: "Call", multiplied: Multiplied) -> None:
        """Raise UnsupportedError if a line reads a gradient that is to be multiplied."""
        data = {at: given.data for at, given in zip(self.inputs, call.inputs, strict=True)}
        for line in (line for line in self.lines if OPERATIONS[line.func].kind != "view"):
            roots = {self.root[v.at] for v in leaves((line.args, line.kwargs)) if type(v) is Value}
            only_written = set(line.writes) if is_overwriting(line.func) else set()
            read = [data[at] for at in roots - only_written if at in data]
            multiplied.refuse(line.func, read, functools.partial(on_one_line, line.where))

    def where_written(self, i: int) -> str:
        """Return the line of code that writes an input first."""
        at = self.inputs[i]
        return next(on_one_line(line.where) for line in self.lines if at in line.writes)

    def _writes_bits(self) -> bool:
        seen: set[int] = set()
        for line in self.lines:
            if line.func is VIEW_AS:
                seen.add(self.root[line.args[0].at])
            if any(self.dtype[at] is not torch.int32 for at in seen.intersection(line.writes)):
                return True
        return False

    def insert(self, func: Any, args: tuple[Value, ...]) -> Value:
        """Add a line that the step does not have; return what it makes."""
        at = len(self.root)
        self.root.append(at)
        self.dtype.append(self.dtype[args[-1].at])
        self.lines.append(Line(func, args, (), range(at, at + 1), False))
        return Value(at)

    def _round(self, line: Line) -> None:
        """Have a conversion take what it is given rounded to the dtypes that it converts to."""
        new = {x.at: self.insert(ROUNDING[self.dtype[to]], (x,)) for x, to in conversions(line)}

        def given(spec: Any) -> Any:
            if type(spec) is tuple:
                return tuple(map(given, spec))
            return new.get(spec.at, spec) if type(spec) is Value else spec

        line.args = (*line.args[:-1], given(line.args[-1]))

    def _line(self, place: Place) -> Line:
        func, args, kwargs = place.line
        first = len(self.root)
        if OPERATIONS[func].kind == "view":
            source = next(v for v in leaves(args) if type(v) is Value)
            self.root.append(self.root[source.at])
            self.dtype.append(args[1] if func is VIEW_AS else self.dtype[source.at])
            if func is VIEW_AS and args[1] is torch.int32:
                self.bit_views[first] = source.at
        else:
            self.root += range(first, first + len(place.made))
            self.dtype += [meta[2] for meta in place.made]
            self.sized.update(first + k for k, meta in enumerate(place.made) if meta[0])
        written = {self.root[v.at] for v in place.writes}
        self.written |= written
        if getattr(func, "_opname", "") in ("copy_", "_foreach_copy_"):
            inputs = set(self.inputs)
            for to, source in zip(leaves(args[0]), leaves(args[1]), strict=True):
                if inputs.issuperset(pair := (self.root[to.at], self.root[source.at])):
                    self.copies.append(pair)
        made = range(first, len(self.root))
        dtypes = tuple(meta[2] for meta in place.made)
        return Line(func, args, kwargs, made, place.many, dtypes, written, where=place.where)

    def _find_ends(self) -> None:
        """Find after which line each value is over, and each piece of memory."""
        seen: set[int] = set()
        ended: set[int] = set()
        kept = {*self.inputs, *self.live}
        for line in reversed(self.lines):
            used = {v.at for v in leaves((line.args, line.kwargs)) if type(v) is Value}
            touched = {*used, *line.made}
            over, roots = touched - seen, {self.root[v] for v in touched} - ended
            seen |= over
            ended |= roots
            line.stored = tuple(
                r for r in roots if r in kept and (r in self.written or r in self.live)
            )
            line.over = tuple({v for v in over if v not in kept} | (roots & kept))

    def _find_strands(self) -> list[Strand]:
        """Return the strands, and note in each line which is its own."""
        read_only, connected = set(self.inputs) - self.written, Connected[int]()

        def end(at: int) -> int:
            return at if self.root[at] in read_only else self.root[at]

        used = [
            sorted({v.at for v in leaves((x.args, x.kwargs)) if type(v) is Value} | {*x.made})
            for x in self.lines
        ]
        ends = [[e for e in map(end, some) if e not in read_only] for some in used]
        for some in ends:
            for one in some[1:]:
                if connected.root(some[0]) != connected.root(one):
                    connected.join(some[0], one)
        strands: dict[Any, tuple[int, Strand]] = {}
        place = {at: i for i, at in enumerate(self.inputs)}
        for line, values, some in zip(self.lines, used, ends, strict=True):
            key = connected.root(some[0]) if some else ("line", len(strands))
            line.strand, strand = strands.setdefault(key, (len(strands), Strand()))
            strand.inputs |= {place[r] for r in {self.root[v] for v in values} & place.keys()}
        for k, at in enumerate(self.live):
            found = strands.get(connected.root(end(at)))
            if found is not None:
                found[1].live.append(k)
        for _, strand in strands.values():
            both = {*(self.inputs[i] for i in strand.inputs), *(self.live[k] for k in strand.live)}
            strand.dtypes = {self.dtype[at] for at in both}
            strand.numbers = self.sized.isdisjoint(both)
        return [strand for _, strand in strands.values()]


@dataclass
class Call:
    """Operands of one run of a segment."""

    inputs: list[Input]
    """Inputs in the segment's order."""
    memory: list[Tensor]
    """Tensors in which the values that live on are stored."""
    floats: list[float]
    plain: frozenset[int] = frozenset()
    """The strands that are done as they stand."""


@dataclass
class Readers:
    """Segments by the states that they read and do not write; parameters are no such states."""

    of_place: defaultdict[Any, set[Segment]] = field(default_factory=lambda: defaultdict(set))
    """Place of a state -> the segments."""

    def add(self, segment: Segment, call: Call) -> None:
        """Note a run of a segment."""
        for owned in _states(segment, call, written=False):
            self.of_place[owned.place].add(segment)

    def discard(self, segment: Segment) -> None:
        """Forget a segment."""
        for segments in self.of_place.values():
            segments.discard(segment)

    def of(self, owned: Owned) -> set[Segment]:
        """Return the segments that read a state."""
        return self.of_place.get(owned.place, set())

    def of_written(self, segment: Segment, call: Call) -> list[Owned]:
        """Return the states that a segment writes and others read, or this one in another call."""
        return [o for o in _states(segment, call, written=True) if self.of(o)]


def _states(segment: Segment, call: Call, *, written: bool) -> Iterator[Owned]:
    for given, writes in zip(call.inputs, segment.writes, strict=True):
        if writes is written:
            yield from (p.owned for p in given.pieces if p.owned.owner == "state")


class WholeValues:
    """A segment on whole values, done operation by operation; `segment_graph` makes a graph of it.

    No operation needs a rule: an expansion enters as the number in a wider dtype that it is, and is
    split when it is stored, once for all operations of the segment between. What has nothing to do
    with low words is done as in eager PyTorch. An input is joined when it is read first; a value is
    stored when no later line has to do with it.
    """

    def __init__(self, segment: Segment, call: Call, words: LowWords) -> None:
        self.segment = segment
        self.words = words
        self.inputs = dict(zip(segment.inputs, call.inputs, strict=True))
        self.given: dict[int, Any] = {at: given.data for at, given in self.inputs.items()}
        """Input -> its memory."""
        self.made: dict[int, Any] = dict(zip(segment.live, call.memory, strict=True))
        """Result that lives on -> its memory."""
        self._begin(segment.computed(words), call.plain, call.floats)

    def _begin(self, computed: dict[Any, Any], plain: frozenset[int], numbers: list[Any]) -> None:
        self.computed, self.plain, self.numbers = computed, plain, numbers
        self.env: list[Any] = [None] * len(self.segment.root)

    def run(self) -> None:
        """Do all lines."""
        done: list[Line] = []
        try:
            for line in self.segment.lines:
                self._do(line)
                done.append(line)
        except BaseException:  # as after the same error in eager PyTorch
            wrote = {at for line in done for at in line.writes if at in self.given | self.made}
            for at in wrote.difference(*(line.stored for line in done)):
                self._put_back(at)
            raise

    def _do(self, line: Line) -> None:
        left = line.strand in self.plain
        dtypes, value = ({}, self._as_it_is) if left else (self.computed, self._value)
        func, (args, kwargs) = line.func, self._operands(line, value, dtypes)
        first = line.args[0] if dtypes and line.args else None
        dtype = self.segment.dtype[first.at] if type(first) is Value else None
        if dtypes:
            func = on_wider(func, dtype)
        elif func is undone:
            func = _as_rounded
        for at, one in zip(line.made, self._called(line, func, args, kwargs), strict=False):
            self.env[at] = one
        for at, dtype in zip(line.made, line.dtypes if dtypes else (), strict=False):
            self.env[at] = self._cast(self.env[at], dtypes.get(dtype, dtype))  # not the widest one
        for at in line.stored:
            self._put_back(at)
        for at in line.over:
            self.env[at] = None

    def _operands(
        self, line: Line, value: Callable[[int], Any], dtypes: dict[Any, torch.dtype]
    ) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments of an operation, and those by name, with these values and dtypes."""
        if line.func is VIEW_AS and dtypes:  # of the dtype whose bits it looks at
            x = line.args[0].at
            return [self._cast(value(x), self.segment.dtype[x]), line.args[1]], {}
        args = [self._operand(a, value, dtypes) for a in line.args]
        return args, {k: self._operand(v, value, dtypes) for k, v in line.kwargs}

    def _operand(self, a: Any, value: Callable[[int], Any], dtypes: dict[Any, Any]) -> Any:
        kind = type(a)
        if kind is Value:
            return value(a.at)
        if kind is Number:
            return self.numbers[a.at]
        if kind is tuple:
            return [self._operand(x, value, dtypes) for x in a]
        if kind is Constant:
            return a.value
        return dtypes.get(a, a) if kind is torch.dtype else a

    def _value(self, at: int) -> Any:
        if self.env[at] is None and at in self.given:
            self.env[at] = self._joined(at)
        return self.env[at]

    def _as_it_is(self, at: int) -> Any:
        if at not in self.given:
            return self.env[at]
        if at in self.segment.written:
            self.env[at] = self.given[at]
        return self.given[at]

    def _put_back(self, at: int) -> None:
        if self.env[at] is not self.given.get(at):
            self._store(at, self.env[at])

    # In a graph other ones are in the place of these.

    def _joined(self, at: int) -> Any:
        t = self.given[at]
        if t.dtype in self.words.wide:
            return self.words.joined(self.inputs[at])
        return t.to(self.computed.get(t.dtype, t.dtype))

    def _called(self, line: Line, func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Return what an operation makes; in the step's own dtypes, if it takes no wide values."""
        try:
            result = func(*args, **kwargs)
        except (RuntimeError, NotImplementedError):
            if line.writes or line.strand in self.plain:
                raise
            args, kwargs = self._operands(line, self._narrowed, {})
            result = line.func(*args, **kwargs)
        return result if line.many else (result,)

    def _narrowed(self, at: int) -> Any:
        return self._cast(self._value(at), self.segment.dtype[at])

    def _cast(self, x: Any, dtype: torch.dtype) -> Any:
        return x.to(dtype)

    def _store(self, at: int, value: Any) -> None:
        if at in self.given:
            self.words.store(self.inputs[at], value)
        elif self.made[at].dtype in self.words.wide and value.dtype is not self.made[at].dtype:
            self.words.keep(self.made[at], value)
        else:
            self.made[at].copy_(value)


def _as_rounded(rounded: Any, _: Any) -> Any:
    return rounded
