"""`verify=n`: the first steps are held against the same steps in float64.

For step.first_steps and step.optimizer_clone.
"""

import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.optim import Optimizer

import collage_fx
from collage_fx.dynamo import backend
from collage_fx.errors import CollageWarning, OptionError


def params(count: int = 2, dtype: torch.dtype = torch.bfloat16) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    start = [torch.randn(7, generator=generator).bfloat16() for _ in range(count)]
    return [nn.Parameter(p.to(dtype)) for p in start]


def trained(
    make: Callable[..., Optimizer],
    steps: int = 4,
    *,
    count: int = 2,
    exact: bool = False,
    **kw: Any,
) -> tuple[list[Tensor], Any]:
    """Return the values of the parameters after some steps, and the step."""
    ps = params(count, torch.float64 if exact else torch.bfloat16)
    optimizer = make(ps)
    step: Any = optimizer.step if exact else collage_fx.compile(optimizer, **kw)
    generator = torch.Generator().manual_seed(2)
    for _ in range(steps):
        for p in ps:
            p.grad = torch.randn(7, generator=generator).bfloat16().to(p.dtype)
        step()
    return [collage_fx.value(p) for p in ps], step


class Counting(Optimizer):
    """Keeps a number, a list and a state that its first step makes."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-3, "count": 0})
        self.history: list[float] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["count"] += 1
            self.history.append(group["lr"])
            for p in group["params"]:
                state = self.state[p]
                if "mean" not in state:
                    state["mean"] = torch.zeros_like(p)
                state["mean"].lerp_(p.grad, 0.1)
                p.sub_(state["mean"], alpha=group["lr"])


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every graph take another weight of an average, as a defect of a compiler might."""

    def defect(gm: GraphModule) -> None:
        for node in gm.graph.nodes:
            if node.target == "lerp_":
                node.args = (*node.args[:2], 3 * node.args[2])
        gm.recompile()

    monkeypatch.setattr(backend, "one_denominator", defect)


def farthest(found: list[Tensor], exact: list[Tensor]) -> float:
    return max(float((f - e).abs().max()) for f, e in zip(found, exact, strict=True))


MADE: dict[str, Callable[..., Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-4, momentum=0.9),
    "Counting": Counting,
}


@pytest.mark.parametrize("options", [{}, {"storage": "remainder16"}], ids=["eft", "wide"])
@pytest.mark.parametrize("name", MADE)
@pytest.mark.quick("AdamW-wide")
def test_a_right_step_passes_and_is_not_changed(name: str, options: dict[str, str]) -> None:
    plain, _ = trained(MADE[name], **options)
    torch.compiler.reset()
    found, step = trained(MADE[name], **options, verify=3)
    assert all(map(torch.equal, found, plain))
    (note,) = (note for note in collage_fx.report(step).notes if note.startswith("verify"))
    assert re.fullmatch(
        r"verify: steps \d, \d, \d are as in float64; \S+( of \S+)? was most off, by \S+ of its "
        r"update, where \S+ is allowed",
        note,
    )


@pytest.mark.parametrize("count", [2, 9])
@pytest.mark.parametrize("name", ["AdamW", "fused", "Counting"])
@pytest.mark.quick("Counting-2")
def test_a_wrong_graph_is_named_and_its_step_undone(broken: None, name: str, count: int) -> None:
    exact, _ = trained(MADE[name], count=count, exact=True)
    with pytest.warns(CollageWarning, match=r"verify: in step \d of .*params\[0\].* float64"):
        found, step = trained(MADE[name], count=count, verify=3)
    optimizer = step.__self__
    way = farthest([p.detach().double() for p in params(count)], exact)
    assert farthest(found, exact) < 0.05 * way
    if name == "Counting":
        assert optimizer.param_groups[0]["count"] == 4 == len(optimizer.history)
    else:
        assert all(int(s["step"]) == 4 for s in optimizer.state.values())
    report = collage_fx.report(step)
    assert all(s.joined for s in report.states if s.name.startswith("param"))
    # The negative control: without the check the defect trains on in silence.
    torch.compiler.reset()
    wrong, _ = trained(MADE[name], count=count)
    assert farthest(wrong, exact) > 0.2 * way


class ByDtype(Counting):
    """Moves by the precision of its parameters, as Adafactor's eps does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            p.mul_(1 - 0.1 * torch.finfo(p.dtype).eps).sub_(
                p.grad.sign() * torch.finfo(p.dtype).eps
            )


class Sign(Counting):
    """Lion, where one sign more or less is a large part of an update."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if "m" not in state:
                state["m"] = torch.zeros_like(p)
            p.sub_((0.9 * state["m"] + 0.1 * p.grad).sign(), alpha=1e-3)
            state["m"].lerp_(p.grad, 0.01)


