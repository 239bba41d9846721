"""Notes of a step since the last flush: its operations, its inputs and its memory."""

import functools
import math
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from collage_fx.runtime.residuals.memory import (
    empty_as,
    has_memory,
    new_memory,
    span,
    tensor_on,
)
from collage_fx.runtime.torch_private import FakeTensorMode
from collage_fx.runtime.trees import tree_leaves, tree_map_only
from collage_fx.segments.low_words import LowWords
from collage_fx.segments.memory import Input, storage_key
from collage_fx.segments.operations import OPERATIONS, Operation, flat_piece, piece_of
from collage_fx.segments.segment import Call, Segment
from collage_fx.segments.trie import (
    Constant,
    Layout,
    Meta,
    Number,
    Place,
    Value,
    layout_of,
    leaves,
    line_of_code,
    meta_of,
)


class CannotNote(Exception):
    """An operation on memory that the notes know otherwise, or whose results are not known."""


class UnknownMemory(CannotNote):
    """An operation on memory that others may read or write, as NumPy does."""


@dataclass(eq=False, slots=True)
class Region:
    """A piece of memory that the notes know as one value, and its known views."""

    layout: Layout
    storage: StorageWeakRef | None = None
    """Storage that the notes make, and the step may give up; None for an input."""
    pending: bool = False
    """True until its data are what they will be."""
    views: dict[Layout, Value] = field(default_factory=dict)
    value: Value = field(init=False)

    def overlaps(self, layout: Layout) -> bool:
        """Return True if another view of the storage has memory in common."""
        if self.layout[0] is not layout[0]:
            return True  # elements of two sizes are not compared
        (start, end), (first, last) = span(*self.layout[1:]), span(*layout[1:])
        return start < last and first < end

    def covers(self, layout: Layout) -> bool:
        """Return True if another view of the storage has no element but those of this region."""
        (start, end), (first, last) = span(*self.layout[1:]), span(*layout[1:])
        dense = math.prod(self.layout[1]) == end - start
        return dense and self.layout[0] is layout[0] and start <= first and last <= end


