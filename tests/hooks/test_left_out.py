"""Steps and functions that Dynamo leaves out, where torch.compile was given our backend.

For hooks.optimizer_hooks.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from backend_string import Data, lbfgs, sparse_adam, string, trained, within
from torch.optim import Optimizer

import collage_fx
from collage_fx.hooks import optimizer_hooks


@pytest.fixture
def left_out_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do as PyTorch does at the first torch.compile, if there were such optimizers before."""
    for make in (lbfgs, sparse_adam):
        kind = type(trained(make, lambda optimizer: optimizer.step, steps=1)[1])
        monkeypatch.setattr(kind, "step", torch.compiler.disable(kind.step))


@pytest.mark.parametrize("way", [string, within])
@pytest.mark.parametrize("make", [lbfgs, sparse_adam])
@pytest.mark.usefixtures("left_out_by_torch")
@pytest.mark.quick("sparse_adam-string")
def test_kinds_that_pytorch_has_dynamo_leave_out(
    make: Any, way: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert torch.equal(trained(make, way)[0], trained(make, collage_fx.compile)[0])
    monkeypatch.setattr(optimizer_hooks, "_is_left_out", lambda optimizer: False)
    assert not bool(trained(make, way)[0].any())


@pytest.mark.parametrize("make", [Data, lbfgs])
@pytest.mark.usefixtures("left_out_by_torch")
def test_a_part_that_the_user_has_dynamo_leave_out_stays_plain(make: Any) -> None:
    def left_out(optimizer: Optimizer) -> Callable[..., Any]:
        part: Any = torch.compiler.disable(lambda *a: optimizer.step(*a))
        step: Callable[..., Any] = torch.compile(lambda *a: part(*a), backend="collage")
        return step

    assert not bool(trained(make, left_out)[0].any())
