"""A tensor that a number fills is compared with as the number is, in the dtype that it has.

For passes.frontend.capture and segments.operations.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

import collage_fx
from collage_fx.passes.frontend import capture
from collage_fx.segments import segment

NUMBER = 0.1
UNIT = 2.0**-7
Compare = Callable[[Tensor], Tensor]


def like(u: Tensor) -> Tensor:
    return u == torch.full_like(u, NUMBER)


def behind(u: Tensor) -> Tensor:
    return torch.full_like(u, NUMBER) <= u


def of_one_row(u: Tensor) -> Tensor:
    return u >= u.new_full((u.shape[-1],), NUMBER)


def without_dimensions(u: Tensor) -> Tensor:
    return u < u.new_full((), NUMBER)


def filled_in_place(u: Tensor) -> Tensor:
    return torch.empty_like(u).fill_(NUMBER) != u


def filled_anew(u: Tensor) -> Tensor:
    full = torch.full_like(u, NUMBER)
    before = u == full
    full.add_(u, alpha=0.25)
    return before | (u == full)


def by_isclose(u: Tensor) -> Tensor:
    return torch.isclose(u, torch.full_like(u, NUMBER), rtol=0, atol=0)


COMPARE = (
    *(like, behind, of_one_row, without_dimensions),
    *(filled_in_place, filled_anew, by_isclose),
)
WAYS: dict[str, dict[str, Any]] = {
    "auto": {},
    "wide": {"arithmetic": "wide", "storage": "remainder16"},
    "recorded": {"record": True},
    "recorded wide": {"record": True, "arithmetic": "wide"},
    "at once": {"record": False},
}


class Compares(Optimizer):
    """Optimizer that moves parameters up where a comparison holds, and down elsewhere."""

    def __init__(self, params: list[Tensor], compare: Compare, clamps: bool) -> None:
        super().__init__(params, {})
        self.compare, self.clamps = compare, clamps

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        (p,) = self.param_groups[0]["params"]
        u = p.grad.clamp(-NUMBER, NUMBER) if self.clamps else p.grad
        p.add_(torch.where(self.compare(u), UNIT, -UNIT).to(p.dtype))


def moved(
    compare: Compare, dtype: torch.dtype, clamps: bool, compile_: Callable[[Optimizer], Any]
) -> Tensor:
    """Return how far three steps go, by gradients round the number, in units."""
    p = torch.zeros(2, 4, dtype=dtype)
    step = compile_(Compares([p], compare, clamps))
    x = torch.tensor(NUMBER).to(dtype)
    ends = (torch.tensor(end, dtype=dtype) for end in (-torch.inf, torch.inf))
    row = torch.stack([torch.nextafter(x, end) for end in ends] + [x, 2 * x])
    for _ in range(3):
        p.grad = torch.stack([row, -row])
        step()
    return collage_fx.value(p).double() / UNIT


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("compare", COMPARE)
@pytest.mark.quick("like-auto", "filled_in_place-recorded", "without_dimensions-wide")
def test_comparisons_are_those_of_eager_pytorch(compare: Compare, way: str) -> None:
    for dtype in (torch.bfloat16, torch.float16) if "wide" not in way else (torch.bfloat16,):
        for clamps in (False, True):
            torch.compiler.reset()
            found = moved(compare, dtype, clamps, lambda o: collage_fx.compile(o, **WAYS[way]))
            assert torch.equal(found, moved(compare, dtype, clamps, lambda o: o.step)), dtype


@pytest.mark.parametrize("where", ["graph", "segment"])
def test_a_number_that_is_not_seen_is_told_apart(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control."""
    module = capture if where == "graph" else segment
    monkeypatch.setattr(module, "compare_with_numbers", lambda *_: None)
    options = {"record": where == "segment"}
    found = moved(like, torch.float16, True, lambda o: collage_fx.compile(o, **options))
    assert not torch.equal(found, moved(like, torch.float16, True, lambda o: o.step))
