"""Operations that cannot be recorded are named if they take more than a tenth of a step.

For record.at_once and segments.trie.
"""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from recorded_steps import off, start, train
from torch import Tensor

import collage_fx
from collage_fx.record import at_once

SECONDS = {"dear": 8.0, "cheap": 0.5}
"""Seconds that these operations take by the clock of the tests, in a step of some 10 seconds."""


class Clock:
    """Goes on when it is told to."""

    now = 0.0

    def perf_counter(self) -> float:
        """Return the seconds so far."""
        return self.now


@pytest.fixture
def operations(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """Make operations of a user's library, which return their operand halved."""
    clock = Clock()
    monkeypatch.setattr(at_once, "time", clock)
    with torch.library._scoped_library("collage_tests", "DEF") as library:
        for name, seconds in SECONDS.items():

            def halved(x: Tensor, seconds: float = seconds) -> Tensor:
                clock.now += seconds
                return x / 2

            library.define(f"{name}(Tensor x) -> Tensor")
            library.impl(name, halved, "CompositeExplicitAutograd")
        yield SimpleNamespace(ops=torch.ops.collage_tests, clock=clock)


def test_dear_ones_are_named_with_their_line(operations: SimpleNamespace) -> None:
    def update(p: Tensor, g: Tensor, state: Any) -> None:
        operations.clock.now += 1
        p.sub_(operations.ops.dear(g), alpha=1e-4)  # this line
        p.sub_(operations.ops.cheap(g), alpha=1e-4)

    found, step = train(update, torch.bfloat16, record=True)
    (note,) = collage_fx.report(step).notes
    assert note.startswith("collage_tests.dear.default cannot be recorded")
    assert "took 84% of the last step's time" in note
    assert note.endswith("# this line")
    assert "test_unrecorded.py:" in note
    exact, _ = train(update, torch.float64)
    begin = torch.cat([p.detach().double().flatten() for p in start(torch.bfloat16)])
    assert off(found, exact, begin) < 0.01


def test_nobody_is_told_what_was_asked_for(operations: SimpleNamespace) -> None:
    def update(p: Tensor, g: Tensor, state: Any) -> None:
        p.sub_(operations.ops.dear(g), alpha=1e-4)

    _, step = train(update, torch.bfloat16, record=False)
    assert not any("cannot be recorded" in note for note in collage_fx.report(step).notes)


def test_a_later_step_without_it_is_not_blamed(operations: SimpleNamespace) -> None:
    def update(p: Tensor, g: Tensor, state: Any) -> None:
        state["steps"] = state.get("steps", 0) + 1
        operations.clock.now += 1
        p.sub_(operations.ops.dear(g) if state["steps"] == 1 else g, alpha=1e-4)

    _, step = train(update, torch.bfloat16, record=True, steps=2)
    assert not any("cannot be recorded" in note for note in collage_fx.report(step).notes)
