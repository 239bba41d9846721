"""Memory that recorded operations hand out before it has data, filled with what nobody misses."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from collage_fx.record import notes


def _poison(t: Tensor) -> None:
    if t.is_floating_point() or t.is_complex():
        t.fill_(float("nan"))
    else:
        t.fill_(True if t.dtype is torch.bool else torch.iinfo(t.dtype).max)


@contextmanager
def poisoned() -> Iterator[list[int]]:
    """Within, fill put-off memory with NaN, or the largest integer; yield how often, as a list.

    A result that anything reads before it has been computed is then no number, which a comparison
    with any trajectory shows. All tests run so.
    """
    count, new_memory = [0], notes.new_memory

    def new(*meta: Any) -> Tensor:
        t = new_memory(*meta)
        with torch._C._DisableTorchDispatch():
            _poison(t)
        count[0] += 1
        return t

    with mock.patch.object(notes, "new_memory", new):
        yield count
