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


@contextmanager
def flushed_by(flush: Callable[[], None]) -> Iterator[None]:
    """Within, call flush before a tensor's data are read."""
    _install()
    _RECORDERS.flushes.append(flush)
    try:
        yield
    finally:
        _RECORDERS.flushes.pop()


@functools.cache
def _install() -> None:
    for name in _READERS:
        setattr(Tensor, name, _flushing(getattr(Tensor, name)))


def _flushing(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def read(*args: Any, **kwargs: Any) -> Any:
        if _RECORDERS.flushes:
            _RECORDERS.flushes[-1]()
        return method(*args, **kwargs)

    return read
