"""Tensors that a step makes of numbers that it has read: whole, as what it has read them of.

For record.numbers_read and hooks.data_reads.
"""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from interpreter import without_compiler
from torch import Tensor, nn
from torch.optim import Optimizer

import collage_fx
from collage_fx.record.numbers_read import NumbersRead

LR, STEPS = 1e-2, 6
BF16 = torch.bfloat16
NO_FLOAT = 0.1
"""A number that bf16 rounds."""


class Chosen(Optimizer):
    """Moves where a condition on its update holds."""

    def __init__(self, params: list[nn.Parameter], holds: Callable[[Tensor], Any]) -> None:
        super().__init__(params, {"lr": LR})
        self.holds = holds

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            m = self.state[p].setdefault("m", torch.zeros_like(p))
            m.mul_(0.999).add_(p.grad, alpha=0.001)
            u = m * 1.3 + p.grad * 0.7001
            p.sub_(self.holds(u).to(p.dtype) * self.param_groups[0]["lr"])


MADE: dict[str, Callable[[Tensor], Tensor]] = {
    "tensor": lambda u: u >= torch.tensor(u[1, 2].item(), dtype=u.dtype),
    "list": lambda u: u == torch.tensor([u[1, 2].item()], dtype=u.dtype),
    "beside others": lambda u: u == torch.tensor([[0.1], [u[1, 2].item()]], dtype=u.dtype)[1],
    "of tensors": lambda u: u == torch.tensor([u[0, 0], u[1, 2]])[1],
    "tolist": lambda u: u == torch.tensor(u.tolist(), dtype=u.dtype),
    "as_tensor": lambda u: u == torch.as_tensor(u[1, 2].item(), dtype=u.dtype),
    "asarray": lambda u: u == torch.asarray([u[1, 2].item()], dtype=u.dtype),
    "new_tensor": lambda u: u == u.new_tensor([u[1, 2].item()]),
    "by name": lambda u: u == u.new_tensor(data=float(u[1, 2])),
    "twice": lambda u: 2 * u == torch.tensor(2 * u[1, 2].item(), dtype=u.dtype),
    "negative": lambda u: -u == torch.tensor(-u[1, 2].item(), dtype=u.dtype),
    "of a double": lambda u: u == torch.tensor(u[1, 2].double().item(), dtype=u.dtype),
    "isin": lambda u: torch.isin(u, torch.tensor([u[1, 2].item()], dtype=u.dtype)),
    "clamp": lambda u: u.clamp(max=torch.tensor(u[1, 2].item(), dtype=u.dtype)) == u[1, 2],
    "read again": lambda u: u == torch.tensor(u[1, 2].item(), dtype=u.dtype).item(),
}
HELD_BEFORE: dict[str, Callable[[Tensor], Tensor]] = {
    "full": lambda u: u == torch.full((), u[1, 2].item(), dtype=u.dtype),
    "new_full": lambda u: u == u.new_full((1,), u[1, 2].item()),
    "scalar_tensor": lambda u: u == torch.scalar_tensor(u[1, 2].item(), dtype=u.dtype),
    "fill_": lambda u: u == torch.empty_like(u).fill_(u[1, 2].item()),
    "fp32": lambda u: u == torch.tensor([u[1, 2].item()]),
}
"""Tensors that dispatch sees made of their numbers, or that round less."""


def times_held(holds: Callable[[Tensor], Tensor], **options: Any) -> int:
    """Return in how many steps a condition held of the element that it picks."""
    p = nn.Parameter(torch.zeros(4, 5, dtype=BF16))
    step = collage_fx.compile(Chosen([p], holds), **options)
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        p.grad = torch.randn(4, 5, generator=generator).bfloat16()
        step()
    assert collage_fx.residuals(p)
    return round(-float(collage_fx.value(p)[1, 2]) / LR)


@pytest.mark.parametrize("options", [{}, {"record": True}], ids=["graph", "recorded"])
@pytest.mark.parametrize("name", [*MADE, *HELD_BEFORE])
@pytest.mark.quick("list-graph", "new_tensor-recorded")
def test_a_number_is_itself_in_a_tensor(name: str, options: Any) -> None:
    assert times_held({**MADE, **HELD_BEFORE}[name], **options) == STEPS


@pytest.mark.parametrize("name", MADE)
@pytest.mark.quick("list")
def test_without_low_words_it_is_not(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NumbersRead, "keep", lambda *_: None)
    assert times_held(MADE[name], record=True) < STEPS


@pytest.mark.parametrize("options", [{}, {"record": True}], ids=["graph", "recorded"])
def test_a_number_that_was_not_read_is_rounded(options: Any) -> None:
    rounded = float(torch.tensor(NO_FLOAT, dtype=BF16))
    assert rounded != NO_FLOAT

    def holds(u: Tensor) -> Tensor:
        mine = torch.tensor([u[1, 2].item(), NO_FLOAT], dtype=u.dtype)
        return (u == mine[0]) & (mine[1].double() == rounded)

    assert times_held(holds, **options) == STEPS


@pytest.mark.filterwarnings("ignore:.*nothing needed compensation")
def test_numbers_of_a_step_with_nothing_wide_are_rounded() -> None:
    def step(p: Tensor, g: Tensor) -> None:
        p.add_(torch.tensor(g[0].item(), dtype=BF16).float())

    p = torch.zeros(3)
    collage_fx.compile(step, record=True)(p, torch.full((3,), NO_FLOAT))
    assert torch.equal(p, torch.full((3,), NO_FLOAT).bfloat16().float())


class InPython(Optimizer):
    """Updates each element by Python's numbers, in one of several ways of writing it."""

    def __init__(self, params: list[nn.Parameter], write: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__(params, {"lr": LR})
        self.write = write

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            self.write(p, p.grad)


def by_element(p: Tensor, g: Tensor) -> None:
    for i, j in itertools.product(*map(range, p.shape)):
        p[i, j] = p[i, j].item() - 1e-4 * float(g[i, j])


def by_lists(p: Tensor, g: Tensor) -> None:
    rows = zip(p.tolist(), g.tolist(), strict=True)
    new = [[x - 1e-4 * y for x, y in zip(*row, strict=True)] for row in rows]
    p.copy_(torch.tensor(new, dtype=torch.float64))


@pytest.mark.filterwarnings("ignore:.*new graph at each call")
@pytest.mark.parametrize("options", [{}, {"record": True}, {"record": False}], ids=str)
@pytest.mark.parametrize("write", [by_element, by_lists])
def test_arithmetic_of_python_is_whole(write: Any, options: Any) -> None:
    """In each step, also where Dynamo's graphs have done all else. Plain bf16 stays where it is."""
    generator = torch.Generator().manual_seed(1)
    begin = (1 + torch.rand(2, 3, generator=generator)).bfloat16().float()
    params = [nn.Parameter(begin.to(d)) for d in (torch.bfloat16, torch.bfloat16, torch.float64)]
    ours, plain, exact = (InPython([p], write) for p in params)
    collage_fx.compile_(ours, **options)
    with without_compiler():
        for _ in range(8):
            gradient = torch.rand(2, 3, generator=generator).bfloat16()
            for optimizer, p in zip((ours, plain, exact), params, strict=True):
                p.grad = gradient.to(p.dtype)
                optimizer.step()
    way = (params[2] - begin).norm()
    assert (collage_fx.value(params[0]) - params[2]).norm() < 0.01 * way
    assert (params[1] - params[2]).norm() > 0.9 * way
