"""Residuals of one storage are not taken by what was compiled for those of another.

For stand_in.shared_graph.
"""

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import collage_fx


def made(count: int = 3) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter((torch.rand(6, 5) + 1).bfloat16()) for _ in range(count)]


def give(params: list[nn.Parameter], k: int) -> None:
    generator = torch.Generator().manual_seed(k)
    for p in params:
        p.grad = torch.rand(p.shape, generator=generator).to(p.dtype)


def off(params: list[nn.Parameter], exact: list[Tensor]) -> float:
    pairs = zip(params, exact, strict=True)
    return max(float((collage_fx.value(p) - e).abs().max()) for p, e in pairs)


@pytest.mark.kernels
@pytest.mark.filterwarnings("ignore:.*goes on in 'mcf2'")
def test_two_optimizers_of_the_same_parameters_in_turn() -> None:
    params = made()
    exact = [nn.Parameter(p.detach().double()) for p in params]
    steps = [SGD(params, lr=1e-3) for _ in range(2)]
    for optimizer, storage in zip(steps, ("mcf2", "remainder16"), strict=True):
        collage_fx.compile_(optimizer, storage=storage)
    oracle = SGD(exact, lr=1e-3)
    for k in range(12):
        give(params, k)
        for p, e in zip(params, exact, strict=True):
            e.grad = p.grad.double()  # type: ignore[union-attr]
        steps[k % 2].step()
        oracle.step()
    assert off(params, [e.detach() for e in exact]) < 1e-4
