"""Hooks on functions that read data or order streams without the dispatcher: they flush first.

Hooks on constructors pass on the Python numbers of a tensor: dispatch sees them rounded.

A recorded step hands out tensors whose data come later. `.item()` and operations are seen by its
dispatch mode; these methods are not. A TorchFunctionMode would see them, and each `p.grad` too,
which costs 5 ms a step for 100 parameters. What was called before a stream is set, waited for or
marked by an event belongs to the stream of then. Who has a pointer to memory, or is another thread,
may read at any time.
"""

import functools
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.pool import Pool
from typing import Any, TypeAlias

import torch
from torch import Tensor, hub

from collage_fx.hooks.counted import Counted
from collage_fx.runtime.expansion.eft import LOW_PRECISION
from collage_fx.runtime.torch_private import (
    TracingContext,
    _disable_current_modes,
    _len_torch_dispatch_stack,
)

_Names: TypeAlias = dict[Any, tuple[str, ...]]
"""Owner -> names of its attributes."""
_READERS: _Names = {
    Tensor: ("tolist", "__repr__", "__format__", "__reduce_ex__", "__deepcopy__", "new_tensor"),
}
_SHARERS: _Names = {
    Tensor: (
        *("numpy", "__array__", "data_ptr", "storage", "__dlpack__", "share_memory_"),
        *("apply_", "map_", "map2_"),
    ),
    torch.UntypedStorage: ("data_ptr",),
    threading.Thread: ("start",),
    ThreadPoolExecutor: ("submit",),
    threading.Event: ("set",),
    # Its queues are written in C, and have no attributes to set.
    Pool: ("apply_async", "_map_async", "imap", "imap_unordered"),
    queue.Queue: ("put",),
}
"""Methods after which somebody may read a tensor's memory, or any, whenever they want."""
_SETTERS = ("__setitem__",)
"""Methods of tensors that make a 16-bit one of a number on its way to elements, which may be whole;
nothing waits for it."""
_CONSTRUCTORS: _Names = {torch: ("tensor", "as_tensor", "asarray")}
"""Functions of torch that take elements from tensors: torch.tensor([a.norm(), b.norm()])."""
_MAKERS = {"tensor": 0, "as_tensor": 0, "asarray": 0, "new_tensor": 1}
"""Functions that make a tensor of numbers, with the position of these among their arguments."""
_OF_A_STREAM = ("query", "record_event", "synchronize", "wait_event", "wait_stream")
_STREAMS: _Names = {
    torch.cuda: ("set_stream", "synchronize"),
    torch.accelerator: ("set_stream", "synchronize"),
    torch.cuda.Stream: ("__enter__", "__exit__", *_OF_A_STREAM),
    torch.cuda.Event: ("query", "record", "synchronize", "wait"),
}
"""Functions and methods that order what is done by streams; `torch.cuda.stream` calls them."""


@dataclass
class Step:
    """Callbacks of a recorded step for these functions."""

    flush: Callable[[], None]
    """Function that does what waits."""
    shared: Callable[[str], None]
    """Function that is told, before the call, what lets others read memory whenever they want."""
    read: Callable[[Any, Tensor], None]
    """Function that is told numbers that were read of a tensor."""
    made: Callable[[Tensor, Any], None]
    """Function that is told of a tensor that was made, and of what."""


class _Recorders(threading.local):
    """The recorded steps that are under way in a thread, the innermost last."""

    def __init__(self) -> None:
        self.steps: list[Step] = []


_RECORDERS = _Recorders()


def _attributes(names: _Names) -> list[tuple[Any, str]]:
    return [(owner, n) for owner, found in names.items() for n in found if hasattr(owner, n)]


