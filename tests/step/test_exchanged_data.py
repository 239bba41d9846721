"""Steps that read, keep and exchange `p.data` have the numbers of eager PyTorch, in fp32 too.

For hooks.traces and passes.dedup.replaced_states.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

import collage_fx

Update = Callable[[list[Any], Any], None]


def read_afterwards(params: list[Any], state: Any) -> None:
    p, q = params
    old = p.data
    p.data = p.data - p.grad
    q.add_(old, alpha=0.1)


def read_anew(params: list[Any], state: Any) -> None:
    p, q = params
    p.data = p.data - p.grad
    q.data = p.data * 0.1 + q.data


def kept(params: list[Any], state: Any) -> None:
    for p in params:
        before = state[p].get("before", p.detach().clone())
        state[p]["before"], p.data = p.data, before * 0.5 + p * 0.5 - p.grad


def exchanged(params: list[Any], state: Any) -> None:
    p, q = params
    p.data, q.data = q.data - p.grad, p.data + q.grad


def taken_by_turns(params: list[Any], state: Any) -> None:
    p, q = params
    p.data, q.data = q.data, p.data
    p.sub_(p.grad)
    q.add_(q.grad)


class Each(Optimizer):
    def __init__(self, params: list[Tensor], update: Update) -> None:
        super().__init__(params, {})
        self.update = update

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        self.update(self.param_groups[0]["params"], self.state)


def trained(update: Update, dtype: torch.dtype, compiled: Any, steps: int = 6) -> Tensor:
    torch.compiler.reset()
    draw = torch.Generator().manual_seed(0)
    begin = [torch.randn(4, 4, generator=draw).bfloat16() for _ in range(2)]
    params: list[Any] = [Parameter(x.to(dtype)) for x in begin]
    optimizer = Each(params, update)
    step = compiled(optimizer)
    for _ in range(steps):
        for p in params:
            p.grad = (1e-3 * torch.randn(4, 4, generator=draw)).bfloat16().to(dtype)
        step()
    return torch.stack([collage_fx.value(p).double() for p in params])


def plain(optimizer: Optimizer) -> Any:
    return optimizer.step


def way_lost(update: Update, dtype: torch.dtype, compiled: Any) -> float:
    exact, begin = (trained(update, torch.float64, plain, n) for n in (6, 0))
    return float((trained(update, dtype, compiled) - exact).norm() / (exact - begin).norm())


@pytest.mark.filterwarnings("ignore:.*nothing needed compensation")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("update", [read_afterwards, read_anew, kept, exchanged, taken_by_turns])
def test_memory_is_whose_it_is_in_eager_pytorch(update: Update, dtype: torch.dtype) -> None:
    assert way_lost(update, dtype, collage_fx.compile) < 1e-4
    assert way_lost(update, torch.bfloat16, plain) > 0.01


def test_dynamo_reads_data_again_when_the_graph_has_ended() -> None:
    """The control: the old value that a state is to keep is the new one."""

    def stock(optimizer: Optimizer) -> Any:
        return torch.compile(optimizer.step, backend="eager")

    assert way_lost(kept, torch.float32, stock) > 0.1
