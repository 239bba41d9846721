"""Subjects of `compile`, `explain` and `report`: methods, objects, wrapped optimizers; no models.

Averages of weights are held against float64, with the plain average beside them.

For step.subject.
"""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from saved import saved_residuals
from tensors import bf16, with_grads
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import collage_fx
from collage_fx.errors import CollageError, CollageWarning, OptionError, SubjectError


class Sgd:
    """An optimizer outside torch.optim, with a state of its own."""

    def __init__(self) -> None:
        self.momentum = torch.zeros(4).bfloat16()

    def __call__(self, p: Tensor, g: Tensor) -> None:
        self.momentum.mul_(0.999).add_(g)
        p.sub_(self.momentum, alpha=1e-3)

    def update(self, p: Tensor, g: Tensor) -> None:
        self(p, g)

    @staticmethod
    def apart(p: Tensor, g: Tensor, momentum: Tensor) -> None:
        momentum.mul_(0.999).add_(g)
        p.sub_(momentum, alpha=1e-3)


def of_an_object() -> Callable[..., Any]:
    return Sgd()


def of_a_method() -> Callable[..., Any]:
    return Sgd().update


def of_a_part() -> Callable[..., Any]:
    return functools.partial(Sgd.apart, momentum=torch.zeros(4).bfloat16())


def of_a_part_of_a_method() -> Callable[..., Any]:
    return functools.partial(functools.partial(Sgd().update))


def run(step: Any, p: Tensor, count: int = 20) -> Tensor:
    for _ in range(count):
        step(p, torch.full_like(p, 0.1))
    return 1 - collage_fx.value(p)


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("make", [of_an_object, of_a_method, of_a_part, of_a_part_of_a_method])
@pytest.mark.quick("of_an_object-*", "of_a_part_of_a_method-*")
def test_callables_with_states_of_their_own(make: Any, eager: bool) -> None:
    step = collage_fx.compile(make(), level="all")
    with torch.compiler.set_stance("force_eager" if eager else "default"):
        moved = run(step, torch.ones(4).bfloat16())
    p, momentum = torch.ones(4).double(), torch.zeros(4).double()
    exact = run(functools.partial(Sgd.apart, momentum=momentum), p)
    plain = run(make(), torch.ones(4).bfloat16())
    assert float((moved / exact - 1).abs().max()) < 0.01 < float((plain / exact - 1).abs().max())
    found = collage_fx.report(step)
    assert {s.name.removeprefix("self.") for s in found.states} == {"p", "momentum"}
    assert all(s.compensated for s in found.states) and "0x" not in str(found)


def test_explaining_a_method_leaves_its_object_alone() -> None:
    sgd, p, g = Sgd(), torch.ones(4).bfloat16(), torch.ones(4).bfloat16()
    found = collage_fx.explain(sgd.update, p, g)
    assert {s.name for s in found.plan} == {"momentum", "p"}
    assert not bool(sgd.momentum.any()) and bool((p == 1).all())


def _ema(average: Tensor, new: Tensor, count: Tensor | int) -> Tensor:
    return 0.999 * average + 0.001 * new


def averaged(how: dict[str, Any], dtype: torch.dtype, compiled: bool) -> list[Tensor]:
    """60 averages of a model that has moved by a half."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).bfloat16().to(dtype)
    average = AveragedModel(model, **how)
    update: Any = average.update_parameters
    if compiled:
        update = collage_fx.compile(update)
    update(model)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.5)
    for _ in range(60):
        update(model)
    if compiled:
        states = collage_fx.report(update).states
        assert {s.name for s in states} == {n for n, _ in average.named_parameters()}
        assert all(s.compensated for s in states)
    return [collage_fx.value(p) for p in average.parameters()]


@pytest.mark.filterwarnings("ignore:.*(returns new tensors|in one compiled graph)")
@pytest.mark.parametrize(
    "how",
    [{}, {"avg_fn": _ema}, {"multi_avg_fn": get_ema_multi_avg_fn(0.999)}],
    ids=["equal", "each", "together"],
)
@pytest.mark.quick("each")
def test_an_averaged_model_keeps_what_plain_bf16_loses(how: dict[str, Any]) -> None:
    exact = averaged(how, torch.float64, False)
    ways = [averaged(how, torch.bfloat16, compiled) for compiled in (True, False)]
    errors = [
        max(float((a - b).abs().max()) for a, b in zip(way, exact, strict=True)) for way in ways
    ]
    assert errors[0] < 3e-3 and errors[1] > 2e-2


class Plain(nn.Module):
    def step(self) -> None: ...


MODEL = nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (MODEL, "a model, Linear.*pass the optimizer"),
        (torch.compile(MODEL), "a model, OptimizedModule.*pass the optimizer"),
        (Plain(), "a model, Plain"),
        (MODEL.forward, "a model, Linear"),
        (functools.partial(MODEL), "a model, Linear"),
        (torch.optim.AdamW, "AdamW is a class"),
        ([torch.optim.SGD([bf16(2)])], "got list; pass the optimizer"),
        (None, "got NoneType"),
    ],
    ids=str,
)
def test_what_is_no_step_is_refused(given: Any, why: str) -> None:
    for function in (collage_fx.compile, collage_fx.explain):
        for kind in (SubjectError, OptionError, TypeError):
            with pytest.raises(kind, match=why):
                function(given)


def test_the_step_of_an_optimizer_stands_for_the_optimizer() -> None:
    params = with_grads([bf16(4)])
    optimizer = torch.optim.SGD(params)
    step = collage_fx.compile(optimizer.step)
    step()
    assert collage_fx.report(step).states[0].name == "param_groups[0].params[0]"
    assert saved_residuals(optimizer.state_dict())
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.raises(SubjectError, match=r"a scheduler.*pass the optimizer"):
        collage_fx.compile(optimizer.step)


class Wrapper(torch.optim.Optimizer):
    """As accelerate's AcceleratedOptimizer is: never initialized, with the states of another."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    state = property(lambda self: self.optimizer.state)  # type: ignore[assignment]
    param_groups = property(lambda self: self.optimizer.param_groups)  # type: ignore[assignment]
    defaults = property(lambda self: self.optimizer.defaults)  # type: ignore[assignment]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step(closure)


