"""Compiled steps read sums of gradients with their residuals; plain ones say that they do not.

For accumulation.sums, passes.frontend.whole_reads and segments.memory.
"""

import warnings
from typing import Any

import pytest
import torch
from interpreter import without_compiler
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

import collage_fx

LR = 1e-2


class Loop(Optimizer):
    """An optimizer of a user's own, with momentum."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state["m"] = torch.zeros_like(p)
            state["m"].mul_(0.9).add_(p.grad)
            p.add_(state["m"], alpha=-LR)


class Looked(Optimizer):
    """One that looks at a number of each gradient: Dynamo traces parts of its step."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            if float(p.grad.abs().max()) >= 0:
                p.add_(p.grad, alpha=-LR)


def adamw(params: Any) -> Optimizer:
    return AdamW(params, lr=LR, weight_decay=0.0)


def sgd(params: Any) -> Optimizer:
    return SGD(params, lr=LR)


OPTIMIZERS = {"adamw": adamw, "sgd": sgd, "loop": Loop, "looked": Looked}


def trained(
    make: Any, count: int = 2, *, sums: bool = True, storage: str = "mcf2", **options: Any
) -> float:
    """Return the error after five steps of 24 batches each, over the way, beside float64.

    Args:
        make: makes the optimizer.
        count: of layers.
        sums: whether gradients are summed with residuals.
        storage: of these.
        options: of the compiled step; `clip_grad_norm` is done in float64 too.
    """
    torch.manual_seed(0)
    torch.compiler.reset()
    layers = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(count)]
    model = nn.Sequential(*layers).bfloat16()
    params, optimizer = list(model.parameters()), make(model.parameters())
    start = [p.detach().double() for p in params]
    exact = [p.clone().requires_grad_() for p in start]
    beside = make(exact)
    collage_fx.compile_(optimizer, level="all", **options)
    if sums:
        collage_fx.accumulate(model, storage)
    for _ in range(5):
        totals = [torch.zeros_like(e) for e in exact]
        for _ in range(24):
            loss = model(torch.randn(8, 16).bfloat16()).square().mean()
            own = torch.autograd.grad(loss, params, retain_graph=True)
            torch._foreach_add_(totals, [g.double() for g in own])
            loss.backward()
        for e, total in zip(exact, totals, strict=True):
            e.grad = total
        if norm := options.get("clip_grad_norm"):
            torch.nn.utils.clip_grad_norm_(exact, norm)
        optimizer.step()
        beside.step()
        if not options.get("zero_grads"):
            optimizer.zero_grad()
    way = max(float((e - s).detach().abs().max()) for e, s in zip(exact, start, strict=True))
    pairs = zip(params, exact, strict=True)
    return max(float((collage_fx.value(p) - e.detach()).abs().max()) for p, e in pairs) / way


@pytest.mark.parametrize("count", [1, 6])
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.quick("adamw-6", "looked-1")
def test_whole_sums_are_read(kind: str, count: int) -> None:
    with without_compiler():
        found = trained(OPTIMIZERS[kind], count)
        control = trained(OPTIMIZERS[kind], count, sums=False)
    assert found < 5e-5 < 1e-3 < control


@pytest.mark.parametrize("storage", ["ulp8", "ulp4", "remainder16", "mcf3"])
@pytest.mark.quick("ulp4")
def test_storages_of_sums(storage: str) -> None:
    with without_compiler():
        assert trained(sgd, storage=storage) < {"ulp8": 1e-4, "ulp4": 1e-3}.get(storage, 5e-5)


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
@pytest.mark.parametrize(
    "options",
    [
        {"zero_grads": True},
        {"clip_grad_norm": 0.05},
        {"clip_grad_norm": 0.05, "zero_grads": True},
        {"arithmetic": "eft", "storage": "mcf2"},
        {"zero_grads": True, "storage": "mcf2"},
        {"record": False},
        {"record": True},
    ],
    ids=lambda o: " ".join(o),
)
@pytest.mark.quick("clip_grad_norm zero_grads-sgd", "arithmetic storage-sgd")
def test_options_of_steps(options: dict[str, Any], kind: str) -> None:
    with without_compiler():
        found = trained(OPTIMIZERS[kind], 6, **options)
        control = trained(OPTIMIZERS[kind], 6, sums=False, **options)
    # The path of a clipped step is short, beside which a rounding of the parameters counts more.
    bound = 2e-4 if "clip_grad_norm" in options or "arithmetic" in options else 5e-5
    assert found < bound < 5 * bound < control


@pytest.mark.kernels
def test_by_compiled_kernels() -> None:
    assert trained(adamw, 6, zero_grads=True) < 5e-5


def test_residuals_that_come_and_go() -> None:
    """Some steps have one batch, and no residual; two optimizers share what is compiled."""
    torch.compiler.reset()
    torch.manual_seed(0)
    with without_compiler():
        runs = []
        for _ in range(2):
            p = [nn.Parameter(torch.randn(5, 4).bfloat16()) for _ in range(10)]
            optimizer = sgd(p)
            collage_fx.compile_(optimizer)
            collage_fx.accumulate(optimizer)
            runs.append((p, optimizer, [t.detach().double() for t in p]))
        for batches in (1, 3, 1, 4, 2, 1):
            for params, optimizer, exact in runs:
                for _ in range(batches):
                    given = [torch.randn(5, 4).bfloat16() for _ in params]
                    sum((p * g).sum() for p, g in zip(params, given, strict=True)).backward()  # type: ignore
                    for e, g in zip(exact, given, strict=True):
                        e -= LR * g.double()
                optimizer.step()
                optimizer.zero_grad()
        for params, _, exact in runs:
            for p, e in zip(params, exact, strict=True):
                assert float((collage_fx.value(p) - e).abs().max()) < 1e-6


def test_a_plain_step_takes_the_high_word_and_says_so_once() -> None:
    model = nn.Linear(4, 2).bfloat16()
    optimizer = sgd(model.parameters())
    collage_fx.accumulate(model)

    def step() -> None:
        for _ in range(3):
            model(torch.randn(3, 4).bfloat16()).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with pytest.warns(
        collage_fx.CollageWarning, match="whatever has updated the parameter"
    ) as told:
        step()
        step()
    assert len([w for w in told if "updated" in str(w.message)]) == 1


def test_a_compiled_step_says_nothing() -> None:
    with without_compiler(), warnings.catch_warnings():
        warnings.simplefilter("error", collage_fx.CollageWarning)
        trained(adamw)
        trained(sgd, zero_grads=True)


def test_clipped_before_the_step_the_residual_is_dropped_with_one_warning() -> None:
    model = nn.Linear(4, 2).bfloat16()
    with without_compiler():
        optimizer = sgd(model.parameters())
        collage_fx.compile_(optimizer)
        collage_fx.accumulate(model)
        with pytest.warns(collage_fx.CollageWarning, match="gradient") as told:
            for _ in range(4):
                for _ in range(3):
                    model(torch.randn(3, 4).bfloat16()).square().sum().backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
    text = [str(w.message) for w in told if "was cleared" in str(w.message)]
    assert len(text) == 1 and "Clip or unscale gradients in the step" in text[0]
