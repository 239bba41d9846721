"""Narrow graphs: their results, their costs, and their refusals.

For passes.dedup.deduplicate and passes.codegen.replicas.
"""

from typing import Any

import pytest
import torch
from narrow_steps import SHAPES, Written, momentum
from torch import Tensor

import collage_fx
from collage_fx.compilation import aot
from collage_fx.errors import CollageError, CollageWarning
from collage_fx.hooks import optimizer_hooks
from collage_fx.passes.dedup.deduplicate import Narrow, narrow


def test_another_shape_is_a_clear_error_and_nothing_is_written() -> None:
    torch.compiler.reset()
    params = [torch.ones(4, 3).bfloat16().requires_grad_() for _ in range(9)]
    optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    step = collage_fx.compile(optimizer, storage="mcf2")
    for _ in range(3):
        for p in params:
            p.grad = torch.ones_like(p)
        step()
    params[4].data = torch.ones(40, 30).bfloat16()
    params[4].grad = torch.ones_like(params[4])
    lows = [collage_fx.residuals(p)[0].clone() for p in params[:4]]
    before = [p.detach().clone() for p in params]
    with pytest.raises(CollageError, match="another shape"):
        step()
    assert all(map(torch.equal, params, before))
    assert all(
        torch.equal(collage_fx.residuals(p)[0], x) for p, x in zip(params[:4], lows, strict=True)
    )
    optimizer.state[params[4]].clear()
    with pytest.warns(CollageWarning, match="another shape"):
        step()
    assert float(params[4].detach()[0, 0]) < 1


def first_step(monkeypatch: pytest.MonkeyPatch, *, whole: bool) -> tuple[list[Tensor], bool]:
    """Take a step that makes the states in a graph, where nothing is recorded."""
    torch.compiler.reset()
    generator = torch.Generator().manual_seed(0)
    params = [torch.randn(s, generator=generator).bfloat16().requires_grad_() for s in SHAPES]
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).bfloat16()
    optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1)
    used: list[Any] = []
    with monkeypatch.context() as patch:
        patch.setattr(
            aot, "narrow", lambda *a, **k: None if whole else used.append(a) or narrow(*a, **k)
        )
        patch.setattr(optimizer_hooks, "can_substitute", lambda optimizer: False)
        options = {"multi_tensor": True}
        torch.compile(optimizer.step, backend="collage", options=options)()  # type: ignore[call-overload]
    buffers = [optimizer.state[p]["momentum_buffer"] for p in params]
    assert len({b.data_ptr() for b in buffers if b.numel()}) == sum(s.count(0) == 0 for s in SHAPES)
    return [x.detach().clone() for x in [*params, *buffers]], bool(used)


@pytest.mark.filterwarnings("ignore:.*runs without compensation")
def test_what_members_make_is_the_result_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, _ = first_step(monkeypatch, whole=True)
    found, used = first_step(monkeypatch, whole=False)
    assert used and all(map(torch.equal, found, expected))


def nodes_compiled(count: int, monkeypatch: pytest.MonkeyPatch, *, whole: bool) -> int:
    """Return how many operations reach the passes for so many members."""
    torch.compiler.reset()
    params = [torch.ones(3 + i).bfloat16().requires_grad_() for i in range(count)]
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer = Written(params, momentum)
    with monkeypatch.context() as patch:
        if whole:
            patch.setattr(aot, "narrow", lambda *_: None)
        step = collage_fx.compile(optimizer, storage="mcf2")
        step._collage.keep = True
        step()
    (one,) = step._collage.compiled
    assert len(one.program.plan) == 3 * count and len(one.program.residual_inputs) >= count
    return len(one.program.source.graph.nodes)


@pytest.mark.slow
def test_what_is_compiled_does_not_grow_with_the_members(monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = (nodes_compiled(n, monkeypatch, whole=False) for n in (9, 12))
    assert few == many
    # The negative control.
    few, many = (nodes_compiled(n, monkeypatch, whole=True) for n in (9, 12))
    assert many > 1.2 * few


def test_overlapping_members_stay_in_the_graph() -> None:
    torch.compiler.reset()
    flat = torch.ones(12, 4).bfloat16()
    params = [flat[i] for i in range(10)] + [torch.ones(4).bfloat16() for _ in range(10)]
    found: list[Narrow | None] = []

    def backend(gm: Any, inputs: Any) -> Any:
        found.append(narrow(gm, lambda node: "alike", lambda device: 2))
        return gm

    @torch.compile(backend=backend)
    def step(params: list[Tensor]) -> None:
        for p in params:
            p.mul_(0.999)

    step(params)
    assert found[0] is not None
    assert [len(group.inputs) for group in found[0].groups] == [10]
    assert len(found[0].inputs) == 11


def test_states_made_in_the_first_step_have_both_words() -> None:
    torch.compiler.reset()
    p = torch.ones(8).bfloat16().requires_grad_()
    p.grad = torch.linspace(0.1, 0.9, 8).bfloat16()
    optimizer = torch.optim.SGD([p], lr=1e-3, momentum=0.9, weight_decay=1e-3)
    step = collage_fx.compile(optimizer, level="all", storage="mcf2")
    exact = p.grad.double() + 1e-3 * p.detach().double()
    step()
    state = optimizer.state[p]["momentum_buffer"]
    (low,) = collage_fx.residuals(state)
    error = (state.double() + low.double() - exact).abs() / exact
    plain = (state.double() - exact).abs() / exact
    assert float(error.max()) < 2**-15 < float(plain.max())
    step()
    report = str(collage_fx.report(step))
    assert "1 graph, 1 joined" in report and "first step was recorded" in report
