"""Steps that do nothing if a number on the device says so, as PyTorch's fused kernels do.

torch.amp.GradScaler finds infinite gradients on the device. The kernels of classes read there what
it has found. Whatever else writes memory asks on the host before, which waits for the device.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from collage_fx.runtime.torch_private import _disable_current_modes


class LeftOut(BaseException):
    """Exit from a step that has written nothing; no Exception, so that Dynamo does not take it."""


class _Number(threading.local):
    value: Tensor | None = None


_NUMBER = _Number()


@contextmanager
def left_out_if(number: Tensor) -> Iterator[None]:
    """Leave out what this thread does within, all of it or nothing, if a number is not 0."""
    before, _NUMBER.value = _NUMBER.value, number
    try:
        yield
    except LeftOut:
        pass
    finally:
        _NUMBER.value = before


def number_on(device: torch.device) -> Tensor | None:
    """Return the number that kernels on a device read; None if nothing is to be left out."""
    return None if _NUMBER.value is None else _NUMBER.value.to(device, non_blocking=True)


def is_open() -> bool:
    """Return True if the host does not know yet whether what is done is to be left out."""
    return _NUMBER.value is not None


@torch.compiler.disable
def ask() -> None:
    """Wait until the number is known on the host, before something else is written.

    Raises LeftOut if nothing is to be written.
    """
    if _NUMBER.value is None:
        return
    with _disable_current_modes():
        found = bool(_NUMBER.value)
    if found:
        raise LeftOut
    _NUMBER.value = None
