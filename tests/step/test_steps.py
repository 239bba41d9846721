"""Steps of users: hooks, several optimizers, functions, graph breaks, numbers that change.

For step.compiled_step and optimizer.served.
"""

import math
from typing import Any

import pytest
import torch
from tensors import bf16, with_grads
from torch import Tensor, nn
from torch.optim import Optimizer

import collage_fx
from collage_fx.errors import CollageWarning, OptionError, SubjectError
from collage_fx.passes.codegen.multi_tensor_kernel import MULTI_TENSOR_KERNELS
from collage_fx.runtime.kernels.cpp_loop import Loop


def close(found: Tensor, exact: float, rtol: float = 1e-3) -> bool:
    return torch.allclose(found, torch.full_like(found, exact), rtol=rtol)


@pytest.mark.kernels  # interpreted in a backward pass, torch 2.11 crashes at the next gc.collect
def test_optimizers_stepped_in_backward_hooks() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3))).bfloat16()
    before = [p.detach().clone() for p in model.parameters()]
    optimizers = {p: torch.optim.SGD([p], lr=1e-4) for p in model.parameters()}
    steps = {p: collage_fx.compile(o) for p, o in optimizers.items()}
    sums = {p: torch.zeros(4, 4, dtype=torch.float64) for p in steps}

    def hook(p: Tensor) -> None:
        sums[p] += p.grad
        steps[p]()
        p.grad = None

    for p in steps:
        p.register_post_accumulate_grad_hook(hook)
    for _ in range(6):
        model(torch.randn(2, 4).bfloat16()).square().sum().backward()
    for p, old in zip(model.parameters(), before, strict=True):
        moved = old.double() - collage_fx.value(p)
        assert torch.allclose(moved, 1e-4 * sums[p], rtol=0.01, atol=1e-6)


def test_two_optimizers_over_one_parameter_share_its_residual() -> None:
    p = torch.ones(8).bfloat16().requires_grad_()
    first = collage_fx.compile(torch.optim.SGD([p], lr=1e-4))
    second = collage_fx.compile(torch.optim.SGD([p], lr=2e-4, momentum=0.5))
    momentum, exact = 0.0, 1.0
    for _ in range(12):
        p.grad = torch.ones_like(p)
        first()
        residual = collage_fx.residuals(p)[0]
        second()
        assert collage_fx.residuals(p)[0] is residual
        momentum = 0.5 * momentum + 1
        exact -= 1e-4 + 2e-4 * momentum
    assert close(1 - collage_fx.value(p), 1 - exact, rtol=0.01)


