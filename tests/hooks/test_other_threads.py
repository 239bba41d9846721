"""A thread that waits for a sign reads what a step has computed before it gives that sign.

For hooks.data_reads.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.pool import Pool, ThreadPool
from typing import Any, TypeAlias

import pytest
import torch
from recorded_steps import LR, off, start, train
from torch import Tensor, float64

from collage_fx.hooks import data_reads

Copy: TypeAlias = Callable[[Tensor], Tensor]


@contextmanager
def a_pool() -> Iterator[Copy]:
    """The queues of a pool are written in C."""
    with ThreadPool(1) as pool:
        yield lambda t: pool.apply(t.clone)


@contextmanager
def an_event() -> Iterator[Copy]:
    """The thread was there before the step."""
    asked, done, given = threading.Event(), threading.Event(), list[Tensor | None]()

    def serve() -> None:
        while True:
            asked.wait()
            asked.clear()
            last = given.pop()
            if last is None:
                return
            given.append(last.clone())
            done.set()

    def copied(t: Tensor) -> Tensor:
        done.clear()
        given.append(t)
        asked.set()
        done.wait()
        found = given.pop()
        assert found is not None
        return found

    thread = threading.Thread(target=serve)
    thread.start()
    yield copied
    given.append(None)
    asked.set()
    thread.join()


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(("sign", "owner"), [(a_pool, Pool), (an_event, threading.Event)])
def test_a_thread_reads_what_is_there(
    sign: Any, owner: Any, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control does not know the sign, and reads memory without data."""
    if not known:
        why = {k: v for k, v in data_reads._OF_TENSORS.why.items() if k[0] is not owner}
        monkeypatch.setattr(data_reads._OF_TENSORS, "why", why)
    with sign() as copied:

        def update(p: Tensor, g: Tensor, state: Any) -> None:
            p.sub_(copied(g * LR))

        exact, _ = train(update, float64)
        found, _ = train(update, record=True)
    begin = torch.cat([p.detach().double().flatten() for p in start(float64)])
    assert (off(found, exact, begin) < 0.01) is known
