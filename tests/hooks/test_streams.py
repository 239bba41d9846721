"""Ordering of streams: earlier operations are done before, in the stream of then.

There is no GPU here: the functions that order streams are made up, and note what memory holds.

For hooks.data_reads.
"""

from typing import Any

import numpy
import pytest
import torch
from recorded_steps import Each
from torch import Tensor

import collage_fx
from collage_fx.hooks import data_reads

ORDERS: list[tuple[Any, str]] = [
    (torch.cuda, "set_stream"),
    (torch.cuda, "synchronize"),
    (torch.accelerator, "set_stream"),
    (torch.cuda.Stream, "record_event"),
    (torch.cuda.Stream, "wait_stream"),
    (torch.cuda.Event, "record"),
    (torch.cuda.Event, "synchronize"),
]


def seen(owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return what a parameter is in each of three steps when streams are ordered in the middle."""
    p = torch.nn.Parameter(torch.full((2, 3), 8.0, dtype=torch.bfloat16))
    memory = p.detach().view(torch.int16).numpy()
    found = []

    def order(*_: Any) -> None:
        now = (memory.astype(numpy.int32) << 16).view(numpy.float32)  # not by PyTorch
        found.append(float(now[0, 0]))

    def update(p: Tensor, g: Tensor, state: Any) -> None:
        p.sub_(g)
        getattr(owner, name)(None)
        p.add_(g, alpha=3)

    monkeypatch.setattr(owner, name, order)
    step = collage_fx.compile(Each([p], update), record=True)
    for _ in range(3):
        p.grad = torch.ones_like(p)
        step()
    assert collage_fx.value(p)[0, 0] == 14
    assert getattr(owner, name) is order  # outside of steps
    return found


@pytest.mark.parametrize(("owner", "name"), ORDERS)
def test_streams_are_ordered_when_all_before_is_done(
    owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert seen(owner, name, monkeypatch) == [7, 9, 11]


def test_they_would_not_be_if_nobody_looked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_reads, "_OF_STREAMS", data_reads._Patch({}))
    assert seen(torch.cuda, "set_stream", monkeypatch) == [8, 10, 12]
