"""The recorder: notes the operations of a step in place of doing them, by a dispatch mode."""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import InitVar, dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.nn import Parameter

from collage_fx.hooks import data_reads, nested_compile
from collage_fx.hooks.dynamo_settings import Failures
from collage_fx.passes.dedup.repeated_tensors import divided, writes_list
from collage_fx.passes.frontend.decompose import DIVIDING, parts_of
from collage_fx.passes.rewrite.wider import on_wider
from collage_fx.record.at_once import AtOnce, Unrecorded, in_python, tensors_in
from collage_fx.record.dispatch_modes import BesideDynamo, RecordingMode
from collage_fx.record.graphs.notes import GraphNotes
from collage_fx.record.notes import CannotNote, Notes, UnknownMemory
from collage_fx.record.numbers_read import NumbersRead
from collage_fx.runtime.errors import Warn
from collage_fx.runtime.kernels import left_out
from collage_fx.runtime.residuals.memory import has_memory
from collage_fx.runtime.torch_private import (
    TorchDispatchMode,
    _disable_current_modes,
    _len_torch_dispatch_stack,
    _pop_mode_temporarily,
)
from collage_fx.runtime.trees import tree_leaves
from collage_fx.segments.low_words import LowWords
from collage_fx.segments.memory import storage_key
from collage_fx.segments.operations import OPERATIONS, Operation
from collage_fx.segments.segment import Call, Segment
from collage_fx.segments.trie import line_of_code, on_one_line
from collage_fx.segments.user_rounding import RoundingAtOnce

aten = torch.ops.aten
_MANY_PLACES = 200_000
"""Number of places beyond which they are forgotten at the end of a step: its structure changes."""


_PLAIN = frozenset({Tensor, Parameter})
_OF_TORCH = "torch.distributed."
"""The package of the subclasses whose dispatch hands all that it reads to operations again: DTensor
and AsyncCollectiveTensor."""
_ASSERT, _ASSERT_WITH_MESSAGE = aten._assert_async.default, aten._assert_async.msg


def _dispatches(kind: type) -> bool:
    """Return True if tensors of a class do operations by code of their own, as DTensors do."""
    plain = Tensor.__torch_dispatch__
    return getattr(kind, "__torch_dispatch__", plain) is not plain


