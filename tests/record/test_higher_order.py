"""Operations that take functions, in a step that is recorded.

For record.at_once and record.dispatch_modes.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from recorded_steps import Each
from support.interpreter import without_compiler
from torch import Tensor, nn
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.map import map as map_rows
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch._ops import HigherOrderOperator
from torch.optim import Optimizer

import collage_fx


def branched(m: Tensor) -> Tensor:
    return torch.cond(m.norm() > 1.2, lambda m: m * 0.5, lambda m: m * 1.5, (m,))


def looped(m: Tensor) -> Tensor:
    start = (torch.tensor(0), m)
    return while_loop(lambda i, x: i < 2, lambda i, x: (i + 1, x * 1.1), start)[1]


def mapped(m: Tensor) -> Tensor:
    return map_rows(lambda x: x * 1.1, m)


class Moved(Optimizer):
    """Moves parameters by a function of an average."""

    def __init__(self, params: list[Tensor], direction: Callable[[Tensor], Tensor]) -> None:
        super().__init__(params, {"lr": 1e-3})
        self.direction = direction

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            if not self.state[p]:
                self.state[p]["m"] = torch.zeros_like(p)
            m = self.state[p]["m"].lerp_(p.grad, 0.1)
            p.data.sub_(self.direction(m), alpha=self.param_groups[0]["lr"])


def train(direction: Callable[[Tensor], Tensor], dtype: torch.dtype, record: object) -> Tensor:
    """Return how far the parameters have moved; in plain steps if record is None."""
    generator = torch.Generator().manual_seed(3)
    start = (torch.rand(4, 4, generator=generator) + 1).bfloat16().double()
    p = nn.Parameter(start.to(dtype, copy=True))
    optimizer = Moved([p], direction)
    step = optimizer.step if record is None else collage_fx.compile(optimizer, record=record)
    for _ in range(6):
        p.grad = (torch.randn(4, 4, generator=generator) + 1).bfloat16().to(dtype)
        step()
    return (p.detach() if record is None else collage_fx.value(p)).double() - start


@pytest.mark.parametrize("direction", [branched, looped, mapped])
@pytest.mark.parametrize("record", [True, False])
@pytest.mark.quick("True-branched", "True-mapped")
def test_what_takes_functions_is_done(direction: Callable[[Tensor], Tensor], record: bool) -> None:
    exact = train(direction, torch.float64, None)
    ours, plain = (train(direction, torch.bfloat16, r) for r in (record, None))
    assert float((ours - exact).norm() / exact.norm()) < 1e-2
    assert float((plain - exact).norm() / exact.norm()) > 0.3


def branch(p: Tensor, g: Tensor) -> Tensor:
    return torch.cond(g.sum() > 0, lambda p, g: p - g, lambda p, g: p + g, (p, 1e-3 * g))


def loop(p: Tensor, g: Tensor) -> Tensor:
    def body(i: Tensor, p: Tensor, g: Tensor) -> tuple[Tensor, ...]:
        return i + 1, p - g, g.clone()

    return while_loop(lambda i, p, g: i < 2, body, (torch.tensor(0), p.clone(), 5e-4 * g))[1]


def rows(p: Tensor, g: Tensor) -> Tensor:
    return map_rows(lambda row: row[0] - 1e-3 * row[1], (p, g))


def steps(p: Tensor, g: Tensor) -> Tensor:
    both = torch.stack([g, g])
    return scan(lambda p, g: (p - 5e-4 * g, p * 1.0), p.clone(), both)[0]


def all_at_once(p: Tensor, g: Tensor) -> Tensor:
    two = torch.stack([p, -1e-3 * g])
    return associative_scan(torch.add, two, 0, combine_mode="generic")[1]


class _Applied(HigherOrderOperator):
    """An operator of the user's own, of which nobody knows what it does."""

    def __init__(self) -> None:
        super().__init__("collage_tests_applied")

    def __call__(self, function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """Apply a function."""
        return super().__call__(function, *tensors)


applied = _Applied()
applied.py_impl(torch._C.DispatchKey.CompositeExplicitAutograd)(lambda f, *tensors: f(*tensors))
applied.fallthrough(torch._C.DispatchKey.AutogradCPU)


def unknown(p: Tensor, g: Tensor) -> Tensor:
    return applied(lambda p, g: p - 1e-3 * g, p, g)


STEPS = 4


def moved(new: Callable[[Tensor, Tensor], Tensor], **options: Any) -> float:
    """Return how far parameters of one have moved: by 1e-3 of the gradient in each step."""
    p = nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
    optimizer = Each([p], lambda p, g, state: p.copy_(new(p.detach(), g)))
    step = collage_fx.compile(optimizer, **options) if options else optimizer.step
    with without_compiler():
        for _ in range(STEPS):
            p.grad = torch.full_like(p, 0.25)
            step()
    return float((1 - collage_fx.value(p)).mean())


@pytest.mark.parametrize("new", [branch, loop, rows, steps, all_at_once])
@pytest.mark.quick("rows", "loop")
def test_what_they_make_of_a_parameter_has_its_low_word(
    new: Callable[[Tensor, Tensor], Tensor],
) -> None:
    assert moved(new, record=True) == pytest.approx(STEPS * 1e-3 * 0.25, rel=0.02)
    assert moved(new) == 0


def test_one_that_is_not_known_is_named_in_a_warning() -> None:
    with pytest.warns(collage_fx.CollageWarning, match="collage_tests_applied.*test_higher_order"):
        assert moved(unknown, record=True) == 0
