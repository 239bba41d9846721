"""Two states that mix, of which one chooses between factors of its old value.

For passes.analysis.plan.
"""

import pytest
import torch
from interpreter import without_compiler
from torch import Tensor

import collage_fx
from collage_fx.passes.analysis import plan


def mixed(p: Tensor, slow: Tensor, g: Tensor) -> None:
    p.copy_(torch.where(g.isfinite(), p - 1e-3 * (g + 0.01 * p), p))
    slow.add_(p - slow, alpha=0.5)
    p.lerp_(slow, 0.5)


def error() -> float:
    """Return the error of both states of a compiled function, as a share of plain PyTorch's."""
    torch.compiler.reset()
    made = torch.Generator().manual_seed(0)
    given = [(0.05 * torch.randn(30, generator=made)).bfloat16() for _ in range(2)]
    exact, plain = [x.double() for x in given], [x.clone() for x in given]
    with without_compiler():
        step = collage_fx.compile(mixed, level="all", arithmetic="wide", storage="mcf3")
        for _ in range(8):
            g = torch.randn(30, generator=made).bfloat16()
            step(*given, g)
            mixed(*exact, g.double())
            mixed(*plain, g)
    ours = sum(float((collage_fx.value(x) - y).norm()) for x, y in zip(given, exact, strict=True))
    return ours / sum(float((x - y).norm()) for x, y in zip(plain, exact, strict=True))


def test_what_keeps_some_of_itself_is_not_computed_anew() -> None:
    assert error() < 1e-3


def test_taken_for_computed_anew_it_is_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "_keeps_beside", lambda *_: False)
    assert error() > 0.1
