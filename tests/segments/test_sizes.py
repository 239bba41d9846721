"""Steps that do the same to tensors of ever other sizes, as those with masks do.

For segments.executors.
"""

from typing import Any

import pytest
import torch
from interpreter import without_compiler
from recorded_steps import LR, off, train
from torch import Tensor

from collage_fx.segments import executors

SIZES = 6
PARTS = 4
"""Number of segments of a step: two for each of two parameters."""


def masked(p: Tensor, g: Tensor, state: Any) -> None:
    """Update another number of elements in each step, of so many."""
    k = state["k"] = state.get("k", 0) + 1
    mask = torch.arange(12).view(4, 3) <= k % SIZES
    p[mask] -= LR * g[mask]


def compiled(steps: int, **options: Any) -> tuple[int, float]:
    """Return how many segments were compiled, and the error."""
    begin, _ = train(masked, torch.float64, steps=0)
    exact, _ = train(masked, torch.float64, steps=steps)
    with without_compiler():
        found, step = train(masked, steps=steps, **options)
    return step._collage.steps().executors.count, off(found, exact, begin)


@pytest.mark.parametrize("options", [{}, {"record": True}], ids=str)
def test_few_sizes_are_compiled_at_once(options: dict[str, Any]) -> None:
    count, error = compiled(3 * SIZES, **options)
    assert 0 < count <= PARTS * (executors.FEW + 1) and error < 0.01


def test_a_size_that_comes_back_often_is_compiled_in_the_end() -> None:
    early, _ = compiled(3 * SIZES)
    late, error = compiled(17 * SIZES)
    assert late > early and error < 0.01


def test_control_all_sizes_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    few, _ = compiled(3 * SIZES)
    monkeypatch.setattr(executors, "FEW", executors.MOST)
    every, error = compiled(3 * SIZES)
    assert every > few and error < 0.01
