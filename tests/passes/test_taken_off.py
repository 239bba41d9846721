"""Rounded values beside a carried path, off which the state is taken again before they enter it.

For passes.analysis.carried_path.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphs import capture_optimizer
from torch import Tensor, optim
from torch.optim import Optimizer

import collage_fx
from collage_fx.passes.analysis import carried_path

Update = Callable[[Tensor, Tensor], Any]
WAYS: dict[str, dict[str, Any]] = {
    "mcf2": {"arithmetic": "eft"},
    "mcf3": {"storage": "mcf3"},
    "recorded": {"storage": "mcf2", "record": True},
}


def back_half(p: Tensor, d: Tensor) -> None:
    old = p.clone()
    p.sub_(d).lerp_(old, 0.5)


def most_of_the_way_back(p: Tensor, d: Tensor) -> None:
    old = p.clone()
    p.sub_(d).lerp_(old, 0.9)


def by_hand(p: Tensor, d: Tensor) -> None:
    p.sub_((p - (p - d)) * 0.5)


def in_two_parts(p: Tensor, d: Tensor) -> None:
    near = p - d
    p.add_((near - 0.9 * p - 0.1 * p) * 0.5)


def on_the_path(p: Tensor, d: Tensor) -> None:
    there, back = p - d, p + d
    p.add_(0.5 * there).sub_(0.5 * back)


def clamped(p: Tensor, d: Tensor) -> None:
    p.add_(((p - d) - p).clamp(-1e-3, 1e-3))


def curved(p: Tensor, d: Tensor) -> None:
    p.add_(torch.tanh((p - d) - p))


def by_sign(p: Tensor, d: Tensor) -> None:
    p.add_(torch.sign((p - d) - p) * 1e-4)


UPDATES = (
    *(back_half, most_of_the_way_back, by_hand),
    *(in_two_parts, on_the_path, clamped, curved, by_sign),
)


class Updates(Optimizer):
    """Optimizer whose step is one update of its parameter by a small difference."""

    def __init__(self, params: list[Tensor], update: Update) -> None:
        super().__init__(params, {})
        self.update = update

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        (p,) = self.param_groups[0]["params"]
        self.update(p, 2e-3 * p.grad)


def moved(update: Update, dtype: torch.dtype, compile_: Callable[[Optimizer], Any]) -> float:
    p = torch.full((4,), 0.8).bfloat16().to(dtype)
    first = p.double().clone()
    step = compile_(Updates([p], update))
    for _ in range(20):
        p.grad = torch.full_like(p, 0.125)
        step()
    return float((first - collage_fx.value(p).double())[0])


def error(update: Update, **options: Any) -> float:
    """Return the part of the way that is wrong."""
    wanted = moved(update, torch.float64, lambda o: o.step)
    found = moved(update, torch.bfloat16, lambda o: collage_fx.compile(o, **options))
    return abs(found / wanted - 1)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.quick("back_half-mcf2", "curved-mcf3")
def test_what_a_rounded_value_has_beside_the_state_is_kept(update: Update, way: str) -> None:
    assert error(update, **WAYS[way]) < 0.02


@pytest.mark.parametrize("update", UPDATES)
def test_it_is_lost_where_that_is_not_seen(update: Update, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control."""
    monkeypatch.setattr(carried_path, "_rounded", lambda *_: 0.0)
    assert error(update, arithmetic="eft") > 0.5


@pytest.mark.parametrize("kind", [optim.Adagrad, optim.Adam, optim.Adamax, optim.NAdam])
@pytest.mark.quick("Adam")
def test_a_decay_in_a_gradient_keeps_its_arithmetic(kind: type[Optimizer]) -> None:
    """No part of the state is taken off again, though it is divided by what depends on it too."""
    program = capture_optimizer(kind, foreach=False, weight_decay=0.1).program()
    wider = carried_path.stored_wider(program)
    found = [carried_path.eft_storage(program, r, wider)[0] for r in program.rewritten]
    assert found == ["mcf2"]
