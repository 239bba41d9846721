"""A state that comes back into its own new value through a view comes with its low word.

For passes.analysis.escape.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from interpreter import without_compiler
from torch import Tensor

import collage_fx
from collage_fx.passes.analysis import escape, factors

LR, STEPS, SHAPE = 1e-4, 8, (4, 3)
Write = Callable[[Tensor, Tensor], None]


def flat(p: Tensor, g: Tensor) -> None:
    p.view(-1).sub_((LR * g).reshape(-1))


def transposed(p: Tensor, g: Tensor) -> None:
    p.t().sub_(g.t(), alpha=LR)


def averaged(p: Tensor, g: Tensor) -> None:
    p.sub_(g, alpha=LR)
    p.copy_((p + p.flip(0)) * 0.5)


def decayed_by_a_rate(p: Tensor, g: Tensor, rate: float) -> None:
    """By a number that changes, of which only that is known."""
    p.mul_(1 - rate * 0.1)
    p.t().sub_(g.t(), alpha=LR)


WRITES: list[Callable[..., None]] = [flat, transposed, averaged, decayed_by_a_rate]


def values(write: Any, dtype: torch.dtype, wrap: Callable[[Any], Any]) -> Tensor:
    """Return where a state goes that is written by a view, and moves on by half its last way."""

    def step(p: Tensor, old: Tensor, g: Tensor, rate: float) -> None:
        way = p - old
        old.copy_(p)
        write(p, g, rate) if write is decayed_by_a_rate else write(p, g)
        p.add_(g.cos(), alpha=0.01)
        p.add_(way, alpha=0.5)

    generator = torch.Generator().manual_seed(1)
    p = (1 + 0.25 * torch.rand(SHAPE, generator=generator)).bfloat16().to(dtype)
    old, call = p.clone(), wrap(step)
    for k in range(STEPS):
        g = torch.randn(SHAPE, generator=generator).bfloat16().to(dtype)
        call(p, old, g, LR * 0.9**k)
    return collage_fx.value(p)


def error(write: Any, **options: Any) -> float:
    """Return the error as a share of that of plain PyTorch."""
    exact = values(write, torch.float64, lambda step: step)
    plain = values(write, torch.bfloat16, lambda step: step)
    with without_compiler():
        ours = values(write, torch.bfloat16, lambda step: collage_fx.compile(step, **options))
    return float((ours - exact).norm() / (plain - exact).norm())


@pytest.mark.parametrize(
    "options", [{"record": True, "storage": "mcf2"}, {"arithmetic": "wide"}], ids=str
)
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.quick("*flat*True*", "*rate*True*")
def test_it_comes_whole(write: Any, options: dict[str, Any]) -> None:
    assert error(write, **options) < 0.01


def test_its_high_word_would_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control, in which nobody looks at the size of the number either."""
    monkeypatch.setattr(escape, "entering", lambda *_: iter(()))
    monkeypatch.setattr(factors, "_size", lambda now, *, grown: factors.RATE)
    monkeypatch.setattr(factors, "_followed", lambda new: frozenset())
    assert error(decayed_by_a_rate, record=True, storage="mcf2") > 0.2