def functional(p: Tensor, g: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
    m = 0.999 * m + 0.001 * g
    return p - 1e-3 * m, m


def test_states_that_a_function_returns_are_named_or_refused() -> None:
    p, g, m = torch.ones(4).bfloat16(), torch.ones(4).bfloat16(), torch.zeros(4).bfloat16()
    with pytest.warns(CollageWarning, match="carries="):
        collage_fx.compile(functional)(p, g, m)
    with pytest.raises(OptionError, match="no argument 'momentum'"):
        collage_fx.compile(functional, carries=("p", "momentum"))
    step = collage_fx.compile(functional, carries=("p", "m"))
    exact, average = 1.0, 0.0
    for _ in range(30):
        p, m = step(p, g, m)
        average = 0.999 * average + 0.001
        exact -= 1e-3 * average
    assert close(collage_fx.value(m), average) and not close(m.double(), average, rtol=1e-4)
    assert close(1 - collage_fx.value(p), 1 - exact, rtol=0.05)


@pytest.mark.parametrize("options", [{}, {"record": True}])
def test_states_that_are_returned_belong_to_their_keys(options: dict[str, Any]) -> None:
    def update(state: dict[str, Tensor], g: Tensor) -> dict[str, Tensor]:
        m = 0.5 * state["m"] + g
        return {"m": m, "p": state["p"] - 1e-3 * m}

    state = {"p": torch.ones(4).bfloat16(), "m": torch.zeros(4).bfloat16()}
    step = collage_fx.compile(update, carries=("state",), **options)
    for _ in range(4):
        state = step(state, torch.ones(4).bfloat16())
    assert list(state) == ["p", "m"]
    assert close(collage_fx.value(state["p"]), 1 - 1e-3 * (1 + 1.5 + 1.75 + 1.875))


def test_results_of_another_structure_are_refused() -> None:
    step = collage_fx.compile(lambda state: {"q": state["p"]}, carries=("state",), record=True)
    with pytest.raises(SubjectError, match="do not have the structure"):
        step({"p": torch.ones(4).bfloat16()})


def test_a_function_that_steps_an_optimizer_may_return_what_its_model_makes(
    recwarn: pytest.WarningsRecorder,
) -> None:
    w = torch.ones(4, 4).bfloat16().requires_grad_()
    optimizer = torch.optim.SGD([w], 1e-4)

    def train(x: Tensor, *, steps: bool) -> Tensor:
        y = torch.tanh(x @ w)
        y.float().square().mean().backward()
        if steps:
            optimizer.step()
        return y.detach()

    x = torch.ones(4, 4).bfloat16()
    collage_fx.compile(train)(x, steps=True)
    assert not [one for one in recwarn if "returns new tensors" in str(one.message)]
    with pytest.warns(CollageWarning, match="returns new tensors"):
        collage_fx.compile(train)(x, steps=False)


class Scheduled(Optimizer):
    """Bias corrections from a Python step count, in the ways that people write them."""

    def __init__(self, params: list[Tensor], how: str) -> None:
        super().__init__(params, {"how": how, "beta": 0.99})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(step=0, m=torch.zeros_like(p))
                state["step"] += 1
                beta, n = group["beta"], state["step"]
                power = math.pow(beta, n) if group["how"] == "math.pow" else beta**n
                state["m"].mul_(beta).add_(p.grad, alpha=1 - beta)
                p.add_(state["m"], alpha=-1e-4 / (1 - power))


@pytest.mark.parametrize("how", ["**", "math.pow"])
@pytest.mark.quick("math.pow")
def test_a_python_step_count_makes_no_new_graph(how: str) -> None:
    p = torch.ones(6).bfloat16().requires_grad_()
    step = collage_fx.compile(Scheduled([p], how))
    for _ in range(12):
        p.grad = torch.ones_like(p)
        step()
    assert step._collage.graphs <= 3  # type: ignore[attr-defined]
    assert close(1 - collage_fx.value(p), 12 * 1e-4, rtol=0.01)
    assert math.pow(2, 3) == 8.0 and math.pow.__module__ == "math"


class Broken(Optimizer):
    """A step that Dynamo cuts in two."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        (p,) = self.param_groups[0]["params"]
        p.mul_(1 - 1e-5)
        torch._dynamo.graph_break()
        p.sub_(1e-4 * p.grad)


def test_a_state_split_over_two_graphs_keeps_its_residual() -> None:
    p = torch.ones(6).bfloat16().requires_grad_()
    step = collage_fx.compile(Broken([p], {}))
    exact = 1.0
    for _ in range(10):
        p.grad = torch.ones_like(p)
        step()
        exact = exact * (1 - 1e-5) - 1e-4
    assert close(1 - collage_fx.value(p), 1 - exact, rtol=0.01)


@pytest.mark.kernels
@pytest.mark.parametrize(
    "kind, options, arithmetic",
    [
        (torch.optim.AdamW, {}, "eft"),
        pytest.param(torch.optim.AdamW, {}, "wide", marks=pytest.mark.slow),
        (torch.optim.SGD, {"momentum": 0.9}, "eft"),  # makes its states in the first graph
    ],
)
@pytest.mark.quick("SGD-*")
def test_one_kernel_for_a_class_is_equal_to_one_for_each(
    kind: Any, options: dict[str, Any], arithmetic: Any
) -> None:
    shapes = [(8, 4), (7,), (0,), (130, 131)]  # the last is more than a thread takes at a time
    results = []
    for multi_tensor in (False, True):
        torch.manual_seed(3)
        params = with_grads([bf16(*s) for s in shapes])
        optimizer = kind(params, lr=1e-3, **options)
        step = collage_fx.compile(optimizer, arithmetic=arithmetic, multi_tensor=multi_tensor)
        session = step._collage  # type: ignore[attr-defined]
        session.keep = True
        for _ in range(4):
            step()
        classes = [r for c in session.compiled for r in c.program.rewritten]
        assert {r.apart == "" for r in classes} == {multi_tensor}
        values = [collage_fx.value(t) for p in params for t in (p, *optimizer.state[p].values())]
        results.append(torch.cat([v.flatten() for v in values]))
    kernels = [MULTI_TENSOR_KERNELS[r.multi_tensor] for r in classes]
    assert kernels and all(isinstance(k.runners["cpu"], Loop) for k in kernels)
    if arithmetic == "eft":
        assert torch.equal(*results)
    else:
        assert torch.allclose(*results, rtol=1e-5)


def test_channels_last_parameter_with_a_contiguous_gradient() -> None:
    p = torch.ones(2, 3, 4, 4).bfloat16().to(memory_format=torch.channels_last).requires_grad_()
    p.grad = torch.ones(2, 3, 4, 4).bfloat16()
    step = collage_fx.compile(torch.optim.SGD([p], lr=1e-4, momentum=0.9))
    for _ in range(4):
        step()
    assert close(1 - collage_fx.value(p), 1e-4 * (1 + 1.9 + 2.71 + 3.439), rtol=0.01)


class OldStyle(Optimizer):
    """As optimizers were written before torch.no_grad."""

    def __init__(self, params: list[Tensor]) -> None:
        super().__init__(params, {})

    def step(self) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.data.add_(p.grad.data, alpha=-1e-4)


def test_parameters_updated_through_data_under_grad_mode() -> None:
    p = torch.ones(4).bfloat16().requires_grad_()
    p.grad = torch.ones_like(p)
    step = collage_fx.compile(OldStyle([p]))
    for _ in range(10):
        step()
    assert close(1 - collage_fx.value(p), 1e-3, rtol=0.01)
    (state,) = collage_fx.report(step).states
    assert state.graph == 10 and not state.joined
    step = torch.compile(OldStyle([p]).step, backend="collage", fullgraph=True)
    for _ in range(10):
        step()
    assert close(1 - collage_fx.value(p), 2e-3, rtol=0.01)


@pytest.mark.slow
def test_explain_names_the_engine_that_serves_a_state() -> None:
    optimizer = torch.optim.Adafactor(with_grads([bf16(4, 4)]))
    assert set(collage_fx.explain(optimizer).engine.values()) == {"graph"}
    found = collage_fx.explain(optimizer, without=("numbers",))
    (param,) = [s for s in found.plan if s.name.startswith("param")]
    assert found.engine[param.name] == "joined" and param.compensated and param.residual_bytes == 32
    assert "joined" in str(found)
