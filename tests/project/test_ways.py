"""The ways of stepping that benchmarks compare take the same steps. For benchmarks/ways.py."""

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

import collage_fx

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from steps import parameters
from ways import CLIPPED, LR, WAYS

STEPS = 30


def small() -> list[Tensor]:
    """Return parameters of which steps are large enough for a bf16 copy of them to show."""
    params: list[Tensor] = parameters([(64, 48), (7,), (130,)])
    with torch.no_grad():
        for p in params:
            p.mul_(0.01)
    return params


def in_float64(lr: float) -> list[Tensor]:
    """Return what AdamW makes of them in float64."""
    params = [p.detach().double().requires_grad_() for p in small()]
    for p, like in zip(params, small(), strict=True):
        assert like.grad is not None
        p.grad = like.grad.double()
    optimizer = torch.optim.AdamW(params, lr=lr)
    for _ in range(STEPS):
        optimizer.step()
    return [p.detach() for p in params]


def distance(found: list[Tensor], exact: list[Tensor]) -> float:
    """Return how far values are from the exact ones, as a share of the way to these."""
    x, y, start = (torch.cat([t.flatten() for t in ts]) for ts in (found, exact, small()))
    return float((x - y).norm() / (y - start.detach().double()).norm())


@pytest.mark.slow
@pytest.mark.parametrize("name", [*WAYS, *(n for n in CLIPPED if "zeroe" not in n)])
def test_a_way_is_adamw(name: str) -> None:
    params = small()
    step = (WAYS | CLIPPED)[name].make(params)
    for _ in range(STEPS):
        step()
    found = [collage_fx.value(p) for p in params]
    exact = in_float64(LR)
    if name.startswith("plain"):
        assert 0.1 < distance(found, exact) < 0.2  # its roundings of every update
        return
    bound = 0.06 if name == "sr" else 0.03  # 8 bits, rounded by chance
    assert distance(found, exact) < bound
    # The negative control: another learning rate is told apart.
    assert distance(found, in_float64(LR * 1.1)) > max(0.06, 1.25 * bound)
