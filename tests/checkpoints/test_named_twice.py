"""Weights and states that a checkpoint has under two names: their residual is one.

For optimizer.checkpoints.state_dicts.
"""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import collage_fx


class Tied(nn.Module):
    """Two layers of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4, bias=False)
        self.b = nn.Linear(4, 4, bias=False)
        self.b.weight = self.a.weight


def made() -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    model = Tied().bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    return model, optimizer, collage_fx.compile(optimizer, record=True)


@pytest.fixture
def loaded() -> tuple[Any, Any, tuple[torch.Tensor, ...]]:
    """Return a model and its optimizer after a load, and the residual that was saved."""
    model, optimizer, step = made()
    for _ in range(3):
        model.a.weight.grad = torch.full((4, 4), 0.01).bfloat16()
        step()
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    residual = collage_fx.residuals(model.a.weight)
    assert any(bool(c.any()) for c in residual)
    model, optimizer, _ = made()
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    return model, optimizer, residual


def test_tied_weights_keep_it_when_they_are_read_after_a_load(loaded: Any) -> None:
    model, optimizer, residual = loaded
    collage_fx.master_state_dict(model, optimizer)
    assert all(map(torch.equal, collage_fx.residuals(model.a.weight), residual))
    collage_fx.master_state_dict(model, optimizer)
    assert all(map(torch.equal, collage_fx.residuals(model.a.weight), residual))


def test_a_state_of_two_parameters_keeps_it_when_it_is_saved_after_a_load(loaded: Any) -> None:
    model, optimizer, _ = loaded
    momentum = optimizer.state[model.a.weight]["momentum_buffer"]
    before = [c.clone() for c in collage_fx.residuals(momentum)]
    other = nn.Parameter(torch.zeros(4, 4).bfloat16())
    optimizer.add_param_group({"params": [other]})
    optimizer.state[other]["momentum_buffer"] = momentum
    optimizer.state_dict()
    assert all(map(torch.equal, collage_fx.residuals(momentum), before))


def test_weights_that_were_written_since_have_none(loaded: Any) -> None:
    """The control: what is expected of them is looked at."""
    model, optimizer, _ = loaded
    with torch.no_grad():
        model.b.weight.add_(1)
    with pytest.warns(collage_fx.CollageWarning, match="not as they were saved together"):
        collage_fx.master_state_dict(model, optimizer)
    assert not any(bool(c.any()) for c in collage_fx.residuals(model.a.weight))
