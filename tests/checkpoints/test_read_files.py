"""Memory that torch.load has made of a file is not taken for an array that others read.

For record.steps.
"""

import io

import torch
from recorded_steps import Each
from torch import Tensor
from torch.optim import Optimizer

import collage_fx
from collage_fx.optimizer.checkpoints.history import history_of


def momentum(p: Tensor, g: Tensor, state: dict[str, Tensor]) -> None:
    if not state:
        state["m"] = torch.zeros_like(p)
    state["m"].mul_(0.99).add_(g, alpha=0.01)
    p.sub_(state["m"] / (1 + state["m"].norm()), alpha=1e-3)


def normed(p: Tensor, g: Tensor, state: dict[str, Tensor]) -> None:
    momentum(p, g, state)
    assert torch.from_numpy(g.float().numpy()).isfinite().all()


def run(optimizer: Optimizer, steps: int) -> None:
    (p,) = optimizer.param_groups[0]["params"]
    for k in range(steps):
        p.grad = torch.linspace(-1, 1, 12).sin().mul(k + 1).bfloat16()
        optimizer.step()


def resumed(update: object) -> Optimizer:
    """Return an optimizer that has gone on from a file of its own."""
    p = torch.nn.Parameter(torch.ones(12).bfloat16())
    optimizer: Optimizer = collage_fx.compile_(Each([p], update))
    run(optimizer, 6)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    saved = torch.load(file)
    assert not saved["state"][0]["m"].untyped_storage().resizable()
    optimizer.load_state_dict(saved)
    run(optimizer, 3)
    return optimizer


def test_a_step_from_a_file_is_not_done_operation_by_operation() -> None:
    assert not history_of(resumed(momentum)).at_once


def test_a_step_that_reads_by_numpy_is() -> None:
    assert history_of(resumed(normed)).at_once
