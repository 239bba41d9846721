"""Operations that take functions, in a step that is recorded."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.map import map as map_rows
from torch._higher_order_ops.while_loop import while_loop
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
def test_what_takes_functions_is_done(direction: Callable[[Tensor], Tensor], record: bool) -> None:
    exact = train(direction, torch.float64, None)
    ours, plain = (train(direction, torch.bfloat16, r) for r in (record, None))
    assert float((ours - exact).norm() / exact.norm()) < 1e-2
    assert float((plain - exact).norm() / exact.norm()) > 0.3