class PythonNoise(Counting):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            p.add_(p.grad, alpha=-1e-3 * random.random())


class Noisy(Counting):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            p.add_(torch.randn_like(p), alpha=1e-3)


class Wants16Bits(Counting):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            if p.dtype is not torch.bfloat16:
                raise TypeError("bf16 only")
            p.add_(p.grad, alpha=-1e-3)


@pytest.mark.slow
def test_a_step_that_is_not_stable_is_not_the_graphs_fault() -> None:
    _, step = trained(Sign, 40, verify=40)
    report = collage_fx.report(step)
    assert all(s.graph > 30 for s in report.states if s.name.startswith("param"))
    assert not any("compiled graph that updates" in note for note in report.notes)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
@pytest.mark.filterwarnings("ignore:collage_fx. torch.compile fails")
def test_chance_of_python_is_not_drawn_twice() -> None:
    random.seed(1)
    trained(PythonNoise)
    rest = random.random()
    random.seed(1)
    _, step = trained(PythonNoise, verify=2)
    assert random.random() == rest
    assert any("random" in note for note in collage_fx.report(step).notes)


class Releasing(Counting):
    """Lets go of gradients at the end of its step."""

    def step(self, closure: Any = None) -> None:
        super().step()
        for p in self.param_groups[0]["params"]:
            p.grad = None


class Around(Optimizer):
    """Wraps an optimizer and never was one by its constructor."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.inner.param_groups

    def step(self, closure: Any = None) -> None:
        self.inner.step()


def test_gradients_come_back_and_wrappers_are_checked(broken: None) -> None:
    exact, _ = trained(Releasing, exact=True)
    way = farthest([p.detach().double() for p in params()], exact)
    with pytest.warns(CollageWarning, match="verify: in step"):
        found, _ = trained(Releasing, verify=2)
    assert farthest(found, exact) < 0.05 * way
    exact, _ = trained(MADE["AdamW"], exact=True)
    torch.compiler.reset()
    with pytest.warns(CollageWarning, match="verify: in step"):
        found, _ = trained(lambda p: Around(MADE["AdamW"](p)), verify=2)
    assert farthest(found, exact) < 0.05 * farthest([p.detach().double() for p in params()], exact)


@pytest.mark.parametrize(
    ("kind", "note"),
    [(ByDtype, "depends on their dtype"), (Noisy, "random"), (Wants16Bits, "bf16 only")],
)
@pytest.mark.quick("Noisy-*", "Wants16Bits-*")
def test_what_cannot_be_checked_is_said_and_served_as_ever(kind: Any, note: str) -> None:
    torch.manual_seed(3)
    plain, _ = trained(kind)
    torch.compiler.reset()
    torch.manual_seed(3)
    found, step = trained(kind, verify=2)
    assert any(n.startswith("verify: ") and note in n for n in collage_fx.report(step).notes)
    if kind is not Noisy:  # compiled random numbers differ from run to run
        assert all(torch.allclose(f, e, rtol=2**-7) for f, e in zip(found, plain, strict=True))
    assert all(s.graph for s in collage_fx.report(step).states)


def test_closures_and_hooks_are_not_run_twice() -> None:
    (p,) = params(1)
    calls = []

    def closure() -> Tensor:
        calls.append(1)
        p.grad = torch.ones(7).bfloat16()
        return torch.zeros(())

    step = collage_fx.compile(torch.optim.SGD([p]), verify=1)
    step(closure)
    assert len(calls) == 1
    assert any("closure" in note for note in collage_fx.report(step).notes)
    optimizer = torch.optim.SGD([p])
    optimizer.register_step_post_hook(lambda *_: calls.append(2))
    step = collage_fx.compile(optimizer, verify=1)
    step()
    assert calls == [1, 2]
    assert any("hooks" in note for note in collage_fx.report(step).notes)


def test_bad_options_are_refused() -> None:
    for wrong in (-1, True, "first"):
        with pytest.raises(OptionError, match="verify"):
            collage_fx.compile(torch.optim.SGD(params(1)), verify=wrong)
    with pytest.raises(OptionError, match="optimizers"):
        collage_fx.compile(lambda p: p.add_(1), verify=1)
    function = torch.compile(lambda p: p.add_(1), backend="collage", options={"verify": 1})
    with pytest.raises(Exception, match="verify"):
        function(torch.ones(3).bfloat16())
    (p,) = params(1)
    p.grad, before = torch.ones_like(p), p.detach().clone()
    step = torch.compile(torch.optim.SGD([p]).step, backend="collage", options={"verify": 1})
    with pytest.raises(Exception, match="verify"):
        step()
    assert torch.equal(p, before)
