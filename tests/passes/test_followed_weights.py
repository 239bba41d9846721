"""Weights that follow what is computed of others: merged weights of LoRA, by whatever factor.

For passes.analysis.factors and passes.analysis.plan.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
import torch
from interpreter import without_compiler
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

import collage_fx
from collage_fx.passes.analysis import factors, plan

SIZE = 16
LR = 1e-5
Of: TypeAlias = Callable[[Tensor, Tensor], Tensor]
FOLLOWED: dict[str, Of] = {
    "twice a product": lambda a, b: 2 * (b @ a),
    "beside what stays": lambda a, b: 1 + 0.0625 * (b @ a),
    "addmm": lambda a, b: torch.addmm(torch.ones_like(a), b, a, alpha=4),
    "covariance": lambda a, b: a.t() @ a / SIZE,
    "difference": lambda a, b: a @ b - b @ a,
    "transposed": lambda a, b: 0.3 * a.t(),
}


class Follows(Optimizer):
    """Moves two weights, and has a third one follow what a function makes of them."""

    def __init__(self, params: list[Parameter], of: Of, *, by_state: bool) -> None:
        super().__init__(params, {"lr": LR})
        self.of = of
        self.by_state = by_state
        """True if the third weight takes over the average, which is a state."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        a, b, merged = self.param_groups[0]["params"]
        for p in (a, b):
            p.add_(p.grad, alpha=-LR)
        if not self.by_state:
            merged.lerp_(self.of(a, b), 0.1)
            return
        state = self.state[merged]
        if not state:
            state["mean"] = merged.clone()
        state["mean"].lerp_(self.of(a, b), 0.1)
        merged.copy_(state["mean"])


def merged(of: Of, dtype: torch.dtype, *, by_state: bool, **options: Any) -> tuple[Tensor, Tensor]:
    """Return the third weight as it was and as it is after some steps."""
    generator = torch.Generator().manual_seed(0)
    a, b = (1 + 0.5 * torch.randn(SIZE, SIZE, generator=generator).bfloat16() for _ in range(2))
    start = of(a.double(), b.double()).bfloat16()
    params = [Parameter(x.to(dtype)) for x in (a, b, start)]
    optimizer = Follows(params, of, by_state=by_state)
    step = collage_fx.compile(optimizer, **options) if options else optimizer.step
    for p in params[:2]:
        p.grad = torch.randn(SIZE, SIZE, generator=generator).bfloat16().to(dtype)
    with without_compiler():
        for _ in range(40):
            step()
    return start.double(), collage_fx.value(params[2]).detach()


def error(of: Of, storage: str, *, by_state: bool = False) -> float:
    start, exact = merged(of, torch.float64, by_state=by_state)
    _, found = merged(of, torch.bfloat16, by_state=by_state, storage=storage)
    settled = exact - start
    return float((found - exact).norm() / settled.norm())


@pytest.mark.parametrize("storage", ["remainder16", "mcf2"])
@pytest.mark.parametrize("name", FOLLOWED)
@pytest.mark.quick("twice a product-remainder16", "beside what stays-remainder16")
def test_they_follow_whole_values(name: str, storage: str) -> None:
    assert error(FOLLOWED[name], storage) < 0.01


def test_an_average_that_a_weight_takes_over_has_a_residual(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of = FOLLOWED["addmm"]
    assert error(of, "remainder16", by_state=True) < 0.01
    monkeypatch.setattr(plan, "taken_over", lambda group: set())
    assert error(of, "remainder16", by_state=True) > 0.1


@pytest.mark.parametrize("name", FOLLOWED)
@pytest.mark.quick("twice a product")
def test_control_of_high_words(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factors, "_followed", lambda new: frozenset())
    assert error(FOLLOWED[name], "remainder16") > 0.02