class Outsider:
    """The same, not derived from a torch class."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups

    def step(self) -> None:
        self.optimizer.step()


@pytest.mark.parametrize("kind", [Wrapper, Outsider])
@pytest.mark.quick("Wrapper")
def test_wrapped_optimizers_are_reported_and_explained(kind: Any) -> None:
    params = with_grads([bf16(4)])
    optimizer = torch.optim.SGD(params)
    wrapper = kind(kind(optimizer))
    with pytest.raises(CollageError, match="not made by"):
        collage_fx.report(wrapper)
    assert collage_fx.explain(wrapper).plan[0].compensated
    optimizer.step = collage_fx.compile(optimizer, arithmetic="wide")  # type: ignore[method-assign]
    wrapper.step()
    (state,) = collage_fx.report(wrapper).states
    assert state.graph == 1 and state.compensated
    before = copy.deepcopy(params[0])
    assert collage_fx.explain(wrapper).config == collage_fx.CollageConfig(arithmetic="wide")
    assert torch.equal(before, params[0])
    if kind is Outsider:
        with pytest.raises(SubjectError, match=r"wrapper\.optimizer"):
            collage_fx.compile(wrapper)


class Bare(torch.optim.Optimizer):
    """As pytorch_optimizer's SafeFP16Optimizer is: no groups of its own, the weights in fp32."""

    def __init__(self, params: list[Tensor]) -> None:
        self.low = params
        self.high = [p.detach().float().requires_grad_() for p in params]
        self.optimizer = torch.optim.SGD(self.high, lr=1e-4)

    def step(self) -> None:  # type: ignore[override]
        for low, high in zip(self.low, self.high, strict=True):
            assert low.grad is not None
            high.grad = low.grad.float()
        self.optimizer.step()
        for low, high in zip(self.low, self.high, strict=True):
            low.data.copy_(high)


def test_an_optimizer_may_have_no_groups() -> None:
    params = with_grads([bf16(4)])
    before = params[0].detach().clone()
    optimizer = Bare(params)
    step = collage_fx.compile(optimizer)
    for _ in range(4):
        step()
    plain = before.float() - 4 * 1e-4 * params[0].grad.float()  # type: ignore[union-attr]
    assert torch.allclose(optimizer.high[0].detach(), plain, rtol=1e-6)


def test_a_closure_may_be_an_object() -> None:
    model = nn.Linear(4, 3).bfloat16()
    optimizer = torch.optim.SGD(model.parameters())
    calls = []

    class Closure:
        def __call__(self) -> Tensor:
            calls.append(torch.compiler.is_compiling())
            loss = model(torch.ones(2, 4).bfloat16()).square().mean()
            loss.backward()
            return loss.detach()

    step = collage_fx.compile(optimizer)
    assert float(step(Closure())) > 0 and calls == [False]
    assert collage_fx.residuals(model.weight)


def test_what_a_function_puts_into_its_arguments_is_there_afterwards() -> None:
    """Beside a function among them, which is taken as no part of the step; it has no low word."""

    def step(params: list[Tensor], states: dict[str, Any], loss: Callable[[], float]) -> None:
        states["k"] += 1
        states["loss"] = loss()
        states["q"] = 0.5 * states["q"] + 0.5
        params[0].sub_(states["q"], alpha=1e-3)

    p, states = torch.ones(4, dtype=torch.bfloat16), {"k": 0, "q": torch.zeros(4).bfloat16()}
    call = collage_fx.compile(step, record=True)
    call([p], states, lambda: 0.5)
    assert states["k"] == 1 and states["loss"] == 0.5
    with pytest.warns(CollageWarning, match=r"not compensated: states\.q: the function puts"):
        call([p], states, lambda: 0.5)
    assert torch.equal(states["q"], torch.full((4,), 0.75).bfloat16())
    assert float((collage_fx.value(p) - (1 - 1e-3 * 1.25)).abs().max()) < 1e-5
