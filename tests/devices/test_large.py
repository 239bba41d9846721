"""A tensor of more than 2^31 elements; 13 GiB of memory and half a minute.

For runtime.kernels.cpp_loop.
"""

import os

import pytest
import torch

import collage_fx

pytestmark = pytest.mark.kernels

ELEMENTS = 2**31 + 5
PERIOD = 1 << 20
AVAILABLE = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def repeated(values: torch.Tensor) -> torch.Tensor:
    """Return the values over and over."""
    found = torch.empty(ELEMENTS, dtype=values.dtype)
    whole = found[: ELEMENTS // PERIOD * PERIOD].view(-1, PERIOD)
    whole.copy_(values)
    found[whole.numel() :] = values[: ELEMENTS - whole.numel()]
    return found


def unlike(found: torch.Tensor, values: torch.Tensor) -> int:
    """At how many elements found is something else than the values over and over."""
    return sum(int((x != values[: len(x)]).sum()) for x in found.split(PERIOD))


@pytest.mark.slow
@pytest.mark.skipif(AVAILABLE < 16 << 30, reason="takes 13 GiB of memory")
@pytest.mark.parametrize("multi_tensor", [True, False])
def test_each_element_is_updated_as_in_a_small_tensor(multi_tensor: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    start, grad = (torch.randn(PERIOD, generator=generator).bfloat16() for _ in range(2))
    large, small = repeated(start).requires_grad_(), start.clone().requires_grad_()
    large.grad, small.grad = repeated(grad), grad
    optimizer = torch.optim.SGD([large, small], lr=1e-4)
    step = collage_fx.compile(optimizer, level="light", multi_tensor=multi_tensor)
    for _ in range(2):
        step()
    assert unlike(large.detach(), small.detach()) == 0
    assert unlike(*(collage_fx.residuals(p)[0] for p in (large, small))) == 0
    assert unlike(large.detach(), start) > ELEMENTS // 100  # it can fail
    assert collage_fx.residuals(small)[0].count_nonzero() > PERIOD // 2
