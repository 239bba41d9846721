"""What notes the operations of a step in place of doing them, and the dispatch mode for it."""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch._subclasses import FakeTensor
from torch.fx import GraphModule
from torch.nn import Parameter
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _pop_mode_temporarily,
)

from collage_fx.hooks import data_reads, nested_compile
from collage_fx.hooks.dynamo_settings import Failures
from collage_fx.passes.rewrite.powers import in_float64
from collage_fx.record.at_once import AtOnce, tensors_in
from collage_fx.record.graph_notes import GraphNotes
from collage_fx.record.notes import CannotNote, Notes
from collage_fx.record.unrecorded import Unrecorded
from collage_fx.runtime.kernels import left_out
from collage_fx.runtime.residuals.memory import has_memory
from collage_fx.segments.low_words import LowWords
from collage_fx.segments.memory import storage_key
from collage_fx.segments.operations import OPERATIONS, Operation
from collage_fx.segments.segment import Call, Segment

aten = torch.ops.aten
cond = torch.ops.higher_order.cond
_MANY_PLACES = 200_000
"""So many places are forgotten at the end of a step: its structure is another each time."""


_PLAIN = frozenset({Tensor, Parameter})
_ASSERT, _ASSERT_WITH_MESSAGE = aten._assert_async.default, aten._assert_async.msg


def _dispatches(kind: type) -> bool:
    """Tell whether tensors of a class do operations by code of their own, as DTensors do."""
    plain = torch._C._disabled_torch_dispatch_impl
    return getattr(kind, "__torch_dispatch__", plain) is not plain


