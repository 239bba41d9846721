"""Methods of tensors that read data without telling the dispatcher: what waits is done first.

A recorded step hands out tensors whose data come later. `.item()` and operations are seen by its
dispatch mode; these methods are not. A TorchFunctionMode would see them, and each `p.grad` too,
which costs 5 ms a step for 100 parameters.
"""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

_READERS = (
    "numpy",
    "tolist",
    "data_ptr",
    "storage",
    "__array__",
    "__dlpack__",
    "__repr__",
    "__format__",
    "__reduce_ex__",
    "__deepcopy__",
)


class _Recorders(threading.local):
    """What flushes the recorded steps that are under way in a thread, the innermost last."""

    def __init__(self) -> None:
        self.flushes: list[Callable[[], None]] = []


_RECORDERS = _Recorders()
_LOCK = threading.Lock()
_METHODS: dict[str, Any] = {}
"""What is in place of the methods of the class itself; None where it only inherits one."""
_users = 0
"""How many recorded steps there are, in all threads: without any the methods are PyTorch's own."""


@contextmanager
def flushed_by(flush: Callable[[], None]) -> Iterator[None]:
    """Within, call flush before a tensor's data are read."""
    _use(1)
    _RECORDERS.flushes.append(flush)
    try:
        yield
    finally:
        _RECORDERS.flushes.pop()
        _use(-1)


def _use(more: int) -> None:
    global _users
    with _LOCK:
        before, _users = _users, _users + more
        if not before:
            for name in _READERS:
                _METHODS[name] = vars(Tensor).get(name)
                setattr(Tensor, name, _flushing(getattr(Tensor, name)))
        elif not _users:
            for name, own in _METHODS.items():
                if own is None:
                    delattr(Tensor, name)
                else:
                    setattr(Tensor, name, own)


@functools.cache
def _flushing(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def read(*args: Any, **kwargs: Any) -> Any:
        if _RECORDERS.flushes:
            _RECORDERS.flushes[-1]()
        return method(*args, **kwargs)

    return read
