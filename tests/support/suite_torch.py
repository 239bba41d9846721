"""Tests as torch has them for its optimizers, written anew over the configurations of `optim_db`.

They know nothing of collage_fx: `make suites` runs them as they are, and with each step compiled.
"""

import copy
import io
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from optim_cases import Case, cases
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ConstantLR, ExponentialLR, ReduceLROnPlateau
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

CASES = [c for c in cases() if c.impl != "capturable"]
"""All that runs on a CPU as it is."""
FIRST = [c for c in CASES if c.options == 0]
PAIRS = [c for c in CASES if c.impl in ("foreach", "fused")]
DTYPES = (torch.float32, torch.bfloat16)
COMPLEX = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "RMSprop", "Rprop", "SGD")
AS_PAIRS = [c for c in CASES if c.name in COMPLEX and c.impl != "fused"]

every = pytest.mark.parametrize("case", CASES, ids=str)
first = pytest.mark.parametrize("case", FIRST, ids=str)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


class Problem:
    """A weight and a bias, whose result for one input is to become zero."""

    def __init__(self, case: Case, dtype: torch.dtype = torch.float32, **given: Any) -> None:
        self.case, self.down = case, case.kwargs.get("maximize", False)
        generator = torch.Generator().manual_seed(3)
        shapes = [(6, 5), (6, 5)] if case.name == "Muon" else [(6, 5), (6,)]
        self.params = [torch.randn(s, generator=generator).to(dtype) for s in shapes]
        self.input = torch.randn(5, generator=generator).to(dtype)
        for p in self.params:
            p.requires_grad_()
        self.optimizer = self.made(**given)

    def made(self, **given: Any) -> Optimizer:
        return self.case.info.optim_cls(self.params, **{**self.case.kwargs, **given})

    def loss(self) -> Tensor:
        weight, bias = self.params
        out = weight @ self.input + (bias if bias.dim() == 1 else bias @ self.input)
        loss = out.float().square().sum()
        return -loss if self.down else loss

    def away(self) -> float:
        return abs(float(self.loss().detach()))

    def closure(self) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.loss()
        loss.backward()
        if self.case.name == "SparseAdam":
            for p in self.params:
                p.grad = p.grad.to_sparse()
        return loss

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            if self.case.info.step_requires_closure:
                self.optimizer.step(self.closure)
            else:
                self.closure()
                self.optimizer.step()

    def values(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.params]