@dataclass(eq=False)
class Recorder:
    """Notes operations, and has them done when somebody needs their results.

    Results are tensors that have memory and no data yet. What cannot be noted is done at once,
    after what it depends on.

    An operation that fails by the shapes of its operands raises where it stands; when a step raises
    for whatever reason, what was noted before is done, so that the states are as after the same
    error in eager PyTorch.
    """

    words: LowWords
    run: Callable[[Segment, Call], None]
    """Does a segment."""
    wake: Callable[[], None]
    """Looks for the states, in a step in which nobody has done so."""
    all_at_once: bool = False
    """Whether nothing is noted, and every operation is done when it is called."""
    reads: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    beside_dynamo: bool = False
    """Whether Dynamo compiles parts of this step."""
    asleep: bool = False
    """Whether the states are not known in this step: the first operation wakes it up."""
    plain: bool = False
    """Set where no state has a dtype with low words: operations are those of eager PyTorch."""
    passes_by: bool = False
    """Whether operations are done as they come, as within a compiled graph."""
    noted: int = 0
    """How many operations were noted."""
    in_graphs: int = 0
    """How many of them in this step as parts of graphs of Dynamo's that are noted as a whole."""
    apart: int = 0
    """How many others."""
    unrecorded: Unrecorded = field(default_factory=Unrecorded)

    def __post_init__(self) -> None:
        self.notes = Notes(self.words)
        self.at_once = AtOnce(self.words, self.notes)
        self.graphs = GraphNotes(self.notes, self.at_once)

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
        """Note a graph of Dynamo's, of which nothing else can read results on the way."""
        left_out.ask()
        beside_dynamo = self.beside_dynamo
        with self._set("beside_dynamo", False):
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
        return _BesideDynamo(self) if self.beside_dynamo else _Mode(self)

    def _wake_up(self) -> None:
        self.wake()
        self._watch_reads()

    @contextmanager
    def recording(self, *, beside_dynamo: bool) -> Iterator[None]:
        """Note what happens within, and have it done at the end, whatever ends it."""
        self.beside_dynamo = beside_dynamo
        self.in_graphs = self.apart = 0
        self.graphs.steps += 1
        with self.unrecorded.step(), self._mode(), contextlib.ExitStack() as self.reads:
            if not self.asleep:
                self._watch_reads()
            try:
                yield
            finally:
                with _disable_current_modes():
                    self.flush()
                self.notes.random.clear()
        if self.notes.places > _MANY_PLACES:
            self.notes.forget_structures()

    def _watch_reads(self) -> None:
        """Have what is read in other ways than by operations flushed before."""
        watch = data_reads.flushed_by(self.flush_outside, beside_dynamo=self.beside_dynamo)
        self.reads.enter_context(watch)

    def suspended(self, closure: Callable[..., Any], failures: Failures) -> Callable[..., Any]:
        """Return closure run as if this mode were not there: it computes gradients."""

        def run(*args: Any, **kwargs: Any) -> Any:
            with _pop_mode_temporarily(), nested_compile.outside(), failures.raised():
                self.flush()
                self.words.settle()
                return closure(*args, **kwargs)

        return run

    def flush_outside(self) -> None:
        """Flush, called from where the mode may be on."""
        if self.notes.wait and torch._C._len_torch_dispatch_stack():  # and not from within a flush
            with _disable_current_modes():
                self.flush()

    # Dispatch.

    def dispatch(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Do or note an operation, and return what it makes."""
        kwargs = kwargs or {}
        if self.passes_by:
            return func(*args, **kwargs)
        if not _PLAIN.issuperset(types) and any(map(_dispatches, types)):
            if FakeTensor in types:  # as DTensors use them, to find out how they are sharded
                return func(*args, **kwargs)
            return NotImplemented  # it comes again, for what such a tensor is made of
        left_out.ask()
        if isinstance(func, HigherOrderOperator):
            return self._higher_order(func, args, kwargs)
        if func is _ASSERT:  # which FX drops, as if it had no effect
            func, args = _ASSERT_WITH_MESSAGE, (*args, "a tensor is not true, as asserted")
        operation, trace = OPERATIONS[func], self.graphs.trace
        if self.asleep:
            if self._needs_no_states(operation, args, kwargs):
                return self._function(func)(*args, **kwargs)
            self._wake_up()
        if operation.kind == "note" and (trace or not self._on_host(operation, args, kwargs)):
            # What autograd saves of an operation that it follows it may read by itself.
            if not torch.is_grad_enabled() or not any(
                t.requires_grad for t in tensors_in(args, kwargs)
            ):
                for _ in range(2):
                    try:
                        result = self._note(func, operation, args, kwargs)
                    except CannotNote:
                        self.flush()
                    else:
                        if self.all_at_once or (self.beside_dynamo and _is_number(result)):
                            self.flush()
                        return result
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
        """Do what takes functions: a branch of torch.cond by its operations, others at once."""
        self.flush()
        if (trace := self.graphs.trace) is not None:
            trace.spoiled = True
        if func is not cond:
            return self.unrecorded.timed(func, lambda: func(*args, **kwargs))
        predicate, *branches, operands = args
        branch = branches[0 if predicate else 1]
        with self._mode():
            return branch(*operands)

    def _needs_no_states(self, operation: Operation, args: Any, kwargs: Any) -> bool:
        """Tell whether an operation has nothing to do with low words: a view, or numbers."""
        if operation.kind == "read":
            return all(t.dtype not in self.words.wide for t in tensors_in(args, kwargs))
        on_host = operation.kind == "note" and self._on_host(operation, args, kwargs)
        return operation.kind == "view" or on_host

    def _function(self, func: Any) -> Callable[..., Any]:
        """Return what does arithmetic on the host, as it is done in graphs and segments."""
        return func if self.plain else in_float64(func)

    def _on_host(self, operation: Operation, args: Any, kwargs: Any) -> bool:
        """Tell whether this is arithmetic of numbers on the host, such as a count of steps."""
        first = args[0] if args else None
        if isinstance(first, Tensor) and first.dim():
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
        at_once = operation.kind == "now" or operation.written
        if any(r is not None and (r.pending or at_once) for r in regions):
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
        differs = source.dim() or func is aten.view.dtype
        noted = isinstance(result, Tensor) and has_memory(result) and differs
        saved = torch.is_grad_enabled() and source.requires_grad
        # The offset of as_strided is that of the memory, which is elsewhere when it is done.
        if noted and not saved and func is not aten.as_strided.default:
            try:
                self.notes.view(source, result, func, args, kwargs)
            except CannotNote:
                self.flush()
        return result

    def _note(self, func: Any, operation: Operation, args: Any, kwargs: Any) -> Any:
        notes = self.notes
        place = notes.operation(func, args, kwargs)
        self.noted += 1
        self.apart += 1
        notes.wait = True
        if operation.nothing:
            return None
        if operation.returns is not None:
            key = operation.returns
            return kwargs[key] if isinstance(key, str) else args[key]
        if place.many:
            return [notes.make(meta) for meta in place.made]
        return notes.make(place.made[0])

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
        with torch.no_grad():
            self.run(segment, call)
        self.words.settle(written)
        return None


class _Mode(TorchDispatchMode):
    """A recorder where Dynamo is not asked, without a guard against it around each dispatch."""

    supports_higher_order_operators = True

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let Dynamo compile under this mode."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return self.recorder.dispatch(func, types, args, kwargs)


class _BesideDynamo(_Mode):
    """A recorder under which Dynamo is on: it must not trace what an operation is noted by."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return True

    __torch_dispatch__ = _Mode.__torch_dispatch__  # what the base class puts the guard around


def _is_number(result: Any) -> bool:
    """Tell whether a result has one element, which torch.tensor([x]) reads behind our back."""
    return isinstance(result, Tensor) and result.numel() == 1
