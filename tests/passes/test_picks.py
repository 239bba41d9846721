"""An element that a step picks by its place, and meets its own tensor, is equal to itself.

For passes.analysis.high_words and passes.rewrite.wider.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import collage_fx
from collage_fx.passes.analysis import escape, high_words
from collage_fx.passes.frontend.decompose import COMPARISONS

aten = torch.ops.aten
LR, STEPS = 1e-3, 6
FIFTH = torch.arange(12).view(4, 3) == 5

PICKS: dict[str, Callable[[Tensor], Tensor]] = {
    "element": lambda u: u[1, 2],
    "slice": lambda u: u.flatten()[5:6],
    "index": lambda u: u[torch.tensor([1]), torch.tensor([2])],
    "gathered": lambda u: u.flatten().gather(0, torch.tensor([5])),
    "unbound": lambda u: u.flatten().unbind()[5],
    "split": lambda u: u.view(1, -1).split(5, 1)[1][0, 0],
    "taken": lambda u: u.take(torch.tensor(5)),
    "reversed": lambda u: u.flatten().flip(0)[6],
    "padded": lambda u: torch.nn.functional.pad(u.flatten(), (0, 1))[5],
    "column": lambda u: u[:, 2:],
    "masked": lambda u: torch.where(FIFTH, u, 0).sum(),
    "masked by rows": lambda u: u.masked_fill(~FIFTH, 0).sum(0)[2],
    "times a mask": lambda u: (u * FIFTH.to(u.dtype)).sum(),
    "of ones": lambda u: torch.where(FIFTH, u, 1).prod(),
    "behind a mask": lambda u: torch.where(FIFTH, u, 0)[1, 2],
    "times a computed mask": lambda u: (u * (1 - (~FIFTH).to(u.dtype))).sum(),
    "scattered": lambda u: u.new_zeros(12).scatter(0, torch.arange(12), u.flatten())[5],
    "by a matrix": lambda u: (torch.eye(4).to(u.dtype) @ u)[1, 2],
    "by two matrices": lambda u: (torch.eye(4).to(u.dtype) @ u @ torch.eye(3).to(u.dtype))[1, 2],
    "of sums": lambda u: torch.where(FIFTH, u, 0).sum(0).sum(),
    "less all others": lambda u: (u - torch.where(FIFTH, 0, u)).sum(),
    "largest by far": lambda u: (u + torch.where(FIFTH, 0, -1e4).to(u.dtype)).amax(),
    "pooled": lambda u: torch.nn.functional.max_pool1d(u.view(1, 1, 12), 1)[0, 0, 5],
}
DONE_AT_ONCE = ("index", "gathered", "taken")
"""Picks that recorded steps do at once, since an index may be out of range."""
OF: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "update": lambda p, u: u,
    "param": lambda p, u: p,
}
EQUAL: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "compared": lambda x, pick: x == pick(x),
    "computed twice": lambda x, pick: (x * 1.7).nan_to_num() == pick((x * 1.7).nan_to_num()),
    "divided": lambda x, pick: (x % pick(x) == 0) & (x // pick(x) == 1),
    "of a float": lambda x, pick: (x == pick(x)) & (-x >= -pick(x)) & (2 * x <= 2 * pick(x)),
}
"""Conditions that hold for an element that is picked."""


def not_itself(name: str, of: str, equal: str = "compared", **options: Any) -> int:
    """Return how often elements that are picked by their places are not equal to themselves."""

    def step(p: Tensor, g: Tensor, s: Tensor) -> None:
        u = g * 1.1 + 0.3
        p.sub_(g, alpha=LR)
        x = OF[of](p, u)
        pick = {**PICKS, **READ}[name]
        s.sub_(u, alpha=LR).sub_(torch.where(EQUAL[equal](x, pick), 1.0, 0.0))

    generator = torch.Generator().manual_seed(0)
    p = (torch.randn(4, 3, generator=generator) + 1).bfloat16()
    s, call = torch.zeros_like(p), collage_fx.compile(step, **options)
    for _ in range(STEPS):
        call(p, torch.randn(4, 3, generator=generator).bfloat16(), s)
    assert collage_fx.residuals(p) and collage_fx.residuals(s)
    held = -s.double().round().view(4, 3)
    return int((STEPS - held[:, 2]).sum() if name == "column" else STEPS - held[1, 2])


READ: dict[str, Callable[[Tensor], Any]] = {
    "a number": lambda u: u[1, 2].item(),
    "a list": lambda u: u.tolist()[1][2],
    "converted": lambda u: float(u.flatten()[5]),
}
"""Picks that Python holds as floats."""


@pytest.mark.parametrize("options", [{}, {"record": True}], ids=["graph", "recorded"])
@pytest.mark.parametrize("of", OF)
@pytest.mark.parametrize("name", PICKS)
@pytest.mark.quick(
    "element-param-graph", "slice-update-*", "unbound-update-graph", "masked-param-*"
)
def test_an_element_that_is_picked_by_its_place_is_itself(
    name: str, of: str, options: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not_itself(name, of, **options) == 0
    for rule in ("_picks", "_may_pick", "_chooses"):
        monkeypatch.setattr(high_words, rule, lambda node: False)
    torch.compiler.reset()
    right = bool(options) and name in DONE_AT_ONCE
    assert (not_itself(name, of, **options) == 0) is right


@pytest.mark.parametrize(
    ("equal", "options"),
    [("computed twice", {}), ("computed twice", {"record": True}), ("divided", {})],
)
@pytest.mark.quick("computed twice-options0", "divided-options2")
def test_so_it_is_by_other_ways(equal: str, options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not_itself("element", "update", equal, **options) == 0
    for rule in ("_picks", "_may_pick"):
        monkeypatch.setattr(high_words, rule, lambda node: False)
    torch.compiler.reset()
    assert not_itself("element", "update", equal, **options) > 0


@pytest.mark.parametrize("of", OF)
@pytest.mark.parametrize("name", READ)
@pytest.mark.quick("a number-update")
def test_so_it_is_as_a_float_that_a_recorded_step_reads(
    name: str, of: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not_itself(name, of, "of a float", record=True) == 0
    for op in (aten.eq.Scalar, aten.ge.Scalar, aten.le.Scalar):
        monkeypatch.setitem(COMPARISONS, op, (op, lambda rounded, itself: rounded))
    torch.compiler.reset()
    assert not_itself(name, of, "of a float", record=True) > 0


ALONE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "rows": lambda p, g: g * p[:1] + g.flip(0) - g,
    "trust ratio": lambda p, u: u * (p.view(-1).norm() / (u.view(-1).norm() + 1e-6)),
    "dot product": lambda p, u: u / (u.flatten().dot(u.flatten()).sqrt() + 1e-6),
    "global norm": lambda p, u: u / torch.cat([u.reshape(-1)]).norm().clamp(min=1),
    "cautious": lambda p, u: u * (u * p > 0) / (u * p > 0).to(u.dtype).mean().clamp(min=1e-3),
    "kept share": lambda p, u: (u * (u * p > 0)) * (u.abs().sum() / (u * (u * p > 0)).abs().sum()),
    "part of a sum": lambda p, u: u * (torch.where(FIFTH, u, 0).abs().sum() / 6),
    "reached share": lambda p, u: u * (u > p).to(u.dtype).mean() + u * (u * p).sum(),
    "projected": lambda p, u: torch.where(u > 0, u - p * ((u * p).sum() / p.square().sum()), u),
    "clipped by deviation": lambda p, u: torch.maximum(torch.minimum(u, 2 * u.std()), -2 * u.std()),
    "masked norm": lambda p, u: u / torch.where(FIFTH, 0, u).square().sum().sqrt().clamp(min=1),
    "Newton-Schulz": lambda p, u: 1.5 * u - 0.5 * (u.view(4, -1) @ u.view(4, -1).T) @ u,
}
"""Updates in which nothing meets an element that is its own."""


@pytest.mark.parametrize("name", ALONE)
@pytest.mark.quick("trust ratio", "Newton-Schulz")
def test_others_stay_in_slices(name: str) -> None:
    found: list[str] = []

    def step(p: Tensor, g: Tensor, v: Tensor) -> None:
        v.mul_(0.999).addcmul_(g, g, value=0.001)
        p.sub_(ALONE[name](p, g / (v.sqrt() + 1e-8)), alpha=LR)

    def seen(program: Any) -> Any:
        found.extend(chosen(program))
        return iter(found)

    chosen = high_words.chosen
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(escape, "chosen", seen)
        collage_fx.compile(step)(*(torch.ones(4, 3).bfloat16() for _ in range(3)))
    assert found == []
