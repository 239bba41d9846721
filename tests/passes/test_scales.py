"""Numbers of 16 bits, about one, that scale a state: they are computed in fp32.

For passes.frontend.reductions and passes.frontend.single_elements.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from interpreter import without_compiler
from recorded_steps import off, start, train
from torch import Tensor

from collage_fx.passes.frontend import reductions

LR = 1e-3
"""Rate at which `1 - lr * x` is 1 in bf16."""

SCALES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "a state": lambda p, g, s: p.mul_(1 - LR * s),
    "an element": lambda p, g, s: p.mul_(1 - LR * g[0, 1]),
    "a median": lambda p, g, s: p.mul_(1 - LR * p.median()),
    "a k-th value": lambda p, g, s: p.mul_(1 - LR * p.flatten().kthvalue(3).values),
    "a divisor": lambda p, g, s: p.div_(1 + LR * s),
    "a root": lambda p, g, s: p.mul_((1 - LR * s).sqrt()),
}


def far(kind: str, **options: Any) -> float:
    """Return the error after ten steps as a share of the way."""

    def update(p: Tensor, g: Tensor, state: Any) -> None:
        if not state:
            state["s"] = torch.full((), 0.75, dtype=p.dtype)
        SCALES[kind](p, g, state["s"])

    torch.compiler.reset()
    exact = train(update, torch.float64)[0]
    begin = torch.cat([p.detach().double().flatten() for p in start(torch.bfloat16)])
    return off(train(update, **options)[0], exact, begin)


@pytest.mark.parametrize("kind", SCALES)
@pytest.mark.quick("a state", "a divisor")
def test_a_factor_near_one_is_not_rounded(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with without_compiler():
        assert far(kind) < 0.01
        assert far(kind, arithmetic="wide", storage="remainder16") < 0.001
        for name in ("makes_scale", "is_one_of_many"):
            monkeypatch.setattr(reductions, name, lambda _: False)
        assert far(kind) > 0.5


@pytest.mark.kernels
def test_nor_by_compiled_kernels() -> None:
    assert far("a state") < 0.01
