"""Parameters whose strides change between steps, of which neither Dynamo nor a version says so.

For compilation.layout_guards and runtime.residuals.memory.
"""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import collage_fx
from collage_fx.errors import CollageWarning
from collage_fx.runtime.residuals.memory import is_laid_out_as
from collage_fx.runtime.residuals.store import STORE, ResidualStore
from collage_fx.runtime.storage.state_name import StateName

LR, SIDE = 2.0**-12, 6


def gradient() -> Tensor:
    return (1 + torch.arange(SIDE * SIDE).reshape(SIDE, SIDE) % 7).bfloat16() / 8


def transposed_copy(p: Tensor) -> Tensor:
    """Return the same values in another order."""
    return p.t().contiguous().t() if p.is_contiguous() else p.contiguous()


def transposed_view(p: Tensor) -> Tensor:
    """Return other values in the same memory."""
    return p.t()


def trained(count: int, change: Callable[[Tensor], Tensor], steps: int = 3) -> tuple[Tensor, ...]:
    """Return the value of a parameter that changes twice, and what it is in float64."""
    torch.compiler.reset()
    params = [torch.nn.Parameter(torch.full((SIDE, SIDE), 1.5).bfloat16()) for _ in range(count)]
    optimizer = torch.optim.SGD(params, lr=LR)
    step = collage_fx.compile(optimizer)
    first, want = params[0], params[0].detach().double()
    for changed in range(3):
        for _ in range(steps):
            for p in params:
                p.grad = gradient()
            step()
        want -= LR * steps * gradient().double()
        torch.testing.assert_close(collage_fx.value(first), want, rtol=2.0**-16, atol=0)
        before = first.detach().clone()
        first.data = change(first.data)
        high = first.detach()
        # Later than the first time it is known which elements are what they were.
        want = torch.where(high == before, want, high.double()) if changed else high.double()
    for p in params[1:]:  # whose strides stay
        moved = 9 * LR * gradient().double()
        torch.testing.assert_close(collage_fx.value(p), 1.5 - moved, rtol=2.0**-16, atol=0)
    return tuple(params)


@pytest.mark.parametrize("change", [transposed_copy, transposed_view])
@pytest.mark.parametrize("count", [2, 9])
@pytest.mark.quick("2-transposed_view", "9-transposed_copy")
def test_a_parameter_of_other_strides_trains_on(
    count: int, change: Callable[[Tensor], Tensor]
) -> None:
    with pytest.warns(CollageWarning, match=r"params\[0\] was cleared") as caught:
        first, *_ = trained(count, change)
    said = [str(w.message) for w in caught if w.category is CollageWarning]
    assert len(said) == len([m for m in said if "was cleared" in m]) == 1
    assert gradient().unique().numel() > 4 and not torch.equal(gradient(), gradient().t())
    assert bool((first.detach() == 1.5).any())  # a control: plain bf16 would lose what is small


def test_a_residual_that_keeps_its_old_strides_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: without its part in this, kernels walk over two orders."""
    monkeypatch.setattr(ResidualStore, "follow", lambda *_: None)
    with warnings.catch_warnings(), pytest.raises(AssertionError):
        warnings.simplefilter("ignore")
        trained(9, transposed_view)


@pytest.mark.parametrize("record", ["auto", True])
def test_rows_that_close_up_in_the_same_memory(record: Any) -> None:
    """A residual is dense beside either, and of other elements."""
    memory = torch.full((2 * SIDE * SIDE,), 1.5).bfloat16()
    p = torch.nn.Parameter(memory.view(SIDE, 2 * SIDE)[:, :SIDE])
    optimizer = torch.optim.SGD([p], lr=LR)
    step = collage_fx.compile(optimizer, record=record)
    for k in range(6):
        if k == 3:
            address = p.data_ptr()
            p.data = memory[: SIDE * SIDE].view(SIDE, SIDE)
            assert p.data_ptr() == address and not collage_fx.residuals(p)
            want = p.detach().double()
        p.grad = gradient()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CollageWarning)
            step()
    want -= 3 * LR * gradient().double()
    torch.testing.assert_close(collage_fx.value(p), want, rtol=2.0**-16, atol=0)


def test_components_are_laid_out_as_zeros_like_the_tensor() -> None:
    for t in (
        torch.ones(3, 4).bfloat16().t(),
        torch.ones(6, 4).bfloat16()[::2],
        torch.ones(4, 1).bfloat16().as_strided((4, 1), (1, 7)),
        torch.ones(0, 3).bfloat16(),
    ):
        residual = STORE.adopt(t, None, "mcf2", StateName("t"))
        assert all(is_laid_out_as(c, t) for c in residual.components)
        STORE.drop(t)
    assert not is_laid_out_as(torch.ones(3, 4), torch.ones(4, 3).t())
