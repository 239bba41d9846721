"""Side inputs: what calls of one graph bring past AOTAutograd does not mix, in threads neither.

For compilation.side_inputs.
"""

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

import collage_fx
from collage_fx.compilation.side_inputs import SideInputs


@pytest.mark.filterwarnings("ignore:.*belong to no torch.optim.Optimizer")
def test_a_call_in_another_thread_leaves_the_residuals_of_this_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another thread calls the graph when this one has found its residuals, and has not run it."""

    @torch.no_grad()
    def update(p: Tensor, g: Tensor) -> None:
        p.sub_(g * 1e-3)

    step = torch.compile(update, backend="collage", options={"level": "all"})
    mine, other, g = (torch.ones(4).bfloat16() for _ in range(3))
    for p in (other, mine):
        step(p, g)
    original = SideInputs.call

    def interrupted(self: SideInputs, function: Any, args: tuple[Any, ...]) -> Any:
        def after_another(*given: Any) -> Any:
            if threading.current_thread() is threading.main_thread():
                thread = threading.Thread(target=step, args=(other, g))
                thread.start()
                thread.join()
            return function(*given)

        return original(self, after_another, args)

    monkeypatch.setattr(SideInputs, "call", interrupted)
    for _ in range(4):
        step(mine, g)
    for p in (mine, other):
        assert torch.allclose(1 - collage_fx.value(p), torch.tensor(5e-3).double(), rtol=0.01)
