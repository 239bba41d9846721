"""Copies that a step makes: each has memory of its own, however it is made, and keeps its value.

For passes.codegen.emit.
"""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

import collage_fx

pytestmark = pytest.mark.kernels

COPIES: dict[str, Callable[[Tensor], Tensor]] = {
    "zeros_like": lambda x: torch.zeros_like(x).copy_(x),
    "new_empty": lambda x: x.new_empty(x.shape).copy_(x),
    "full_like": lambda x: torch.full_like(x, 2).copy_(x),
    "to": lambda x: x.detach().to(x.dtype, copy=True),
    "foreach": lambda x: _foreach_copied(torch.zeros_like(x), x),
    "there_and_back": lambda x: x.to(torch.float32).to(x.dtype),
    "where": lambda x: torch.where(torch.ones_like(x, dtype=torch.bool), x, x),
    "reshaped": lambda x: torch.empty_like(x).copy_(x).view(2, 4),
    "part": lambda x: torch.empty_like(x).copy_(x)[2:],
    "of_a_view": lambda x: torch.empty(4, 2, dtype=x.dtype).copy_(x.view(2, 4).t()),
    "clone": lambda x: x.detach().clone(),
    "sum": lambda x: torch.zeros_like(x).add_(x),
    "plus_nothing": lambda x: x + 0,
    "times_one": lambda x: (x * 1).view(2, 4),
    "stack": lambda x: torch.stack([x])[0],
    "cat": lambda x: torch.cat([x]),
}


def _foreach_copied(into: Tensor, x: Tensor) -> Tensor:
    torch._foreach_copy_([into], [x])
    return into


def tensors(count: int, dtype: torch.dtype) -> list[Tensor]:
    """Return tensors whose values and differences bf16 holds exactly."""
    return [(torch.arange(8) + 8 + i % 3).to(dtype) for i in range(count)]


def memory(tensors: Iterable[Tensor]) -> list[int]:
    return [t.untyped_storage().data_ptr() for t in tensors]


def copies(ps: list[Tensor], gs: list[Tensor]) -> list[Tensor]:
    """Return copies of each parameter from before the step, of a gradient, of new parameters."""
    olds = [copy(p) for copy, p in zip(COPIES.values(), ps, strict=True)]
    olds += [torch.empty_like(gs[0]).copy_(gs[0]) for _ in range(2)]
    for p, g in zip(ps, gs, strict=True):
        p.sub_(g, alpha=0.125)
    return [*olds, ps[0].view(2, 4).t().clone(), torch.empty_like(ps[1]).copy_(ps[1])]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*belong to no torch.optim.Optimizer")
@pytest.mark.parametrize("backend", ["collage", None])
def test_a_copy_that_a_function_returns_has_memory_of_its_own(backend: str | None) -> None:
    step = collage_fx.compile(copies)
    if backend:
        step = torch.compile(copies, backend=backend)
    exact = tensors(len(COPIES), torch.float64)
    expected = copies(exact, tensors(len(COPIES), torch.float64))
    ps, gs = (tensors(len(COPIES), torch.bfloat16) for _ in range(2))
    found = step(ps, gs)
    assert len(set(memory([*ps, *gs, *found]))) == len([*ps, *gs, *found])
    for ours, theirs in zip([*ps, *found], [*exact, *expected], strict=True):
        assert torch.equal(ours.double(), theirs) and ours.stride() == theirs.stride()


class Keeping(Optimizer):
    """Each parameter keeps what it was before its first step, copied in its own way."""

    def __init__(self, params: list[Tensor], copies: list[Callable[[Tensor], Tensor]]) -> None:
        super().__init__(params, {})
        self.copies = copies

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for p, copy in zip(self.param_groups[0]["params"], self.copies, strict=True):
            state = self.state[p]
            if not state:
                state["start"] = copy(p)
            p.sub_(p.grad, alpha=0.125)


@pytest.mark.parametrize(
    "ways", [list(COPIES.values()), [COPIES["zeros_like"]] * 9], ids=["each", "class"]
)
def test_a_state_that_begins_as_a_copy_is_not_the_parameter(ways: Any) -> None:
    starts = tensors(len(ways), torch.bfloat16)
    params = [p.clone().requires_grad_() for p in starts]
    for p in params:
        p.grad = p.detach().clone()
    optimizer = Keeping(params, ways)
    step = torch.compile(optimizer.step, backend="collage")
    for _ in range(2):
        step()
    kept = [optimizer.state[p]["start"] for p in params]
    assert len(set(memory([*params, *kept]))) == 2 * len(params)
    for p, start, copied, copy in zip(params, starts, kept, ways, strict=True):
        assert torch.equal(copied, copy(start)) and torch.equal(p, start - start / 4)


def test_states_change_places_through_copies_and_views() -> None:
    def step(p: Tensor, a: Tensor, b: Tensor, c: Tensor, same: Tensor) -> None:
        same.copy_(same.clone())
        p.sub_(c, alpha=0.125)
        old = a.clone()
        a.copy_(torch.empty_like(b).copy_(b.t()))
        b.copy_(torch.zeros_like(c).copy_(c))
        c.copy_(old.t())

    exact = [x.view(2, 4)[:, :2].contiguous() for x in tensors(5, torch.float64)]
    ours = [x.bfloat16() for x in exact]
    compiled = collage_fx.compile(step)
    for _ in range(4):
        compiled(*ours)
        step(*exact)
        for x, y in zip(ours, exact, strict=True):
            assert torch.equal(collage_fx.value(x), y)
