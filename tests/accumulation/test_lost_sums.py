"""Nothing is lost, or counted twice, where others write gradients, threads add, or passes fail.

For accumulation.sums and runtime.residuals.residual.
"""

import sys
import threading
import warnings
from typing import Any

import pytest
import torch
from interpreter import without_compiler
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import collage_fx

BF16 = torch.bfloat16


def one(size: int = 1) -> tuple[nn.Module, Any]:
    """A model of one parameter, and what adds to its gradient."""
    model = nn.Linear(size, 1, bias=False, dtype=BF16)
    return model, lambda x: model(torch.full((1, size), x, dtype=BF16)).sum().backward()


def of(model: Any) -> float:
    return float(collage_fx.value(model.weight.grad).max())


@pytest.mark.filterwarnings("ignore:collage_fx. the residual of gradient")
@pytest.mark.parametrize("storage", ["remainder16", "mcf2"])
def test_clipped_before_the_first_compiled_step(storage: str) -> None:
    torch.compiler.reset()
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(64, 64).to(BF16))
    optimizer = SGD([p], lr=1.0)
    with without_compiler():
        collage_fx.compile_(optimizer, storage=storage)
        collage_fx.accumulate(optimizer)
        for _ in range(3):
            for _ in range(16):
                (p * torch.randn(64, 64).to(BF16)).sum().backward()
            torch.nn.utils.clip_grad_norm_([p], 1e-2)
            before = collage_fx.value(p).detach()
            optimizer.step()
            moved, wanted = collage_fx.value(p).detach() - before, -p.grad.double()  # type: ignore
            assert float((moved - wanted).norm() / wanted.norm()) < 0.02
            optimizer.zero_grad()


def test_zeroed_through_data() -> None:
    model, add = one()
    collage_fx.accumulate(model)
    for x in (256, 1):
        add(x)
    model.weight.grad.data.zero_()
    add(8)
    assert of(model) == 8


def test_chance_differs_by_window_and_parameter() -> None:
    models = [nn.Linear(64, 1, bias=False, dtype=BF16) for _ in range(2)]
    both = nn.ModuleList(models)
    collage_fx.accumulate(both, "sr")
    seen: list[Tensor] = []
    for _ in range(3):
        for model in models:
            for x in (256.0, 1.0):
                model(torch.full((1, 64), x, dtype=BF16)).sum().backward()
            assert model.weight.grad is not None
            seen.append(model.weight.grad.clone())
        both.zero_grad()
    assert len({tuple(s.flatten().tolist()) for s in seen}) == len(seen)
    assert {float(x) for s in seen for x in s.flatten()} == {256, 258}


def test_threads_lose_nothing() -> None:
    model, add = one(64)
    collage_fx.accumulate(model)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=lambda: [add(1) for _ in range(30)]) for _ in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    finally:
        sys.setswitchinterval(interval)
    assert of(model) == 120


def test_a_failed_pass_leaves_nothing_behind() -> None:
    model, add = one()
    collage_fx.accumulate(model)
    add(256)
    node = torch.autograd.graph.get_gradient_edge(model.weight).node

    def fail(gradients: Any) -> None:
        raise MemoryError

    handle = node.register_prehook(fail)
    with pytest.raises(MemoryError):
        add(1)
    handle.remove()
    model.zero_grad()
    with pytest.warns(collage_fx.CollageWarning, match="the sum is gone"):
        add(8)
    add(1)
    assert of(model) == 9


@pytest.mark.parametrize("storage", ["mcf2", "remainder16", "ulp8"])
def test_another_dtype_in_mid_run(storage: str) -> None:
    model, _ = one()
    collage_fx.accumulate(model, storage)
    model.float()
    for x in (2048.0, 1.0, 1.0):
        model(torch.tensor([x])).backward()
    assert of(model) == 2050


def test_parts_of_one_gradient() -> None:
    """Autograd hands parameters that are joined in the forward pass parts of one gradient."""
    params = nn.ParameterList([nn.Parameter(torch.zeros(2, 2, dtype=BF16)) for _ in range(2)])
    collage_fx.accumulate(params)
    for x in (256, 1, 1):
        joined = torch.cat(list(params))
        (joined * torch.full((4, 2), x, dtype=BF16)).sum().backward()
    for p in params:
        assert float(collage_fx.value(p.grad).max()) == 258  # type: ignore[arg-type]


def test_steps_of_two_optimizers_that_are_both_compiled() -> None:
    a, b = nn.Linear(3, 3).bfloat16(), nn.Linear(3, 1).bfloat16()
    optimizers = [SGD(m.parameters(), lr=0.1) for m in (a, b)]
    with without_compiler(), warnings.catch_warnings():
        warnings.simplefilter("error", collage_fx.CollageWarning)
        for m, optimizer in zip((a, b), optimizers, strict=True):
            collage_fx.compile_(optimizer)
            collage_fx.accumulate(m)
        for _ in range(3):
            for optimizer in optimizers:
                for _ in range(3):  # to both models, of which one steps
                    b(a(torch.randn(2, 3).bfloat16())).square().sum().backward()
                optimizer.step()
                for other in optimizers:
                    other.zero_grad()


class Decaying(Optimizer):
    """One that adds weight decay to the gradient itself."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.grad.add_(p, alpha=0.5)
            p.add_(p.grad, alpha=-0.25)


def test_a_step_that_writes_the_gradient() -> None:
    torch.compiler.reset()
    params = [nn.Parameter(torch.full((8,), 1.0, dtype=BF16)) for _ in range(2)]
    exact = [p.detach().double() for p in params]
    optimizer = Decaying(params)
    with without_compiler(), warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*torch.compile fails")
        collage_fx.compile_(optimizer)
        collage_fx.accumulate(optimizer)
        for _ in range(4):
            for x in (256.0, 1.0, 1.0):
                sum((p * x).sum() for p in params).backward()  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()
            exact = [e - 0.25 * (258 + 0.5 * e) for e in exact]
    for p, e in zip(params, exact, strict=True):
        assert float((collage_fx.value(p) - e).abs().max()) < 1e-3