class _Patch:
    """Patch of attributes, which flush before they are called as long as somebody uses it."""

    def __init__(self, readers: _Names, sharers: _Names | None = None) -> None:
        """Note attributes, of owners by name: of readers, and of what lets others read memory."""
        self.why = dict.fromkeys(_attributes(readers), "")
        """Attribute -> what lets other code read memory from then on; empty if it does not."""
        for owner, name in _attributes(sharers or {}):
            self.why[owner, name] = f"{owner.__qualname__}.{name}()"
        self.own: dict[tuple[Any, str], Any] = {}
        """Attribute -> the one that the owner itself has; None where a class only inherits it."""
        self.used = Counted(self._install, self._remove).used

    def _install(self) -> None:
        for (owner, name), why in self.why.items():
            self.own[owner, name] = vars(owner).get(name)
            setattr(owner, name, _flushing(getattr(owner, name), why))

    def _remove(self) -> None:
        for (owner, name), own in self.own.items():
            if own is None:
                delattr(owner, name)
            else:
                setattr(owner, name, own)


_OF_TENSORS = _Patch({Tensor: (*_READERS[Tensor], *_SETTERS)}, _SHARERS)
_OF_TORCH = _Patch(_CONSTRUCTORS)
_OF_STREAMS = _Patch(_STREAMS)
constructors = _OF_TORCH.used
"""Context in which constructors are hooks, where they are left alone else: while a graph runs."""


def _patches(*, beside_dynamo: bool) -> list[_Patch]:
    found = [_OF_TENSORS]
    if not beside_dynamo:
        found.append(_OF_TORCH)
    if torch.cuda.is_initialized():
        found.append(_OF_STREAMS)
    return found


@contextmanager
def flushed_by(step: Step, *, beside_dynamo: bool) -> Iterator[None]:
    """Flush a step, within this context, before a tensor's data are read or streams are ordered.

    Args:
        step: that is under way.
        beside_dynamo: whether Dynamo may trace functions of torch, which are left alone then.
    """
    _begin_bars()
    with ExitStack() as patched:
        for patch in _patches(beside_dynamo=beside_dynamo):
            patched.enter_context(patch.used())
        _RECORDERS.steps.append(step)
        try:
            yield
        finally:
            _RECORDERS.steps.pop()


@functools.cache
def _begin_bars() -> None:
    """Have tqdm, where it is installed, start the thread of its first bar before threads are seen.

    FX makes a bar for each graph that it runs.
    """
    hub.tqdm(total=0, disable=True)  # type: ignore[attr-defined]  # it is FX's own import


def _made_of(args: Any, kwargs: Any, position: int) -> Any:
    """Return what a tensor is made of: the argument `data`, or `obj`, of its maker."""
    return args[position] if len(args) > position else kwargs.get("data", kwargs.get("obj"))


def _with_whole_number(t: Tensor, at: Any, value: Any) -> tuple[Any, ...]:
    """Return the arguments of `t[at] = value` with a tensor of fp32 in the place of a number."""
    if isinstance(value, float) and t.dtype in LOW_PRECISION:
        value = torch.full((), value, dtype=torch.float32, device=t.device)
    return t, at, value


@functools.cache
def _flushing(method: Callable[..., Any], why: str) -> Callable[..., Any]:
    # Dynamo would trace it, and have what it compiles for numpy() call it again, without an end.
    @torch.compiler.disable
    @functools.wraps(method)
    def read(*args: Any, **kwargs: Any) -> Any:
        if not _RECORDERS.steps or TracingContext.try_get() is not None:
            return method(*args, **kwargs)
        name, step = method.__name__, _RECORDERS.steps[-1]
        if name == "tolist" and args[0].dtype in LOW_PRECISION:
            args = (args[0].detach().double(),)  # of whole values, as item() is
        if name in _SETTERS:
            return method(*_with_whole_number(*args), **kwargs)
        step.shared(why) if why else step.flush()
        if name == "share_memory_":  # it copies from storage to storage
            with _disable_current_modes():
                return method(*args, **kwargs)
        result = method(*args, **kwargs)
        if _len_torch_dispatch_stack():  # and not from within an operation
            if name == "tolist":
                step.read(result, args[0])
            elif name in _MAKERS:
                step.made(result, _made_of(args, kwargs, _MAKERS[name]))
        return result

    return read