def same(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def saved(optimizer: Optimizer) -> Any:
    """Return a state_dict as it comes back from a file."""
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@every
@dtypes
def test_goes_the_right_way(case: Case, dtype: torch.dtype) -> None:
    problem = Problem(case, dtype)
    begin = problem.away()
    problem.step(20)
    assert math.isfinite(problem.away()) and problem.away() < begin


@every
def test_closure_and_no_closure_are_the_same(case: Case) -> None:
    problem, other = Problem(case), Problem(case)
    problem.step(3)
    for number in range(3):
        if number == 1 and not case.info.step_requires_closure:
            other.closure()
            assert other.optimizer.step() is None
        else:
            before = float(other.loss().detach())
            assert float(other.optimizer.step(other.closure)) == before
    same(problem.values(), other.values())


@pytest.mark.parametrize("case", PAIRS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_is_as_the_plain_loop(case: Case, dtype: torch.dtype) -> None:
    problem = Problem(case, dtype)
    single = Problem(Case(case.name, case.options, "single"), dtype)
    problem.step(6)
    single.step(6)
    torch.testing.assert_close(problem.values(), single.values())
    for p, q in zip(problem.params, single.params, strict=True):
        torch.testing.assert_close(problem.optimizer.state[p], single.optimizer.state[q])


@every
def test_without_gradients_nothing_changes(case: Case) -> None:
    if case.info.step_requires_closure:
        pytest.skip("its closure makes gradients")
    problem = Problem(case)
    before = problem.values()
    problem.optimizer.step()
    same(problem.values(), before)


@every
@dtypes
def test_gradients_are_not_written(case: Case, dtype: torch.dtype) -> None:
    if case.info.step_requires_closure:
        pytest.skip("its closure makes gradients")
    problem = Problem(case, dtype)
    for _ in range(4):
        problem.closure()
        before = [p.grad.to_dense().clone() for p in problem.params]
        versions = [p.grad._version for p in problem.params]
        problem.optimizer.step()
        same([p.grad.to_dense() for p in problem.params], before)
        assert [p.grad._version for p in problem.params] == versions


@every
@dtypes
def test_goes_on_from_a_state_dict(case: Case, dtype: torch.dtype) -> None:
    problem = Problem(case, dtype)
    problem.step(3)
    other = Problem(case, dtype)
    with torch.no_grad():
        for p, q in zip(other.params, problem.params, strict=True):
            p.copy_(q)
    given = saved(problem.optimizer) if case.options % 2 else problem.optimizer.state_dict()
    other.optimizer.load_state_dict(copy.deepcopy(given))
    problem.step(3)
    other.step(3)
    same(other.values(), problem.values())


@first
def test_copies_and_pickles(case: Case) -> None:
    problem = Problem(case)
    problem.step(2)
    copied = copy.deepcopy(problem.optimizer)
    for other in (copied, pickle.loads(pickle.dumps(problem.optimizer))):
        # The compiled step, which a copy has not.
        public = {n for n in vars(problem.optimizer) if not n.startswith("_") and n != "step"}
        assert public == {n for n in vars(other) if not n.startswith("_")}
        before = problem.values()
        for group in other.param_groups:
            for p in group["params"]:
                assert not any(p is q for q in problem.params)
                p.grad = torch.ones_like(p)
        if case.name in ("LBFGS", "SparseAdam"):  # copies of the first leave out its parameters
            continue
        other.step(*([lambda: torch.tensor(1.0)] if case.info.step_requires_closure else []))
        same(problem.values(), before)


@first
def test_hooks_are_called_in_order(case: Case) -> None:
    problem, called = Problem(case), []
    note: Callable[[str], Any] = lambda name: lambda *_: called.append(name)  # noqa: E731
    handles = [
        problem.optimizer.register_step_pre_hook(note("pre")),
        problem.optimizer.register_step_post_hook(note("post")),
        register_optimizer_step_pre_hook(note("all pre")),
        register_optimizer_step_post_hook(note("all post")),
        problem.optimizer.register_state_dict_pre_hook(note("saves")),
        problem.optimizer.register_load_state_dict_post_hook(note("loads")),
    ]
    try:
        problem.step(2)
        problem.optimizer.load_state_dict(problem.optimizer.state_dict())
    finally:
        for handle in handles:
            handle.remove()
    problem.step()
    step = ["all pre", "pre", "post", "all post"]
    assert called == [*step, *step, "saves", "loads"]


@first
@pytest.mark.parametrize("scheduler", [ConstantLR, ExponentialLR, ReduceLROnPlateau])
def test_schedulers(case: Case, scheduler: Any) -> None:
    problem = Problem(case)
    own = {"gamma": 0.5} if scheduler is ExponentialLR else {}
    schedule = scheduler(problem.optimizer, **own)
    begin = problem.away()
    for _ in range(6):
        problem.step()
        schedule.step(*([1.0] if scheduler is ReduceLROnPlateau else []))
    assert problem.away() < begin


@every
@dtypes
def test_a_rate_in_a_tensor_is_one_in_a_number(case: Case, dtype: torch.dtype) -> None:
    if not case.info.has_capturable_arg or ("lr" in case.kwargs and case.impl == "foreach"):
        pytest.skip("it takes none, or not by this implementation")
    lr = float(case.kwargs.get("lr", 0.01))
    number = Problem(case, dtype, lr=lr)
    try:
        tensor = Problem(case, dtype, lr=torch.tensor(lr, dtype=torch.float64))
    except ValueError as error:
        pytest.skip(str(error))
    number.step(4)
    tensor.step(4)
    torch.testing.assert_close(tensor.values(), number.values())


@first
def test_groups(case: Case) -> None:
    problem = Problem(case)
    if case.name == "LBFGS":
        pytest.skip("it takes one group")
    one, two = problem.params
    cls = case.info.optim_cls
    problem.optimizer = cls([{"params": [one], "lr": 0.0}], **case.kwargs)
    problem.optimizer.add_param_group({"params": [two]})
    before = one.detach().clone()
    problem.step(3)
    assert case.name in ("Rprop", "ASGD") or torch.equal(one, before)
    assert not torch.equal(two, Problem(case).params[1])
    with pytest.raises(ValueError, match="more than one parameter group"):
        problem.optimizer.add_param_group({"params": [one]})
    assert cls.__name__ in repr(problem.optimizer)


@pytest.mark.parametrize("case", AS_PAIRS, ids=str)
def test_complex_parameters_are_pairs_of_real_ones(case: Case) -> None:
    generator = torch.Generator().manual_seed(4)
    whole = torch.randn(3, 4, dtype=torch.complex64, generator=generator).requires_grad_()
    parts = torch.view_as_real(whole.detach()).clone().requires_grad_()
    optimizers = [case.info.optim_cls([p], **case.kwargs) for p in (whole, parts)]
    for _ in range(5):
        whole.grad = torch.randn(3, 4, dtype=torch.complex64, generator=generator)
        parts.grad = torch.view_as_real(whole.grad).clone()
        for optimizer in optimizers:
            optimizer.step()
        torch.testing.assert_close(torch.view_as_real(whole.detach()), parts.detach())
