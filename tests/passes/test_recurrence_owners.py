"""Tensors that must not be compensated: a model's statistics, caches; averages of weights are.

For passes.analysis.plan and optimizer.ownership.
"""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import collage_fx
from collage_fx.config import CollageConfig
from collage_fx.dynamo.backend import Backend
from collage_fx.errors import CollageWarning, OptionError
from collage_fx.passes.analysis.affine import Form
from collage_fx.passes.analysis.plan import leave_alone, verdict
from collage_fx.passes.analysis.recurrence import recurrence_of
from collage_fx.passes.ir.program import Carried, StatePlan
from collage_fx.runtime.storage.state_name import StateName

BF16 = torch.bfloat16


class Model(nn.Module):
    """A model whose forward carries four 16-bit buffers on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.register_buffer("cache", torch.zeros(8))
        self.register_buffer("history", torch.zeros(4, 8))
        self.to(BF16)

    def forward(self, x: Tensor) -> Tensor:
        self.cache.mul_(0.999).add_(x.detach()[0], alpha=0.001)
        self.history.copy_(self.history.roll(1, 0) + x.detach()[:4])
        return self.norm(self.linear(x)).float().square().mean()


def plan_of(session: Backend) -> dict[str, StatePlan]:
    return {s.name: s for c in session.compiled for s in c.program.plan}


def test_forward_of_a_model_in_training_is_left_alone_without_a_word() -> None:
    model, x = Model(), torch.randn(16, 8).to(BF16)
    session = Backend(CollageConfig(), keep=True)
    compiled = torch.compile(model, backend=session)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled(x).backward()
        with torch.no_grad():
            compiled(x)
    found = plan_of(session)
    for name in ("cache", "history", "norm.running_mean", "norm.running_var"):
        assert not found[name].compensated and not found[name].refused
        assert "not an optimizer's state; name it with states=" in found[name].reason
    assert collage_fx.residuals(model.cache) == ()


def test_a_buffer_that_the_user_names_is_compensated() -> None:
    session = Backend(CollageConfig(states=("*cache",)), keep=True, named=True)
    model = Model()
    with torch.no_grad():
        torch.compile(model, backend=session)(torch.randn(16, 8).to(BF16))
    assert [n for n, s in plan_of(session).items() if s.compensated] == ["cache"]
    assert collage_fx.residuals(model.cache)


@pytest.mark.slow
def test_average_of_weights() -> None:
    """600 steps towards weights that stand still; plain bf16 stops on the way."""

    def update(averages: list[Tensor], weights: list[Tensor]) -> None:
        for a, w in zip(averages, weights, strict=True):
            a.lerp_(w.detach(), 0.001)

    weights = [p.detach() for p in Model().parameters()]
    mine, plain = [torch.zeros_like(w) for w in weights], [torch.zeros_like(w) for w in weights]
    exact = [a.double() for a in mine]
    compiled = collage_fx.compile(update)
    for _ in range(600):
        compiled(mine, weights)
        update(plain, weights)
        update(exact, [w.double() for w in weights])
    for a, p, e in zip(mine, plain, exact, strict=True):
        if bool(e.any()):
            assert float((collage_fx.value(a) - e).norm() / e.norm()) < 1e-3
            assert float((p - e).norm() / e.norm()) > 0.3


class WithMemory(torch.optim.Optimizer):
    """An optimizer whose step also updates what belongs to nobody."""

    def __init__(self, params: list[Tensor], memory: Tensor) -> None:
        super().__init__(params, {"lr": 1e-3})
        self.memory = memory

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"])
                self.memory.mul_(0.999).add_(p.grad, alpha=0.001)


@pytest.mark.parametrize("states, both", [((), False), ("*.memory", True)])
def test_a_tensor_beside_an_optimizer(states: Any, both: bool) -> None:
    """With the backend string nobody says that self.memory belongs to the optimizer."""
    p = torch.ones(8, dtype=BF16, requires_grad=True)
    p.grad = torch.full_like(p, 0.5)
    optimizer = WithMemory([p], torch.zeros(8, dtype=BF16))
    session = Backend(CollageConfig(states=states), named=True)
    torch.compile(optimizer.step, backend=session)()
    assert bool(collage_fx.residuals(p))
    assert bool(collage_fx.residuals(optimizer.memory)) == both


def test_attributes_of_an_optimizer_given_as_an_object_are_its_own() -> None:
    p = torch.ones(8, dtype=BF16, requires_grad=True)
    p.grad = torch.full_like(p, 0.5)
    optimizer = WithMemory([p], torch.zeros(8, dtype=BF16))
    with pytest.warns(CollageWarning, match=r"memory belong to no .* no state_dict\(\) holds"):
        collage_fx.compile(optimizer)()
    assert collage_fx.residuals(p) and collage_fx.residuals(optimizer.memory)


def test_names_of_states_are_an_option() -> None:
    assert CollageConfig(states="a*").states == ("a*",)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="states"):
        CollageConfig(states=(1,))  # type: ignore[arg-type]


def test_verdicts_without_a_graph() -> None:
    """An engine without a compiler asks for them."""
    state = Carried(0, StateName("v[0]"), "tensor", False, torch.zeros(3, dtype=BF16))
    slow = recurrence_of(Form(1).times(0.999).plus(Form(0, "free")))
    assert slow.text == "x' = 0.999*x + B"
    assert verdict(state, slow, "auto", False).compensated
    assert not verdict(state, recurrence_of(Form(0.5, "free")), "auto", False).compensated
    other = Carried(1, StateName(None, "p"), "param", False, torch.zeros(3, dtype=BF16), owned=True)
    leave_alone([state, other], (), is_step=False)
    assert not verdict(state, slow, "auto", True).compensated and not other.left_alone
    state.left_alone = ""
    leave_alone([state, other], ("v[0]",), is_step=False)
    assert verdict(state, slow, "auto", True).compensated


class Twins(nn.Module):
    """Two buffers with one recurrence, so that they are members of one class."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("first", torch.zeros(8, dtype=BF16))
        self.register_buffer("second", torch.zeros(8, dtype=BF16))

    def forward(self, x: Tensor) -> None:
        self.first.mul_(0.999).add_(x, alpha=0.001)
        self.second.mul_(0.999).add_(x, alpha=0.001)


@pytest.mark.parametrize("name", ["first", "second"])
def test_members_of_one_class_may_differ(name: str) -> None:
    """The recurrences speak of the first member, whichever of them is compensated."""
    twins, x = Twins(), torch.ones(8, dtype=BF16)
    compiled = torch.compile(twins, backend=Backend(CollageConfig(states=(name,)), named=True))
    with torch.no_grad():
        for _ in range(100):
            compiled(x)
    exact = 1 - 0.999**100
    for buffer, key in ((twins.first, "first"), (twins.second, "second")):
        assert bool(collage_fx.residuals(buffer)) == (key == name)
    got = collage_fx.value(twins.get_buffer(name))
    assert torch.allclose(got, torch.full((8,), exact).double(), rtol=1e-3)


def test_recurrences_name_the_learning_rate() -> None:
    p = torch.ones(4, dtype=BF16, requires_grad=True)
    p.grad = torch.ones_like(p)
    (state,) = collage_fx.explain(torch.optim.SGD([p], torch.tensor(0.1), weight_decay=0.01)).plan
    assert state.recurrence == "x' = (1 - 0.01*lr)*x + B"
