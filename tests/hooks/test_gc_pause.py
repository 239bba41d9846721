"""Full garbage collections wait until a step that may be compiled is over.

For hooks.dynamo_settings and hooks.counted.
"""

import gc
import threading
from collections.abc import Iterator

import pytest
import torch
from tensors import bf16, with_grads

import collage_fx
from collage_fx.hooks.dynamo_settings import FIRST, no_full_collection

OFTEN = (50, 2, 2)


@pytest.fixture
def collected() -> Iterator[list[int]]:
    """The generations that were collected, very often."""
    found: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            found.append(info["generation"])

    before = gc.get_threshold()
    gc.freeze()
    gc.collect()  # few old objects: many keep a full collection from being due
    gc.set_threshold(*OFTEN)
    gc.callbacks.append(note)
    yield found
    gc.callbacks.remove(note)
    gc.set_threshold(*before)
    gc.unfreeze()


def work() -> None:
    """Make many objects, of which some last."""
    kept = [[i] for i in range(20_000)]
    assert kept


def test_young_objects_only_within_the_first_steps(collected: list[int]) -> None:
    work()
    assert 2 in collected  # the control
    params = with_grads([bf16(4)])
    optimizer = torch.optim.SGD(params, lr=1e-3)
    torch.compiler.reset()
    step = collage_fx.compile(optimizer)
    optimizer.register_step_pre_hook(torch.compiler.disable(lambda *_: work()))
    for _ in range(FIRST):
        collected.clear()
        step()
        assert 2 not in collected and {0, 1} <= set(collected)
        assert gc.get_threshold() == OFTEN
    step()
    assert 2 in collected


@pytest.mark.slow
def test_thresholds_come_back_after_an_error_and_after_the_last_of_several(
    collected: list[int],
) -> None:
    with pytest.raises(ZeroDivisionError), no_full_collection():
        1 / 0  # noqa: B018
    assert gc.get_threshold() == OFTEN
    with no_full_collection():
        gc.set_threshold(40, 3, 3)
    assert gc.get_threshold() == (40, 3, 3)  # the user's own
    gc.set_threshold(*OFTEN)
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with no_full_collection():
            inside.set()
            leave.wait()

    thread = threading.Thread(target=other)
    with no_full_collection():
        thread.start()
        inside.wait()
    collected.clear()
    work()
    assert 2 not in collected
    leave.set()
    thread.join()
    assert gc.get_threshold() == OFTEN
    work()
    assert 2 in collected
