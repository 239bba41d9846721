"""Functions that read data or order streams without the dispatcher: what waits is done first.

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
from typing import Any

import torch
from torch import Tensor
from torch._guards import CompileContext
from torch.utils._python_dispatch import _disable_current_modes

from collage_fx.hooks.counted import Counted
from collage_fx.runtime.expansion.eft import LOW_PRECISION

_READERS = (
    "tolist",
    "__repr__",
    "__format__",
    "__reduce_ex__",
    "__deepcopy__",
    "new_tensor",
)
_SHARERS: dict[Any, tuple[str, ...]] = {
    Tensor: (
        *("numpy", "__array__", "data_ptr", "storage", "__dlpack__", "share_memory_"),
        *("apply_", "map_", "map2_"),
    ),
    torch.UntypedStorage: ("data_ptr",),
    threading.Thread: ("start",),
    ThreadPoolExecutor: ("submit",),
    queue.Queue: ("put",),
}
"""Methods after which somebody may read a tensor's memory, or any, whenever they want."""
_CONSTRUCTORS = ("tensor", "as_tensor", "asarray")
"""Functions of torch that take elements from tensors: torch.tensor([a.norm(), b.norm()])."""
_OF_A_STREAM = ("query", "record_event", "synchronize", "wait_event", "wait_stream")
_STREAMS: dict[Any, tuple[str, ...]] = {
    torch.cuda: ("set_stream", "synchronize"),
    torch.accelerator: ("set_stream", "synchronize"),
    torch.cuda.Stream: ("__enter__", "__exit__", *_OF_A_STREAM),
    torch.cuda.Event: ("query", "record", "synchronize", "wait"),
}
"""Functions and methods that order what is done by streams; `torch.cuda.stream` calls them."""


class _Recorders(threading.local):
    """The recorded steps that are under way in a thread, the innermost last: of each two functions.

    The first does what waits, the second is told who may read memory from now on.
    """

    def __init__(self) -> None:
        self.steps: list[tuple[Callable[[], None], Callable[[str], None]]] = []


_RECORDERS = _Recorders()


class _Patch:
    """Attributes that flush before they are called, as long as somebody uses this."""

    def __init__(self, owner: Any, names: tuple[str, ...], *, shares: bool = False) -> None:
        self.owner = owner
        self.names = names
        self.shares = shares
        """Whether a call gives other code access to memory from then on."""
        self.own: dict[str, Any] = {}
        """What the owner has there itself; None where a class only inherits it."""
        self.used = Counted(self._install, self._remove).used

    def _install(self) -> None:
        for name in self.names:
            self.own[name] = vars(self.owner).get(name)
            why = f"{self.owner.__qualname__}.{name}()" if self.shares else ""
            setattr(self.owner, name, _flushing(getattr(self.owner, name), why))

    def _remove(self) -> None:
        for name, own in self.own.items():
            if own is None:
                delattr(self.owner, name)
            else:
                setattr(self.owner, name, own)


_OF_TENSORS = _Patch(Tensor, _READERS)
_OF_TORCH = _Patch(torch, _CONSTRUCTORS)
_OF_SHARERS = [_Patch(owner, names, shares=True) for owner, names in _SHARERS.items()]
_OF_STREAMS = [
    _Patch(owner, tuple(name for name in names if hasattr(owner, name)))
    for owner, names in _STREAMS.items()
]


def _patches(*, beside_dynamo: bool) -> list[_Patch]:
    found = [_OF_TENSORS, *_OF_SHARERS]
    if not beside_dynamo:
        found.append(_OF_TORCH)
    return found + _OF_STREAMS if torch.cuda.is_initialized() else found


@contextmanager
def flushed_by(
    flush: Callable[[], None], shared: Callable[[str], None], *, beside_dynamo: bool
) -> Iterator[None]:
    """Within, call flush before a tensor's data are read, or streams are ordered.

    Args:
        flush: does what waits.
        shared: is told what lets others read memory whenever they want, before it is called.
        beside_dynamo: whether Dynamo may trace functions of torch, which are left alone then.
    """
    with ExitStack() as patched:
        for patch in _patches(beside_dynamo=beside_dynamo):
            patched.enter_context(patch.used())
        _RECORDERS.steps.append((flush, shared))
        try:
            yield
        finally:
            _RECORDERS.steps.pop()


@functools.cache
def _flushing(method: Callable[..., Any], why: str) -> Callable[..., Any]:
    # Dynamo would trace it, and have what it compiles for numpy() call it again, without an end.
    @torch.compiler.disable
    @functools.wraps(method)
    def read(*args: Any, **kwargs: Any) -> Any:
        if _RECORDERS.steps and CompileContext.try_get() is None:
            if method.__name__ == "tolist" and args[0].dtype in LOW_PRECISION:
                args = (args[0].detach().double(),)  # of whole values, as item() is
            flush, shared = _RECORDERS.steps[-1]
            shared(why) if why else flush()
            if method.__name__ == "share_memory_":  # it copies from storage to storage
                with _disable_current_modes():
                    return method(*args, **kwargs)
        return method(*args, **kwargs)

    return read
