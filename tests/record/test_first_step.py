"""A first step that makes its states: it is recorded, and Dynamo does not see it.

For dynamo.backend and compilation.residual_binding.
"""

import warnings
from typing import Any

import pytest
import torch
from interpreter import without_compiler
from recorded_steps import train
from tensors import bf16, with_grads
from torch import Tensor
from torch._dynamo.utils import counters
from torch.optim import SGD, AdamW, Optimizer

import collage_fx
from collage_fx.compilation import residual_binding, side_inputs
from collage_fx.dynamo.backend import Backend

RATES = (1e-3, 2e-3, 3e-3, 4e-3)


class Averages(Optimizer):
    """Makes two states of each parameter, one after the update of the other."""

    def __init__(self, params: list[Tensor]) -> None:
        super().__init__(params, {"lr": 1e-3})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["fast"] = torch.zeros_like(p)
                state["fast"].add_(p.grad, alpha=1e-3)
                if "slow" not in state:
                    state["slow"] = torch.zeros_like(p)
                state["slow"].mul_(0.999).add_(state["fast"], alpha=5e-3)
                p.sub_(state["slow"], alpha=group["lr"])


class Sign(Optimizer):
    """Has no states."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad.sign(), alpha=1e-3)


@pytest.mark.parametrize(
    ("make", "graphs"),
    [
        (Averages, 0),
        (lambda params: SGD(params, lr=1e-3, momentum=0.9), 0),
        (lambda params: AdamW(params, lr=1e-3), 1),  # Dynamo makes its states
        (lambda params: Sign(params, {}), 1),
    ],
)
def test_dynamo_sees_the_first_step_unless_it_makes_states(make: Any, graphs: int) -> None:
    torch.compiler.reset()
    optimizer = make(with_grads([bf16(4)]))
    step = collage_fx.compile(optimizer)
    session = step._collage  # type: ignore[attr-defined]
    step()
    assert session.graphs == graphs
    assert ("first step was recorded" in str(collage_fx.report(step))) == (not graphs)
    assert {(s.graph, s.joined) for s in collage_fx.report(step).states} == {(graphs, 1 - graphs)}


def test_a_rate_that_changes_from_the_first_step_on_is_compiled_once() -> None:
    """As an input: the first step, which is recorded, has had another."""
    torch.compiler.reset()
    params = with_grads([bf16(6)])
    exact = [p.detach().double().requires_grad_() for p in params]
    for p, e in zip(params, exact, strict=True):
        e.grad = p.grad.double()
    ours, theirs = Averages(params), Averages(exact)
    step = collage_fx.compile(ours, storage="mcf2")  # fp32 does not hold steps of 1e-9
    session = step._collage  # type: ignore[attr-defined]
    session.keep = True
    start = exact[0].detach().clone()
    for rate in RATES:
        for optimizer in (ours, theirs):
            optimizer.param_groups[0]["lr"] = rate
        step()
        theirs.step()
    assert session.graphs == len(session.compiled) == 1
    end = exact[0].detach()
    assert float(((collage_fx.value(params[0]) - end) / (end - start)).detach().abs().max()) < 0.05
    assert {(s.graph, s.joined) for s in collage_fx.report(step).states} == {(3, 1)}


@pytest.mark.parametrize("without", [0, 2])
def test_backend_string_comes_back_after_a_step_without_gradients(without: int) -> None:
    """Dynamo leaves a function for good of which it has once traced nothing."""
    torch.compiler.reset()
    p = torch.ones(4, dtype=torch.bfloat16).requires_grad_()
    step = torch.compile(SGD([p], lr=1e-3, foreach=False).step, backend="collage")
    for t in range(6):
        p.grad = None if t == without else torch.ones(4, dtype=torch.bfloat16)
        step()
    assert float(1 - collage_fx.value(p)[0]) == pytest.approx(5e-3, rel=1e-2)
    assert not torch._dynamo.config.allow_empty_graphs


class Untraced(Optimizer):
    """Has Dynamo trace one of four operations."""

    def __init__(self, params: list[Tensor]) -> None:
        super().__init__(params, {"lr": 1e-3})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        (p,) = self.param_groups[0]["params"]
        p.mul_(0.999)
        self.rest(p)

    @torch.compiler.disable
    def rest(self, p: Tensor) -> None:
        p.sub_(p.grad.sign() * self.param_groups[0]["lr"])


def test_a_resumed_run_is_recorded_from_its_first_step_on() -> None:
    """Dynamo would trace it in vain, and on a GPU have it do other formulas."""
    (p,) = with_grads([bf16(4, 3)])
    optimizer = Untraced([p])
    step = collage_fx.compile(optimizer)
    before = counters["frames"]["total"]
    for _ in range(4):
        step()
    assert counters["frames"]["total"] > before
    q = p.detach().clone().requires_grad_()
    q.grad = p.grad
    other = Untraced([q])
    resumed = collage_fx.compile(other)
    other.load_state_dict(optimizer.state_dict())
    before = counters["frames"]["total"]
    resumed()
    assert counters["frames"]["total"] == before
    step()
    assert torch.equal(collage_fx.value(p), collage_fx.value(q))


KEPT: dict[Any, Tensor] = {}
"""Tensors that are kept elsewhere, whose place a result may take."""


def replaced(p: Tensor, g: Tensor, state: Any) -> None:
    """An average that is a new tensor after each step, in one graph, and may be a kept one."""
    if not state:
        state["m"] = torch.full_like(p, 1.3125)
    state["m"] = 0.99 * state["m"] + 0.01 * g + 0 * KEPT[p.dtype]
    p.sub_(state["m"], alpha=1e-4)


@pytest.mark.parametrize("shape", [(4, 3), ()], ids=["matrices", "numbers"])
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.quick("True-matrices", "False-numbers")
def test_the_first_graph_of_states_that_are_replaced_drops_no_low_word(
    shape: tuple[int, ...], known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not known:
        monkeypatch.setattr(Backend, "is_whole", lambda *_: False)
        monkeypatch.setattr(Backend, "hands_on", lambda *_: False)
    torch.compiler.reset()
    averages = []
    for dtype in (torch.float64, torch.bfloat16):
        params = [torch.full(shape, 1.5, dtype=dtype).requires_grad_() for _ in range(2)]
        KEPT[dtype] = torch.zeros(shape, dtype=dtype)
        with without_compiler(), warnings.catch_warnings():
            warnings.simplefilter("error" if known else "ignore")
            warnings.filterwarnings("ignore", category=DeprecationWarning)
            _, step = train(replaced, dtype, params=params, storage="remainder16", level="light")
        optimizer = getattr(step, "__self__", None) or step._collage.optimizer()
        averages.append([collage_fx.value(optimizer.state[p]["m"]).double() for p in params])
    far = max((x - y).abs().max() for x, y in zip(*averages, strict=True))
    assert far < 1e-6 if known else far > 1e-4
    if known:
        assert "put a new tensor in the place of m" in str(collage_fx.report(step))


@pytest.mark.parametrize("where", ["state", "parameter"])
@pytest.mark.quick("state")
def test_a_graph_that_leaves_a_state_alone_says_nothing_of_its_residual(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second step, the first that is compiled, does not change what the first has begun."""

    def update(p: Tensor, g: Tensor, state: Any) -> None:
        if not state:
            state |= {"k": 0, "m": p.detach() * 0.7}
        state["k"] += 1
        if state["k"] == 2:
            state["m"].mul_(1.0)
            if where == "parameter":
                return p.copy_(p.clone())
        else:
            state["m"].add_(g, alpha=1e-3)
        return p.sub_(state["m"], alpha=1e-3)

    def far() -> float:
        torch.compiler.reset()
        found, _ = train(update, storage="remainder16", level="all")
        return (found - train(update, torch.float64)[0]).abs().max().item()

    with without_compiler():
        assert far() < 1e-6
        monkeypatch.setattr(residual_binding, "is_lasting", lambda r, _: not r.provisional)
        monkeypatch.setattr(side_inputs, "is_lasting", lambda r, _: not r.provisional)
        with warnings.catch_warnings():  # where the parameter stays too, the graph has nothing
            warnings.filterwarnings("ignore", ".*nothing needed compensation")
            assert far() > 1e-5