@dataclass(eq=False)
class Recorder:
    """Recorder that notes operations, and has them done when somebody needs their results.

    Results are tensors that have memory and no data yet: only where each reader of memory is known.
    Plain operations of PyTorch on plain tensors are noted; what cannot be noted is done at once,
    after what it depends on, and an operator of another library after all that waits. From where a
    step does anything else that may read memory (`see_unknown_reader`), nothing is noted any more.

    An operation that fails by the shapes of its operands raises where it stands; when a step raises
    for whatever reason, what was noted before is done, so that the states are as after the same
    error in eager PyTorch.
    """

    words: LowWords
    run: Callable[[Segment, Call], None]
    """Function that does a segment."""
    wake: Callable[[], None]
    """Function that looks for the states, in a step in which nobody has done so."""
    told: Callable[[str], None]
    """Function that is told why nothing is noted from now on."""
    warn: Warn
    """Function that is told, each time, what is not compensated."""
    watched: Callable[[], Callable[[], None]]
    """Function that is called before something that is not recorded; returns the one to call
    after it."""
    record: InitVar[bool]
    """True if anything is noted, so that operations may be done later than they are called."""
    reads: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    beside_dynamo: bool = False
    """True if Dynamo compiles parts of this step."""
    asleep: bool = False
    """True if the states are not looked for yet in this step: the first operation does so."""
    watching: bool = False
    """True if other ways of reading tensors are hooks in this step."""
    passes_by: bool = False
    """True if operations are done as they come, as within a compiled graph."""
    noted: int = 0
    """Number of operations that were noted."""
    in_graphs: int = 0
    """Number of them in this step as parts of Dynamo graphs that are noted as a whole."""
    apart: int = 0
    """Number of the others."""
    unrecorded: Unrecorded = field(default_factory=Unrecorded)

    def __post_init__(self, record: bool) -> None:
        self.notes = Notes(self.words, all_at_once=not record)
        self.numbers = NumbersRead(self.words)
        self.rounding = RoundingAtOnce(self.notes.random)
        self.at_once = AtOnce(self.words, self.notes, self.numbers)
        self.graphs = GraphNotes(self.notes, self.at_once)

    @property
    def all_at_once(self) -> bool:
        """True if every operation is done when it is called."""
        return self.notes.all_at_once

    @contextmanager
    def _set(self, name: str, value: bool) -> Iterator[None]:
        before = getattr(self, name)
        setattr(self, name, value)
        try:
            yield
        finally:
            setattr(self, name, before)

    def paused(self) -> contextlib.AbstractContextManager[None]:
        """Let operations pass, within, as in a compiled graph."""
        return self._set("passes_by", True)

    def graph(self, graph: GraphModule, args: tuple[Any, ...]) -> Any:
        """Note a Dynamo graph, of which nothing else can read results on the way."""
        left_out.ask()
        beside_dynamo = self.beside_dynamo
        with self._set("beside_dynamo", False), data_reads.constructors():
            if self.all_at_once or self.passes_by:
                return graph(*args)
            if self.asleep:
                with _pop_mode_temporarily():
                    self._wake_up()
            apart = self.apart
            result, count = self.graphs.run(graph, args)
            if count:
                self.in_graphs, self.apart = self.in_graphs + count, apart
        if beside_dynamo and any(map(_is_number, result)):
            self.flush_outside()
        return result

    def _mode(self) -> TorchDispatchMode:
        return BesideDynamo(self) if self.beside_dynamo else RecordingMode(self)

    def _wake_up(self) -> None:
        self.wake()
        self.watch_reads()

    @contextmanager
    def recording(self, *, beside_dynamo: bool, repeats: bool = False) -> Iterator[None]:
        """Note the operations within, and have them done at the end, whatever ends it.

        Args:
            beside_dynamo: whether Dynamo traces what is done.
            repeats: whether one graph is expected to do all of it, and nothing to read between.
        """
        self.beside_dynamo = beside_dynamo
        self.in_graphs = self.apart = 0
        self.watching = False
        self.graphs.steps += 1
        self.numbers.seen.clear()
        with self.unrecorded.step(), self._mode(), contextlib.ExitStack() as self.reads:
            if not repeats:
                self.watch_reads()
            try:
                yield
            finally:
                with _disable_current_modes():
                    self.flush()
                self.notes.random.clear()
                self.rounding.origins.clear()
        if self.notes.places > _MANY_PLACES:
            self.notes.forget_structures()

    def watch_reads(self) -> None:
        """Have operations flushed before their results are read in other ways, in this step."""
        if self.watching:
            return
        numbers, self.watching = self.numbers, True
        step = data_reads.Step(
            self.flush_outside, self.see_unknown_reader, numbers.note, numbers.keep
        )
        watch = data_reads.flushed_by(step, beside_dynamo=self.beside_dynamo)
        self.reads.enter_context(watch)

    def suspended(self, closure: Callable[..., Any], failures: Failures) -> Callable[..., Any]:
        """Return closure run as if this mode were not there: it computes gradients."""

        def run(*args: Any, **kwargs: Any) -> Any:
            with (
                _pop_mode_temporarily(),
                nested_compile.outside(),
                failures.raised(),
                self.paused(),
            ):
                self.flush()
                self.words.settle()
                written = self.watched()
                try:
                    return closure(*args, **kwargs)
                finally:
                    written()

        return run

    def flush_outside(self) -> None:
        """Flush, called from where the mode may be on."""
        if self.notes.wait and _len_torch_dispatch_stack():  # and not from within a flush
            with _disable_current_modes():
                self.flush()

    def see_unknown_reader(self, why: str) -> None:
        """Do operations when they are called from now on, in this step and in later ones.

        Args:
            why: what may read memory in ways that are not seen.
        """
        # Else it is no operation of the step that does it, but what compiles or does these.
        if not self.passes_by and _len_torch_dispatch_stack():
            with _disable_current_modes():
                self._note_no_more(why)

    def _note_no_more(self, why: str) -> None:
        if not self.all_at_once:
            self.flush()
            self.notes.all_at_once = True
            self.told(f"{why}, at {on_one_line(line_of_code())}")

    # Dispatch.

    def dispatch(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Do or note an operation, and return what it makes."""
        kwargs = kwargs or {}
        if self.passes_by:
            return func(*args, **kwargs)
        if not _PLAIN.issuperset(types) and (own := [t for t in types if _dispatches(t)]):
            # As DTensors use them, to find out how they are sharded.
            if any(hasattr(t, "fake_mode") for t in tensors_in(args, kwargs)):
                return func(*args, **kwargs)
            for kind in own:
                if not kind.__module__.startswith(_OF_TORCH):
                    self._note_no_more(f"{kind.__qualname__} is a tensor class with a dispatch")
            return NotImplemented  # it comes again, for what such a tensor is made of
        if left_out.is_open():
            left_out.ask()
        if torch.is_inference_mode_enabled():
            self._note_no_more("inference mode is enabled")
        if func is _ASSERT:  # which FX drops, as if it had no effect
            func, args = _ASSERT_WITH_MESSAGE, (*args, "a tensor is not true, as asserted")
        operation = OPERATIONS[func]
        if operation.kind == "label":  # of a profile: it touches no tensor
            return func(*args, **kwargs)
        if operation.kind == "higher order":
            return self._higher_order(func, args, kwargs)
        if writes_list(func) and (parts := divided(args, kwargs)):
            for part in parts:
                self.dispatch(func, types, *part)
            return None
        if operation.kind == "composite":
            with self._mode():
                return func.decompose(*args, **kwargs)
        if self.asleep:
            if self._needs_no_states(operation, args, kwargs):
                return self._function(func)(*args, **kwargs)
            self._wake_up()
        return self._dispatch(func, operation, args, kwargs)

    def _dispatch(self, func: Any, operation: Operation, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Do or note an operation of the step, the states being known."""
        if not self.all_at_once or operation.kind in ("view", "metadata", "read"):
            return self._operate(func, operation, args, kwargs)
        args, origin = self.rounding.before(func, args)
        result = self._operate(func, operation, args, kwargs)
        self.rounding.after(origin, result, tensors_in(operation.written_of(args, kwargs), {}))
        return result

    def _operate(self, func: Any, operation: Operation, args: tuple[Any, ...], kwargs: Any) -> Any:
        trace = self.graphs.trace
        if operation.kind == "note" and (trace or not self._on_host(operation, args, kwargs)):
            # What autograd saves of an operation that it follows it may read by itself.
            saved = torch.is_grad_enabled() and any(
                t.requires_grad for t in tensors_in(args, kwargs)
            )
            if not saved and (made := self._noted(func, operation, args, kwargs)):
                return made[0]
        elif operation.kind == "view":
            return self._view(func, args, kwargs)
        elif operation.kind == "metadata":
            result = self.at_once.born(func, func(*args, **kwargs))
            if trace is not None:
                trace.draw(func, args, kwargs, result)
            return result
        elif operation.kind == "note":
            return self._function(func)(*args, **kwargs)
        if trace is not None and not trace.reads(func, args):
            trace.spoiled = True
        return self._now(func, operation, args, kwargs)

    def _higher_order(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Do an operation that takes functions: by their operations where known, or at once."""
        self.flush()
        if (trace := self.graphs.trace) is not None:
            trace.spoiled = True
        do = in_python(func)
        if do is not None:
            with self._mode():
                return do(*args, **kwargs)
        given = filter(has_memory, tensors_in(tree_leaves((args, kwargs)), {}))
        if any(map(self.words.known, given)):
            where = on_one_line(line_of_code())
            message = f"not compensated: what {func} makes of high words alone, at {where}"
            self.warn("high-word-only", message)
        return self.unrecorded.timed(func, lambda: func(*args, **kwargs))

    def _needs_no_states(self, operation: Operation, args: Any, kwargs: Any) -> bool:
        """Return True if an operation has nothing to do with low words: a view, or numbers."""
        if operation.kind == "read":
            return all(t.dtype not in self.words.wide for t in tensors_in(args, kwargs))
        on_host = operation.kind == "note" and self._on_host(operation, args, kwargs)
        return operation.kind == "view" or on_host

    def _function(self, func: Any) -> Callable[..., Any]:
        """Return the function that does arithmetic on the host as graphs and segments do it."""
        return func if self.words.plain else on_wider(func)

    def _on_host(self, operation: Operation, args: Any, kwargs: Any) -> bool:
        """Return True if this is arithmetic of numbers on the host, such as a count of steps.

        What makes a 16-bit number is none: it may be the new value of a state with one element.
        """
        first = args[0] if args else None
        if (isinstance(first, Tensor) and first.dim()) or kwargs.get("dtype") in self.words.wide:
            return False
        tensors = tensors_in(args, kwargs)
        if not tensors:
            return type(first) is list and not first  # what makes a 0-d tensor
        for t in tensors:
            if t.dim() or not t.is_cpu or t.dtype in self.words.wide:
                return False
            region = self.notes.region(t)
            if region is not None and (region.pending or operation.written):
                return False
            if self.notes.random and storage_key(t) in self.notes.random:
                return False
        return True

    def _now(self, func: Any, operation: Operation, args: Any, kwargs: Any) -> Any:
        """Do an operation at once, after what its operands wait for; on whole values."""
        regions = map(self.notes.region, filter(has_memory, tensors_in(args, kwargs)))
        # An input that is written now would be another one for what was noted before.
        writes = operation.made_at_once or operation.written
        foreign = operation.kind == "foreign"
        if foreign or any(r is not None and (r.pending or writes) for r in regions):
            self.flush()
        if operation.kind == "read" or self.all_at_once:
            return self.at_once.do(func, operation, args, kwargs)
        return self.unrecorded.timed(func, lambda: self.at_once.do(func, operation, args, kwargs))

    # Notes.

    def _view(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Make a view, and note it if it is not one that is known."""
        source = args[0]
        if func is aten.view.dtype and source.dtype in self.words.wide and has_memory(source):
            if self.notes.region(source) is not None:
                self.flush()  # the bits of a high word
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        if func in DIVIDING:
            each = parts_of(func, source, args[1:], result)
            for part, (op, *given) in zip(result, each, strict=True):
                self._note_view(source, part, op, tuple(given), {})
        else:
            self._note_view(source, result, func, args, kwargs)
        return result

    def _note_view(self, source: Tensor, result: Any, func: Any, args: Any, kwargs: Any) -> None:
        """Note a view of a tensor, as the result of an operation."""
        differs = source.dim() or func is aten.view.dtype
        noted = isinstance(result, Tensor) and has_memory(result) and differs
        saved = torch.is_grad_enabled() and source.requires_grad
        # The offset of as_strided is that of the memory, which is elsewhere when it is done.
        if noted and not saved and func is not aten.as_strided.default:
            try:
                self.notes.view(source, result, func, args, kwargs)
            except UnknownMemory as memory:
                self._note_no_more(str(memory))
            except CannotNote:
                self.flush()

    def _noted(
        self, func: Any, operation: Operation, args: tuple[Any, ...], kwargs: Any
    ) -> tuple[Any] | None:
        """Note an operation, and return its result in a tuple; None if it cannot be noted."""
        notes, key = self.notes, operation.returns
        for _ in range(2):
            try:
                place = notes.operation(func, operation, args, kwargs)
            except UnknownMemory as memory:
                self._note_no_more(str(memory))
            except CannotNote:
                self.flush()
            else:
                self.noted += 1
                self.apart += 1
                notes.wait = True
                if operation.nothing:
                    result = None
                elif key is not None:
                    result = kwargs[key] if isinstance(key, str) else args[key]
                else:
                    made = [notes.make(meta) for meta in place.made]
                    result = made if place.many else made[0]
                if notes.all_at_once or (self.beside_dynamo and _is_number(result)):
                    self.flush()
                return (result,)
        return None

    # What was noted is done.

    @torch.compiler.disable  # what a function that Dynamo runs reads flushes too
    def flush(self) -> None:
        """Have done what was noted: what was written, and what was made and is still in use."""
        if not self.notes.wait:
            return self.notes.clear()
        segment, call = self.notes.take()
        self.words.results(call.memory)
        given = zip(segment.writes, call.inputs, strict=True)
        written = [i.data for is_written, i in given if is_written]
        self.words.settle(written)  # what was noted has counted up versions
        with torch.no_grad(), self.paused():
            self.run(segment, call)
        self.words.settle(written)
        return None


def _is_number(result: Any) -> bool:
    """Return True if a result has one element, which torch.tensor([x]) reads behind our back."""
    return isinstance(result, Tensor) and result.numel() == 1
