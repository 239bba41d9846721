"""PyTorch's own tests of each of its optimizers, on the compiled step in bf16.

For step.compiled_step.
"""

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from optim_cases import Case, bowl, cases, start
from saved import drop_saved_residuals
from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import collage_fx
from collage_fx.errors import CollageWarning

RICHEST = [
    c
    for c in cases()
    if c.options == len(c.info.optim_inputs_func(device="cpu")) - 1 and c.impl != "capturable"
]
"""The last input of each optimizer, which mostly combines options."""

each = pytest.mark.parametrize("case", RICHEST, ids=str)
quick = pytest.mark.quick("*-single-*", "*-only-*", "AdamW-*")


@pytest.fixture(autouse=True)
def _recorded() -> Iterator[None]:
    with torch.compiler.set_stance("force_eager"):
        yield


class Run:
    """An optimizer of a case, compiled, and its parameters."""

    def __init__(self, case: Case, values: list[Tensor]) -> None:
        self.case = case
        self.params = [v.detach().bfloat16().clone().requires_grad_() for v in values]
        self.optimizer = collage_fx.compile_(case.info.optim_cls(self.params, **case.kwargs))

    def gradients(self, k: int) -> None:
        generator = torch.Generator().manual_seed(k)
        for p in self.params:
            grad = torch.randn(p.shape, generator=generator).bfloat16()
            p.grad = grad.to_sparse() if self.case.name == "SparseAdam" else grad

    def steps(self, first: int, last: int) -> list[Tensor]:
        """Take steps first to last - 1; return all words of the parameters."""
        for k in range(first, last):
            self.gradients(k)
            given = [bowl(self.params, 1.0, torch.bfloat16, bool(self.case.kwargs.get("maximize")))]
            self.optimizer.step(*(given if self.case.info.step_requires_closure else []))
        return [w.detach().clone() for p in self.params for w in (p, *collage_fx.residuals(p))]


def bits(x: Tensor) -> Tensor:
    return x.detach().contiguous().reshape(-1).view(torch.uint8)


def equal(a: Any, b: Any) -> bool:
    """Return True if trees of tensors have the same bits."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, Tensor):  # residuals of remainder16 are saved as bits, some of which are NaN
        return a.dtype == b.dtype and torch.equal(bits(a), bits(b))
    return bool(a == b)


def resumed(run: Run, change: Callable[[Any], None] = lambda _: None) -> Run:
    """Return a run that goes on from a file."""
    file = io.BytesIO()
    torch.save(run.optimizer.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    assert equal(saved, run.optimizer.state_dict())
    change(saved)
    again = Run(run.case, run.params)
    again.optimizer.load_state_dict(saved)
    return again


@each
@quick
def test_state_dicts_are_deterministic(case: Case) -> None:
    run = Run(case, start(case, 1.0))
    run.steps(0, 3)
    again = resumed(run)
    assert equal(run.steps(3, 5), again.steps(3, 5))
    assert equal(run.optimizer.state_dict(), again.optimizer.state_dict())


def test_without_residuals_a_run_is_another() -> None:
    run = Run(Case("AdamW", 4, "single"), start(Case("AdamW", 4, "single"), 1.0))
    run.steps(0, 3)
    with pytest.warns(CollageWarning, match="holds no residuals"):
        again = resumed(run, drop_saved_residuals)
    assert not equal(run.steps(3, 5), again.steps(3, 5))


@each
@quick
def test_gradients_are_read_only(case: Case) -> None:
    if case.info.step_requires_closure:
        pytest.skip("its closure makes them")
    run = Run(case, start(case, 1.0))
    for k in range(2):
        run.gradients(k)
        before = [
            (p.grad, p.grad.clone(), p.grad._version) for p in run.params if p.grad is not None
        ]
        run.optimizer.step()
        for p, (grad, value, version) in zip(run.params, before, strict=True):
            assert p.grad is grad and grad._version == version
            assert torch.equal(grad.to_dense(), value.to_dense())


def test_a_gradient_that_is_written_is_noticed() -> None:
    class Writes(SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for p in self.param_groups[0]["params"]:
                p.grad.mul_(0.5)
            super().step()

    p = torch.ones(3, dtype=torch.bfloat16, requires_grad=True)
    p.grad = torch.ones_like(p)
    version = p.grad._version
    collage_fx.compile_(Writes([p])).step()
    assert torch.equal(p.grad, torch.full_like(p, 0.5)) and p.grad._version > version


@each
@quick
def test_nothing_moves_without_gradients(case: Case) -> None:
    run = Run(case, start(case, 1.0))
    given = [lambda: torch.tensor(1.0)] if case.info.step_requires_closure else []
    before = [p.detach().clone() for p in run.params]
    run.optimizer.step(*given)
    run.optimizer.step(*given)
    assert equal([p.detach() for p in run.params], before)


@each
@quick
def test_hooks_and_closures(case: Case) -> None:
    """Hooks are called once, in order, and the closure's loss is what the step returns."""
    run, log = Run(case, start(case, 1.0)), list[str]()
    handles = [
        run.optimizer.register_step_pre_hook(lambda *_: log.append("before")),
        run.optimizer.register_step_post_hook(lambda *_: log.append("after")),
        register_optimizer_step_pre_hook(lambda *_: log.append("before all")),
        register_optimizer_step_post_hook(lambda *_: log.append("after all")),
    ]
    run.gradients(0)
    try:
        loss = run.optimizer.step(lambda: torch.tensor(2.5))
    finally:
        for handle in handles:
            handle.remove()
    assert loss is not None and float(loss) == 2.5
    assert log == ["before all", "before", "after", "after all"]
    if not case.info.step_requires_closure:
        assert run.optimizer.step() is None and len(log) == 4


def by_pickle(optimizer: Optimizer) -> Optimizer:
    found: Optimizer = pickle.loads(pickle.dumps(optimizer))
    return found


@each
@pytest.mark.quick("deepcopy-AdamW-*", "by_pickle-AdamW-single-*", "*-SparseAdam-*", "*-LBFGS-*")
@pytest.mark.parametrize("copied", [copy.deepcopy, by_pickle])
def test_copies_go_on(case: Case, copied: Callable[[Optimizer], Optimizer]) -> None:
    if case.name == "LBFGS" and copied is by_pickle:
        pytest.skip("PyTorch's own is not whole after it")
    run = Run(case, start(case, 1.0))
    run.steps(0, 3)
    other = copy.copy(run)
    other.optimizer = collage_fx.compile_(copied(run.optimizer))
    other.params = [p for group in other.optimizer.param_groups for p in group["params"]]
    if case.name == "LBFGS":
        other.optimizer._params = other.params  # type: ignore[attr-defined]
    assert equal(run.steps(3, 5), other.steps(3, 5))
