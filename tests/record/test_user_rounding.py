"""Stochastic rounding on bits: the low word takes its place; other arithmetic on bits is left.

For segments.user_rounding.
"""

from typing import Any

import numpy as np
import pytest
import torch
from recorded_steps import off, start, train
from tensors import error
from test_outside_graphs import each, final
from torch import Tensor

import collage_fx

MASK = -65536


def noise(p: Tensor) -> Tensor:
    return torch.randint(0, 1 << 16, p.shape, dtype=torch.int32)


def out_of_place(p: Tensor, g: Tensor, state: Any) -> None:
    wide = p.float() - 1e-4 * g.float()
    bits = wide.view(torch.int32).detach() + noise(p)
    p.copy_((bits & MASK).view(torch.float32).to(p.dtype))


def noise_in_place(p: Tensor, g: Tensor, state: Any) -> None:
    wide = p.float() - 1e-4 * g.float()
    bits = torch.randint_like(wide, 0, 1 << 16, dtype=torch.int32)
    bits.add_(wide.view(torch.int32)).bitwise_and_(MASK)
    p.copy_(bits.view(torch.float32))


def value_in_place(p: Tensor, g: Tensor, state: Any) -> None:
    wide = p.float() - 1e-4 * g.float()
    wide.view(torch.int32).add_(noise(p)).bitwise_and_(MASK)
    p.copy_(wide)


def up_or_down(p: Tensor, g: Tensor, state: Any) -> None:
    wide = p.float()
    bits = wide.view(torch.int32)
    wide.sub_(1e-4 * g.float())  # after its bits were looked at
    down = bits & MASK
    up = torch.where(noise(p) < (bits & 0xFFFF), down + 0x10000, down)
    p.copy_(up.view(torch.float32).to(p.dtype))


def nearest(p: Tensor, g: Tensor, state: Any) -> None:
    p.sub_(1e-4 * g)


def looks(update: Any) -> Any:
    """Return an update that looks at the gradient by NumPy, after which nothing is put off."""

    def looking(p: Tensor, g: Tensor, state: Any) -> None:
        state["norm"] = float(np.linalg.norm(g.float().numpy()))
        update(p, g, state)

    return looking


@pytest.mark.parametrize("update", [out_of_place, noise_in_place, value_in_place, up_or_down])
@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.quick("*-out_of_place", "*-up_or_down")
def test_stochastic_rounding_gives_way_to_the_low_word(update: Any, at_once: bool) -> None:
    exact, _ = final(lambda p: each(p, nearest), "exact")
    if at_once:
        update = looks(update)
    found, _ = final(lambda p: each(p, update), "collage")
    plain, _ = final(lambda p: each(p, update), "plain")
    rounded = error(exact.bfloat16().double(), exact)
    assert error(found, exact) < rounded / 20 < rounded < error(plain, exact)


def four_units_down(p: Tensor, g: Tensor, state: Any) -> None:
    wide = p.float()
    unit = (wide.view(torch.int32) + 1).view(torch.float32) - wide
    p.copy_(wide - 2**18 * unit)


def remainder_of_its_own(p: Tensor, g: Tensor, state: Any) -> None:
    """fp32 in two parts, the bits below bf16 in a state."""
    low = state.setdefault("low", torch.zeros(p.shape, dtype=torch.int32))
    wide = (p.float().view(torch.int32) + low).view(torch.float32) - 1e-4 * g.float()
    bits = wide.view(torch.int32)
    low.copy_(bits & 0xFFFF)
    p.copy_((bits & MASK).view(torch.float32))


@pytest.mark.filterwarnings("ignore:collage_fx. nothing needed compensation")
@pytest.mark.parametrize("update", [four_units_down, remainder_of_its_own])
def test_other_arithmetic_on_bits_is_left_as_it_is(update: Any) -> None:
    results = []
    for compiled in (False, True):
        p = (torch.arange(12.0) / 7 + 1).bfloat16().requires_grad_()
        optimizer = each([p], update)
        step = collage_fx.compile(optimizer, level="light") if compiled else optimizer.step
        for _ in range(4):
            p.grad = torch.ones_like(p)
            step()
        low = optimizer.state[p].get("low", torch.zeros(()))
        results.append((p.detach().clone(), low.clone()))
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_stochastic_rounding_of_numbers() -> None:
    def summed(p: Tensor, g: Tensor, state: Any) -> None:
        wide = p.float() - 1e-4 * g.float()
        bits = wide.view(torch.int32)
        drawn = sum(torch.randint_like(bits, 0, 1 << 16) for _ in range(1))
        p.copy_(((bits + drawn) & MASK).view(torch.float32))

    begin = torch.stack(start(torch.bfloat16, ())).detach().double()
    exact, _ = train(nearest, torch.float64, params=start(torch.float64, ()))
    found, _ = train(summed, params=start(torch.bfloat16, ()))
    plain, _ = train(summed, params=start(torch.bfloat16, ()), plain=True)
    assert off(found, exact, begin) < 0.01
    assert off(plain, exact, begin) > 0.1
