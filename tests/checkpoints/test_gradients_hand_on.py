"""Resumed steps that keep a parameter's new value in its gradient, and read that in between.

For optimizer.checkpoints.history.
"""

import copy
from typing import Any

import pytest
import torch
from recorded_steps import LR, Each, off, start
from torch import Tensor

import collage_fx
from collage_fx.optimizer.checkpoints.history import history_of


def by_the_gradient(p: Tensor, g: Tensor, state: Any) -> None:
    p.mul_(1 - LR * 0.01)
    g.copy_(p - LR * g)
    if g.isfinite().all().item():
        p.copy_(g)


def error(resumed: int, *, hand_on: list[int] | None = None, **options: Any) -> float:
    """Return the error of the parameters after some steps as a share of the way.

    Args:
        resumed: before which step they are saved and resumed; 0 for never.
        hand_on: what the checkpoint is said to know, if that is not to be what it knows.
        options: of collage_fx.compile; PyTorch does the steps without any.
    """
    made = torch.Generator().manual_seed(3)
    pair = {d: Each(start(d), by_the_gradient) for d in (torch.float64, torch.bfloat16)}
    begin = torch.cat([p.detach().flatten() for p in params_of(pair[torch.float64])])
    low = pair[torch.bfloat16]
    step = collage_fx.compile(low, **options) if options else low.step
    for t in range(8):
        if resumed and t == resumed:
            if hand_on is not None:
                history_of(low).hand_on = hand_on
            saved = copy.deepcopy(low.state_dict())
            low = pair[torch.bfloat16] = Each(
                [p.detach().clone().requires_grad_() for p in params_of(low)], by_the_gradient
            )
            step = collage_fx.compile(low, **options)
            low.load_state_dict(saved)
        for p, q in zip(*map(params_of, pair.values()), strict=True):
            g = (0.5 + torch.rand(p.shape, generator=made)).bfloat16()
            p.grad, q.grad = g.double(), g
        pair[torch.float64].step()
        step()
    exact, found = (
        torch.cat([collage_fx.value(p).detach().double().flatten() for p in params_of(o)])
        for o in pair.values()
    )
    return off(found, exact, begin)


def params_of(optimizer: Each) -> list[Tensor]:
    params: list[Tensor] = optimizer.param_groups[0]["params"]
    return params


@pytest.mark.parametrize("record", ["auto", True])
@pytest.mark.parametrize("resumed", [0, 1, 4])
@pytest.mark.quick("0-auto", "4-True")
def test_parameters_keep_their_low_words(record: Any, resumed: int) -> None:
    torch.compiler.reset()
    with torch.compiler.set_stance("force_eager"):
        assert error(resumed, record=record) < 0.01
        assert error(0) > 0.5


def test_a_checkpoint_that_denies_it_loses_them() -> None:
    with torch.compiler.set_stance("force_eager"):
        assert error(4, hand_on=[], record="auto") > 0.1
