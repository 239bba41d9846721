"""One member of each class goes through AOTAutograd; what it stands for is updated all the same."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

import collage_fx
from collage_fx import graph
from collage_fx.passes.narrow import Narrow, narrow

SHAPES = [(4, 3), (3, 5), (1, 6), (7,), (6, 1), (5,), (2, 2, 3), (1, 8), (4, 1), (3, 2, 2), (1,)]
SHAPES += [(1,), (0, 3), (0,), (), ()]


class Written(Optimizer):
    """An optimizer whose step is a function of the parameters, the gradients and the states."""

    def __init__(self, params: list[Tensor], update: Callable[..., Any]) -> None:
        super().__init__(params, {})
        self.update = update
        self.count = torch.tensor(1.0)
        for p in params:
            self.state[p] |= {"t": torch.tensor(1.0), "m": torch.zeros_like(p)}

    def step(self) -> None:  # type: ignore[override]
        params = [p for p in self.param_groups[0]["params"] if p.grad is not None]
        grads, states = [p.grad for p in params], [self.state[p] for p in params]
        self.update(self, params, grads, states)


def each(update: Callable[..., Any]) -> Callable[..., Any]:
    """Make a step of what is done to one parameter."""

    @torch.no_grad()
    def step(self: Any, params: Any, grads: Any, states: Any) -> None:
        for p, g, s in zip(params, grads, states, strict=True):
            update(self, p, g, s)

    step.__name__ = update.__name__
    return step


@each
def momentum(self: Any, p: Tensor, g: Tensor, s: Any) -> None:
    s["t"] += 1
    s["m"].mul_(0.9).add_(g)
    p.addcdiv_(s["m"], 1 + g.square().mul_(2), value=-0.01).mul_(1 - 0.1 / s["t"])


@torch.no_grad()
def clipped(self: Any, params: Any, grads: Any, states: Any) -> None:
    """A norm of all gradients in each update."""
    norm = torch.stack([g.float().norm() for g in grads]).norm()
    for p, g, s in zip(params, grads, states, strict=True):
        s["m"].add_(g * (1 / (norm + 1)))
        p.sub_(s["m"], alpha=0.01)


@torch.no_grad()
def counted(self: Any, params: Any, grads: Any, states: Any) -> None:
    """One count for all, written in the step; outside of no_grad a part of it."""
    self.count += 1
    with torch.enable_grad():
        factor = 1 / self.count
    for p, g, s in zip(params, grads, states, strict=True):
        s["m"].mul_(0.9).add_(g * factor)
        p.sub_(s["m"] * 0.01)


@torch.no_grad()
def lists(self: Any, params: Any, grads: Any, states: Any) -> None:
    ms = [s["m"] for s in states]
    torch._foreach_mul_(ms, 0.9)
    torch._foreach_add_(ms, grads)
    ts = [s["t"] for s in states]
    torch._foreach_add_(ts, 1)
    steps = torch._foreach_mul(ms, [-1e-3 * (i % 2 + 1) for i in range(len(ms))])
    torch._foreach_div_(steps, ts)
    torch._foreach_add_(params, steps)


@each
def norm_of_its_own(self: Any, p: Tensor, g: Tensor, s: Any) -> None:
    s["m"].mul_(0.9).add_(g)
    p.sub_(s["m"] * (0.01 / (1 + s["m"].float().norm())))


@torch.no_grad()
def norms(self: Any, params: Any, grads: Any, states: Any) -> None:
    """A norm of all gradients, and that of the member's own, in one number."""
    norm = torch.stack([g.float().norm() for g in grads]).norm()
    for p, g in zip(params, grads, strict=True):
        p.sub_(g * (0.01 * g.float().norm() / norm))


@each
def sums(self: Any, p: Tensor, g: Tensor, s: Any) -> None:
    """Nothing is summed in a parameter of size 1."""
    p.sub_(0.01 * g.sum(0, keepdim=True) if g.dim() else g * 0.01)


@each
def sizes(self: Any, p: Tensor, g: Tensor, s: Any) -> None:
    p.sub_(g * (0.1 / (p.numel() + 1)))


@each
def noise(self: Any, p: Tensor, g: Tensor, s: Any) -> None:
    p.sub_(0.01 * torch.rand((), dtype=torch.float32) * g)


ALIKE = [momentum, clipped, counted, lists]
UNLIKE = [norm_of_its_own, norms, sums, sizes, noise]


