"""A step whose code, or code that it shares with others, has been compiled plainly before.

For step.recompile_guard and hooks.dynamo_settings.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import collage_fx
from collage_fx.dynamo import backend

LIMIT = 2
RATE = 1e-3
STEPS = 4
config = torch._dynamo.config


class Scaled(Optimizer):
    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__(params, {"lr": RATE})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad * self.param_groups[0]["lr"])


class Moved(Scaled):
    """Another class: what PyTorch puts around its step has the same code."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.add_(p.grad, alpha=-self.param_groups[0]["lr"])


def move(p: Tensor, g: Tensor) -> None:
    p.sub_(g * RATE)


def tensors(size: int) -> tuple[Tensor, Tensor]:
    return torch.full((size,), 2.0).bfloat16(), torch.full((size,), 2.0).bfloat16()


def made(kind: type[Scaled]) -> Scaled:
    p = nn.Parameter(tensors(3)[0])
    p.grad = tensors(3)[1]
    return kind([p])


def taken(step: Callable[..., Any], *args: Any) -> int:
    """Take steps; return how many of them Dynamo graphs have done."""
    for _ in range(STEPS):
        step(*args)
    (served,) = collage_fx.report(step).states
    assert served.steps == STEPS
    return served.graph


@pytest.mark.filterwarnings("ignore:.*runs without compensation")
@pytest.mark.parametrize("kind", [Scaled, Moved])
def test_an_optimizer_has_graphs_past_the_limit_of_plain_ones(kind: type[Scaled]) -> None:
    plain = [made(Scaled) for _ in range(LIMIT + 1)]
    graphs: list[Any] = []

    def kept(gm: Any, _: Any) -> Any:
        graphs.append(gm)
        return gm

    with config.patch(recompile_limit=LIMIT):
        for optimizer in plain:
            torch.compile(optimizer.step, backend=kept)()
    assert len(graphs) == LIMIT  # the control: Dynamo compiles the code no more
    optimizer = made(kind)
    assert taken(collage_fx.compile(optimizer)) == STEPS
    (p,) = optimizer.param_groups[0]["params"]
    assert float(2 - collage_fx.value(p)[0]) == pytest.approx(STEPS * 2 * RATE, rel=1e-2)


def test_each_of_many_optimizers_has_graphs() -> None:
    kept = [made(Scaled) for _ in range(LIMIT + 2)]
    with config.patch(accumulated_recompile_limit=LIMIT):
        assert [taken(collage_fx.compile(optimizer)) for optimizer in kept] == [STEPS] * len(kept)


@pytest.mark.filterwarnings("ignore:collage_fx. p belong to no")
def test_a_function_has_graphs_of_the_sizes_that_it_is_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Dynamo makes a symbol of a size that differs from those that it has seen."""
    symbols: list[int] = []
    original = backend._Step.__init__

    def spy(self: Any, session: Any, gm: Any, inputs: Any) -> None:
        symbols.append(sum(isinstance(x, torch.SymInt) for x in inputs))
        original(self, session, gm, inputs)

    monkeypatch.setattr(backend._Step, "__init__", spy)
    torch.compile(move, backend="eager")(*tensors(3))
    assert taken(collage_fx.compile(move), *tensors(5)) == STEPS
    torch.compile(move, backend="collage")(*tensors(7))
    assert symbols == [0, 1]  # the control: what a user has compiled of it counts together


@pytest.mark.filterwarnings("ignore:.*runs without compensation")
def test_a_function_has_graphs_past_the_limit_of_plain_ones() -> None:
    with config.patch(recompile_limit=LIMIT):
        for size in (3, 4, 5):
            torch.compile(move, backend="eager", dynamic=False)(*tensors(size))
    assert taken(collage_fx.compile(move), *tensors(6)) == STEPS