class Notes:
    """Noted operations, as a path in a trie, and the value that each piece of memory is.

    An operation with the numbers of its operands leads from one place to the next, so that shapes
    are inferred once for a structure.
    """

    def __init__(self, words: LowWords, *, all_at_once: bool) -> None:
        self.words = words
        self.all_at_once = all_at_once
        """True if each operation is done before the next, so that no memory lacks its data."""
        self.carried: frozenset[int] = frozenset()
        """The storages of the parameters and states that there were when the step began."""
        self.root = Place()
        self.places = 0
        """Number of places in the trie."""
        self.fake = FakeTensorMode()
        self.value = functools.cache(Value)
        self.number = functools.cache(Number)
        """Number -> value, or float: the same object in all segments."""
        self.random: dict[int, StorageWeakRef] = {}
        """Storages of integers that were drawn in this step."""
        self.taken = 0
        """Number of times that all notes were forgotten."""
        self.clear()

    def clear(self) -> None:
        """Forget what was noted, but for its structure."""
        self.taken += 1
        self.at = self.root
        self.path: list[Place] = []
        self.inputs: list[Input] = []
        self.floats: list[float] = []
        self.regions: dict[int, list[Region]] = {}
        """Storage -> what the notes know of it."""
        self.region_of: list[Region] = []
        """Value -> its region."""
        self.made: list[Region] = []
        self.wait = False
        """True if any operation waits to be done."""

    def forget_structures(self) -> None:
        """Begin with an empty trie."""
        self.root, self.places = Place(), 0
        self.clear()

    def take(self) -> tuple[Segment, Call]:
        """Return the noted operations, to be done now; nothing is noted then."""
        live = [r for r in self.made if r.storage is not None and not r.storage.expired()]
        memory = [_memory(r) for r in live]
        numbers = tuple(r.value.at for r in live)
        segment = self.at.segments.get(numbers)
        if segment is None:
            segment = self.at.segments[numbers] = Segment(self._operations(), numbers)
        call = Call(self.inputs, memory, self.floats)
        self.clear()
        return segment, call

    def _operations(self) -> list[Place]:
        """Return the noted operations, those of graphs one by one."""
        found: list[Place] = []
        for place in self.path:
            found += [place] if place.effect is None else place.effect.places
        return found

    def view(self, source: Tensor, result: Tensor, func: Any, args: Any, kwargs: Any) -> None:
        """Note a view; may raise CannotNote."""
        region = self.region_of[self._value(source).at]
        layout = layout_of(result)
        if layout not in region.views:
            self.operation(func, OPERATIONS[func], args, kwargs)
            self.add_view(region, layout)

    def region(self, t: Tensor) -> Region | None:
        """Return the region of the notes that t is in, or meets."""
        regions = self.regions.get(storage_key(t))
        if regions is None:
            return None
        layout = layout_of(t)
        return next((r for r in regions if layout in r.views or r.overlaps(layout)), None)

    def operation(self, func: Any, operation: Operation, args: Any, kwargs: Any) -> Place:
        """Note an operation; may raise CannotNote."""
        if operation.sizes and any(type(a) is float for a in args):
            raise CannotNote  # the shape of its result is not that of its line
        numbers = operation.numbers if _is_floating(args) else ()
        spec = tuple([self.operand(a, i in numbers) for i, a in enumerate(args)])
        more: Any = ()
        if kwargs:
            more = tuple([(k, self.operand(v, k in numbers)) for k, v in kwargs.items()])
        place = self._enter((func, spec, more), args, kwargs)
        for written in place.writes:
            self.region_of[written.at].pending = True
        return place

    def _enter(self, line: Any, args: Any = None, kwargs: Any = None) -> Place:
        place = self.at.next.get(line)
        if place is None:
            place = Place(line, where=line_of_code())
            if args is not None and OPERATIONS[line[0]].kind == "note":
                place.at_once = not self._infer(place, args, kwargs)
            self.at.next[line] = place
            self.places += 1
        if place.at_once:
            raise CannotNote
        self.path.append(place)
        self.at = place
        return place

    def _infer(self, place: Place, args: Any, kwargs: Any) -> bool:
        """Infer what an operation writes and makes; tell whether that is known.

        What is wrong with its operands it says when it is done at once.
        """
        func, spec, more = place.line
        operation = OPERATIONS[func]
        written = operation.written_of(spec, dict(more))
        place.writes = [v for v in leaves(tuple(written)) if type(v) is Value]
        if self._overlaps(place):
            return False
        try:
            with self.fake:
                given = tree_map_only(Tensor, empty_as, (args, kwargs))
                sizes = [t.size() for t in tree_leaves(given) if isinstance(t, Tensor)]
                result = func(*given[0], **given[1])
                after = [t.size() for t in tree_leaves(given) if isinstance(t, Tensor)]
        except Exception:  # whatever an operation's own check raises
            return False
        if sizes != after:
            return False  # `out` is resized
        if operation.returns is None and not operation.nothing:
            place.many = isinstance(result, (list, tuple))
            made = list(result) if place.many else [result]
            if not all(isinstance(t, Tensor) and has_memory(t) for t in made):
                return False
            place.made = [meta_of(t) for t in made]
        return True

    def _overlaps(self, place: Place) -> bool:
        """Return True if an operation writes what it also reads in another view."""
        values = [v for v in leaves(place.line[1:]) if type(v) is Value]
        for w in place.writes:
            region = self.region_of[w.at]
            layout = next(one for one, v in region.views.items() if v is w)
            expanded = any(n > 1 and not s for n, s in zip(*layout[1:3], strict=True))
            if expanded or any(v is not w and self.region_of[v.at] is region for v in values):
                return True
        return False

    def operand(self, a: Any, number: bool = False) -> Any:
        """Return an operand as it stands in a line, an int as a float if it is a number of the
        arithmetic; may raise CannotNote."""
        kind = type(a)
        if isinstance(a, Tensor):
            return self._value(a)
        if kind is float or (number and kind is int and abs(a) < 2**53):
            self.floats.append(a)
            return self.number(len(self.floats) - 1)
        if kind is list or kind is tuple:
            return tuple([self.operand(x, number) for x in a])
        if kind is int or kind is bool:
            return Constant(kind, a)
        return a

    def add_view(self, region: Region, layout: Layout) -> Value:
        """Give a view of a region, which was not known before, a number."""
        self.region_of.append(region)
        value = region.views[layout] = self.value(len(self.region_of) - 1)
        return value

    def _value(self, t: Tensor) -> Value:
        """Return the value that t is; an input, if the notes do not know its memory."""
        try:
            key = storage_key(t)
        except NotImplementedError as error:  # a sparse one has no storage
            raise CannotNote from error
        if t.is_neg() or t.is_conj():  # another value in the same layout
            raise CannotNote
        layout = layout_of(t)
        regions = self.regions.get(key)
        if regions is None:
            return self._input(t, layout, key, [])
        for region in regions:
            if (value := region.views.get(layout)) is not None:
                return value
        for region in regions:
            if region.covers(layout):
                return self._foreign_view(region, layout)
            if region.overlaps(layout):
                raise CannotNote
        return self._input(t, layout, key, regions)

    def _input(self, t: Tensor, layout: Layout, key: int, regions: list[Region]) -> Value:
        """Note memory that was there before the segment."""
        if not has_memory(t):
            raise CannotNote
        # torch.load() shares memory too, with nobody who reads it: that of parameters and states.
        if not (self.all_at_once or key in self.carried or t.untyped_storage().resizable()):
            raise UnknownMemory("memory of a tensor is shared, with a NumPy array for instance")
        owner = None if self.words.is_state(t, key) else self.words.around(t)
        base = owner.tensor if owner is not None else t._base if t._is_view() else None
        if base is not None and base.dtype is t.dtype and layout_of(base) != layout:
            same = has_memory(base) and storage_key(base) == key
            if same and not any(r.overlaps(layout_of(base)) for r in regions):
                self._value(base)  # so that no two inputs overlap
                return self._value(t)
        self._enter(("input", layout, t.device, t.requires_grad, key in self.random))
        return self.take_input(t)

    def take_input(self, t: Tensor) -> Value:
        """Note an input by the path, which is a region of its own."""
        given = self.words.input(t)
        self.inputs.append(given)
        region = Region(given.layout)
        region.value = self.add_view(region, given.layout)
        self.regions.setdefault(given.key, []).append(region)
        return region.value

    def _foreign_view(self, region: Region, layout: Layout) -> Value:
        """Note a view that no operation has made, such as `p.data.view(-1)` of what was known."""
        _, size, stride, offset = layout
        flat = _is_contiguous(region.layout) and _is_contiguous(layout)
        shape = (tuple(size),) if flat else (tuple(size), stride)
        args = self.operand((*shape, offset - region.layout[3]))
        self._enter((flat_piece if flat else piece_of, (region.value, *args), ()))
        return self.add_view(region, layout)

    def make(self, meta: Meta) -> Tensor:
        """Return a tensor of which the data come later."""
        t = new_memory(*meta)
        storage, layout = t.untyped_storage(), (meta[2], meta[0], meta[1], 0)
        region = Region(layout, StorageWeakRef(storage), pending=True)
        region.value = self.add_view(region, layout)
        self.regions[storage._cdata] = [region]
        self.made.append(region)
        return t


def _is_contiguous(layout: Layout) -> bool:
    _, size, stride, _ = layout
    expected = 1
    for n, s in zip(reversed(size), reversed(stride), strict=True):
        if n != 1 and s != expected:
            return False
        expected *= n
    return expected > 0


def _memory(region: Region) -> Tensor:
    """Return a tensor on memory that was made and is still in use."""
    assert region.storage is not None
    return tensor_on(region.storage, *region.layout[:3])


def _is_floating(args: Any) -> bool:
    """Return True if the first operand is a floating tensor, for which an int is as a float is."""
    first = args[0] if args else None
    first = first[0] if isinstance(first, (list, tuple)) and first else first
    return isinstance(first, Tensor) and first.is_floating_point()