def states_after(
    update: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, *, whole: bool
) -> Any:
    """Return all that three steps leave, and the narrow graphs that were compiled."""
    made: list[Narrow] = []

    def spy(*args: Any) -> Narrow | None:
        return None if whole else narrow(*args)

    def run(self: Any, *args: Any) -> Any:
        code = original(self, *args)
        made.extend([self.narrow] if self.narrow is not None else [])
        return code

    original = graph._Compilation.run
    torch.compiler.reset()
    generator = torch.Generator().manual_seed(0)
    params = [torch.randn(s, generator=generator).bfloat16().requires_grad_() for s in SHAPES * 2]
    with monkeypatch.context() as patch:
        patch.setattr(graph, "narrow", spy)
        patch.setattr(graph._Compilation, "run", run)
        optimizer = Written(params, update)
        step = collage_fx.compile(optimizer, level="all", multi_tensor=True)
        torch.manual_seed(1)
        for i in range(3):
            for p in params:
                p.grad = torch.randn(p.shape, generator=generator).bfloat16()
            if i == 2:
                params[1].grad = params[-3].grad = None
            step()
    left: list[Tensor] = []
    for p in params:
        for x in (p, *optimizer.state[p].values()):
            left += [x, *(collage_fx.residuals(x) if x.dtype == torch.bfloat16 else ())]
    versions = [x._version for p in params for x in (p, *optimizer.state[p].values())]
    return [x.detach().clone() for x in left], versions, made


@pytest.mark.parametrize("update", [*ALIKE, *UNLIKE])
def test_equal_to_the_whole_graph(
    update: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, versions included; and members leave the graph only where they are alike."""
    expected, counts, _ = states_after(update, monkeypatch, whole=True)
    found, versions, made = states_after(update, monkeypatch, whole=False)
    assert all(map(torch.equal, found, expected))
    assert versions == counts
    assert bool(made) == (update in (*ALIKE, sizes))
    left_out = sum(len(group.inputs) - 1 for one in made[:1] for group in one.groups)
    assert left_out >= 14 or not made


def first_step(monkeypatch: pytest.MonkeyPatch, *, whole: bool) -> tuple[list[Tensor], bool]:
    """Take a step that makes the states in a graph, where no eager engine is."""
    torch.compiler.reset()
    generator = torch.Generator().manual_seed(0)
    params = [torch.randn(s, generator=generator).bfloat16().requires_grad_() for s in SHAPES]
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).bfloat16()
    optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1)
    used: list[Any] = []
    with monkeypatch.context() as patch:
        patch.setattr(graph, "narrow", lambda *a: None if whole else used.append(a) or narrow(*a))
        options = {"multi_tensor": True}
        torch.compile(optimizer.step, backend="collage", options=options)()  # type: ignore[call-overload]
    buffers = [optimizer.state[p]["momentum_buffer"] for p in params]
    assert len({b.data_ptr() for b in buffers if b.numel()}) == sum(s.count(0) == 0 for s in SHAPES)
    return [x.detach().clone() for x in [*params, *buffers]], bool(used)


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
            patch.setattr(graph, "narrow", lambda *_: None)
        step = collage_fx.compile(optimizer)
        step._collage.keep = True
        step()
    (one,) = step._collage.compiled
    assert len(one.program.plan) == 3 * count and len(one.program.residual_inputs) >= count
    return len(one.program.source.graph.nodes)


def test_what_is_compiled_does_not_grow_with_the_members(monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = (nodes_compiled(n, monkeypatch, whole=False) for n in (9, 18))
    assert few == many
    # The negative control.
    few, many = (nodes_compiled(n, monkeypatch, whole=True) for n in (9, 18))
    assert many > 1.8 * few


def test_overlapping_members_stay_in_the_graph() -> None:
    torch.compiler.reset()
    flat = torch.ones(12, 4).bfloat16()
    params = [flat[i] for i in range(10)] + [torch.ones(4).bfloat16() for _ in range(10)]
    found: list[Narrow | None] = []

    def backend(gm: Any, inputs: Any) -> Any:
        found.append(narrow(gm, lambda node: "alike", 2))
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
    step = collage_fx.compile(optimizer, level="all")
    exact = p.grad.double() + 1e-3 * p.detach().double()
    step()
    state = optimizer.state[p]["momentum_buffer"]
    (low,) = collage_fx.residuals(state)
    error = (state.double() + low.double() - exact).abs() / exact
    plain = (state.double() - exact).abs() / exact
    assert float(error.max()) < 2**-15 < float(plain.max())
    step()
    report = str(collage_fx.report(step))
    assert "1 graph, 1 eager" in report and "first step ran in the eager engine" in report
