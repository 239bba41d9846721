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
from collage_fx.passes.rewrite.comparisons import compared, rounds_number
from collage_fx.passes.rewrite.powers import in_float64
from collage_fx.segments.low_words import LowWords
from collage_fx.segments.memory import Input
from collage_fx.segments.operations import OPERATIONS, is_overwriting
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
    at: int = -1
    """Position of the segment among those of the step."""
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

    def of_written(self, segment: Segment, call: Call) -> list[Owned]:
        """Return the states that a segment writes and others read."""
        if not self.of_place:
            return []
        written = _states(segment, call, written=True)
        return [o for o in written if self.of_place.get(o.place, set()) - {segment}]


def _states(segment: Segment, call: Call, *, written: bool) -> Iterator[Owned]:
    for given, writes in zip(call.inputs, segment.writes, strict=True):
        if writes is written:
            yield from (p.owned for p in given.pieces if p.owned.owner == "state")


@dataclass
class Operands:
    """Operands of the operations of a segment, in a run of it or in a graph."""

    segment: Segment
    dtypes: dict[Any, torch.dtype]
    """dtype -> what is computed in for it; empty to leave all as they are."""
    value: Callable[[int], Any]
    number: Callable[[int], Any]
    cast: Callable[[Any, torch.dtype], Any]

    def function(self, line: Line) -> Callable[..., Any]:
        """Return the function of an operation: as it stands, if they are left as they are."""
        if self.dtypes or line.func is not undone:
            return line.func
        return lambda rounded, _: rounded

    def of(self, line: Line) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments of an operation, and those by name."""
        if line.func is VIEW_AS and self.dtypes:  # of the dtype whose bits it looks at
            x = line.args[0].at
            return [self.cast(self.value(x), self.segment.dtype[x]), line.args[1]], {}
        return [*map(self._one, line.args)], {k: self._one(v) for k, v in line.kwargs}

    def compares_in(self, line: Line) -> Any:
        """Return the dtype to which the step rounds the number that it compares with; or None."""
        x = line.args[0] if self.dtypes and line.args else None
        dtype = self.segment.dtype[x.at] if type(x) is Value else None
        return dtype if rounds_number(line.func, dtype) else None

    def _one(self, a: Any) -> Any:
        kind = type(a)
        if kind is Value:
            return self.value(a.at)
        if kind is Number:
            return self.number(a.at)
        if kind is tuple:
            return [self._one(x) for x in a]
        if kind is Constant:
            return a.value
        return self.dtypes.get(a, a) if kind is torch.dtype else a


def run_joined(segment: Segment, call: Call, words: LowWords) -> None:
    """Do a segment as it stands, on whole values in the wide dtype; store each when it is done.

    No operation needs a rule: an expansion enters as the fp32 number that it is (float64 for fp32
    states) and is split when it is stored, once for all operations of the segment between. What has
    nothing to do with low words is done as in eager PyTorch.
    """
    given = dict(zip(segment.inputs, call.inputs, strict=True))
    made = dict(zip(segment.live, call.memory, strict=True))
    env: list[Any] = [None] * len(segment.root)

    def value(at: int) -> Any:
        if env[at] is None and at in given:
            t = given[at]
            dtype = t.data.dtype
            env[at] = (
                words.joined(t) if dtype in words.wide else t.data.to(computed.get(dtype, dtype))
            )
        return env[at]

    def as_it_is(at: int) -> Any:
        if at not in given:
            return env[at]
        if at in segment.written:
            env[at] = given[at].data
        return given[at].data

    computed = segment.computed(words)
    number, cast = call.floats.__getitem__, Tensor.to
    widened = Operands(segment, computed, value, number, cast)
    left = Operands(segment, {}, as_it_is, number, cast)
    narrowed = Operands(segment, {}, lambda at: value(at).to(segment.dtype[at]), number, cast)
    unstored: set[int] = set()
    for line in segment.lines:
        operands = left if line.strand in call.plain else widened
        args, kwargs = operands.of(line)
        try:
            if (dtype := operands.compares_in(line)) is not None:
                result = compared(line.func, dtype, *args, **kwargs)
            else:
                func = operands.function(line)
                if operands is left:
                    result = func(*args, **kwargs)
                else:
                    result = _done_wide(func, line, (args, kwargs), narrowed)
        except BaseException:
            for at in unstored:  # as after the same error in eager PyTorch
                _store(env[at], given.get(at), made.get(at), words)
            raise
        unstored.update(at for at in line.writes if at in given or at in made)
        for at, one in zip(line.made, result if line.many else (result,), strict=False):
            env[at] = one
        for at, dtype in zip(line.made, line.dtypes, strict=False):
            env[at] = env[at].to(operands.dtypes.get(dtype, dtype))  # not as the widest operand is
        unstored.difference_update(line.stored)
        for at in line.stored:
            _store(env[at], given.get(at), made.get(at), words)
        for at in line.over:
            env[at] = None


def _done_wide(
    func: Callable[..., Any],
    line: Line,
    wide: tuple[list[Any], dict[str, Any]],
    narrowed: Operands,
) -> Any:
    """Do an operation in the wide dtype, or in the step's own dtypes if it takes no other."""
    args, kwargs = wide
    try:
        return in_float64(func)(*args, **kwargs)
    except (RuntimeError, NotImplementedError):
        if line.writes:
            raise
        args, kwargs = narrowed.of(line)
        return func(*args, **kwargs)


def _store(value: Tensor, given: Input | None, made: Tensor | None, words: LowWords) -> None:
    if given is not None:
        if value is not given.data:
            words.store(given, value)
    elif made is not None and made.dtype in words.wide and value.dtype is not made.dtype:
        words.keep(made, value)
    elif made is not None:
        made.copy_(value)
