"""Steps that give parameters other memory, as by `p.data = p.data - u`: graphs write them in place.

Who has the old memory keeps its value. For dynamo.renewed_states and passes.dedup.replaced_states.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from repeated_steps import params_of, values
from shared_runs import same
from torch import Tensor
from torch.fx import GraphModule
from torch.optim import Optimizer

import collage_fx
from collage_fx.passes.dedup.replaced_states import sets_data, written_in_place

RATE = 2e-5


class Moved(Optimizer):
    """Momentum; the parameter is decayed and updated in memory that is new each time."""

    def __init__(self, params: list[Tensor]) -> None:
        super().__init__(params, {"lr": RATE})

    def store(self, p: Tensor, value: Tensor) -> None:
        p.data = value

    def step(self) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            if p.grad is None:
                continue
            state = self.state[p]
            if not state:
                state["m"] = torch.zeros_like(p.data)
            state["m"].mul_(0.99).add_(p.grad, alpha=0.01)
            self.store(p, p.data * (1 - 1e-3 * RATE))
            self.store(p, p.data - RATE * state["m"])


class Copied(Moved):
    def store(self, p: Tensor, value: Tensor) -> None:
        p.data.copy_(value)


class Kept(Moved):
    """Keeps the old memory as a state: the graph would write it."""

    def store(self, p: Tensor, value: Tensor) -> None:
        self.state[p]["old"] = p.data
        p.data = value


def start(kind: Any, dtype: torch.dtype = torch.bfloat16) -> Any:
    draw = torch.Generator().manual_seed(0)
    params = [(1 + 0.3 * torch.randn(s, generator=draw)).bfloat16() for s in [(4, 3), (7,), (5,)]]
    return kind([p.to(dtype).requires_grad_() for p in params])


def take(optimizer: Any, first: int, last: int) -> None:
    for k in range(first, last):
        draw = torch.Generator().manual_seed(k)
        for p in params_of(optimizer):
            p.grad = (0.5 + torch.randn(p.shape, generator=draw)).bfloat16().to(p.dtype)
        optimizer.step()


def trained(kind: Any, last: int = 8, **options: Any) -> Any:
    optimizer = start(kind)
    collage_fx.compile_(optimizer, **options)
    take(optimizer, 0, last)
    return optimizer


@pytest.mark.parametrize(
    "options",
    [{}, {"storage": "mcf2", "arithmetic": "eft"}, {"storage": "ulp8"}, {"changed": True}],
    ids=str,
)
def test_bits_are_those_of_a_step_that_writes_the_memory(options: dict[str, Any]) -> None:
    ours, other = trained(Moved, **options), trained(Copied, **options)
    assert same(values(ours), values(other))
    assert all(state.graph for state in collage_fx.report(ours).states)


def test_updates_are_not_lost() -> None:
    """The control is plain bf16."""
    ours, plain, exact = trained(Moved, 20), start(Moved), start(Moved, torch.float64)
    for optimizer in (plain, exact):
        take(optimizer, 0, 20)
    begin = [p.detach().double() for p in params_of(start(Moved))]
    found = {}
    for name, optimizer in (("ours", ours), ("plain", plain), ("exact", exact)):
        whole = map(collage_fx.value, params_of(optimizer))
        found[name] = torch.cat(
            [(x.detach().double() - b).flatten() for x, b in zip(whole, begin, strict=True)]
        )
    way = found["exact"].norm()
    assert (found["ours"] - found["exact"]).norm() < 0.05 * way
    assert (found["plain"] - found["exact"]).norm() > 0.9 * way


def test_who_has_the_old_memory_has_its_value() -> None:
    optimizer = trained(Moved, 5)
    old = [p.data for p in params_of(optimizer)]
    before = [t.clone() for t in old]
    whole = [collage_fx.value(p).clone() for p in params_of(optimizer)]
    take(optimizer, 5, 60)
    assert all(map(torch.equal, old, before))
    for p, value in zip(params_of(optimizer), whole, strict=True):
        assert not torch.equal(collage_fx.value(p), value)


def test_a_step_that_keeps_the_old_memory_is_right_too() -> None:
    ours, exact = trained(Kept), start(Kept, torch.float64)
    take(exact, 0, 8)
    for p, q in zip(params_of(ours), params_of(exact), strict=True):
        assert (collage_fx.value(p).double() - q).abs().max() < 1e-6
        assert torch.equal(ours.state[p]["old"], exact.state[q]["old"].bfloat16())


def graph_of(step: Callable[..., Any]) -> GraphModule:
    found: list[GraphModule] = []

    def backend(gm: GraphModule, _: Any) -> Any:
        found.append(gm)
        return gm.forward

    p, q, g = [torch.ones(4, 3, dtype=torch.bfloat16) for _ in range(3)]
    torch.compile(step, backend=backend, fullgraph=True)(p, q, g)
    sets_data(found[0])
    return found[0]


def replaced(p: Tensor, q: Tensor, g: Tensor) -> None:
    p.data = p - g


def chained(p: Tensor, q: Tensor, g: Tensor) -> None:
    p.data = (p * 0.5).add_(g)
    q.data = q.data + p.sum()


def shares(p: Tensor, q: Tensor, g: Tensor) -> None:
    p.data = g


def given_away(p: Tensor, q: Tensor, g: Tensor) -> Tensor:
    p.data = new = p - g
    return new


def read_before(p: Tensor, q: Tensor, g: Tensor) -> None:
    row = p[0]
    p.data = p - g
    q[0].add_(row)


def written_after(p: Tensor, q: Tensor, g: Tensor) -> None:
    new = p - g
    p.data = new
    new.add_(1)


@pytest.mark.parametrize(
    "step, count",
    [
        (replaced, 1),
        (chained, 2),
        (shares, 0),
        (given_away, 0),
        (read_before, 0),
        (written_after, 0),
    ],
)
def test_memory_that_others_have_is_left_alone(step: Callable[..., Any], count: int) -> None:
    gm = graph_of(step)
    rewritten, found = written_in_place(gm)
    assert len(found) == count
    assert any(n.target is Tensor.set_ for n in rewritten.graph.nodes) == (not count)
