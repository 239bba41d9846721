"""Numbers that a step reads back from tensors, and computes with.

For passes.frontend.read_numbers.
"""

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensors import error
from torch import Tensor, nn
from torch.optim import Optimizer

import collage_fx
from collage_fx.passes.frontend import read_numbers
from collage_fx.runtime.torch_versions import installed

LR = 1e-3
STEPS = 8
Update = Callable[[Tensor, Tensor, Any, float], Any]


class Each(Optimizer):
    """Does the same to each parameter, with a state."""

    def __init__(self, params: list[nn.Parameter], update: Update) -> None:
        super().__init__(params, {"lr": LR})
        self.update = update

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        result = None if closure is None else closure()
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(v=torch.zeros_like(p), n=torch.zeros(()), last=0.0)
                result = self.update(p, p.grad, state, group["lr"])
        return result


def clipped(p: Tensor, g: Tensor, state: Any, lr: float) -> None:
    denominator = max(1.0, g.norm().item() / 2)
    p.add_(g, alpha=-lr / denominator)


def counted(p: Tensor, g: Tensor, state: Any, lr: float) -> None:
    state["n"] += 1
    n = float(state["n"])
    weight = min(0.5, n**-0.8)
    state["v"].lerp_(g, weight)
    p.sub_(state["v"], alpha=lr / math.sqrt(1 - 0.9**n))


def scaled(p: Tensor, g: Tensor, state: Any, lr: float) -> None:
    scale = p.norm().item() / (1 + g.norm().item())
    state["v"].mul_(1 - scale / 50).add_(g)
    p.addcdiv_(state["v"], g.abs() + 1, value=-lr * scale)


def decayed(p: Tensor, g: Tensor, state: Any, lr: float) -> None:
    p.mul_(1 - lr * (g.abs().mean() / g.norm().item()))  # a factor near one, of two numbers


def branches(p: Tensor, g: Tensor, state: Any, lr: float) -> None:
    norm = g.norm().item()
    p.add_(g, alpha=-lr / 2 if norm > 2 else -lr)


def ends_graph(p: Tensor, g: Tensor, state: Any, lr: float) -> None:
    scale = 1 + g.norm().item()
    torch._dynamo.graph_break()
    p.add_(g, alpha=-lr / scale)


def keeps(p: Tensor, g: Tensor, state: Any, lr: float) -> None:
    state["last"] = 0.5 * state["last"] + g.norm().item()
    p.add_(g, alpha=-lr / (1 + state["last"]))


def returns(p: Tensor, g: Tensor, state: Any, lr: float) -> float:
    norm = g.norm().item()
    p.add_(g, alpha=-lr / (1 + norm))
    return norm


def fills(p: Tensor, g: Tensor, state: Any, lr: float) -> None:
    mean = g.mean().item()
    p.add_(g - torch.full_like(g, mean), alpha=-lr)


ARITHMETIC = [clipped, counted, scaled, decayed]
OTHER = [branches, ends_graph, keeps, returns, fills]


def run(update: Update, dtype: torch.dtype, **options: Any) -> tuple[Tensor, Any]:
    """Return the values of the parameters, and the step; collage_fx does it if it has options."""
    generator = torch.Generator().manual_seed(3)
    start = [torch.randn(n, 4, generator=generator).bfloat16() for n in (3, 5)]
    params = [nn.Parameter(p.to(dtype)) for p in start]
    optimizer = Each(params, update)
    step = collage_fx.compile(optimizer, **options) if options else optimizer.step
    for k in range(STEPS):
        if installed() >= (2, 13):  # 2.11 makes a constant of it: docs/limits.md
            optimizer.param_groups[0]["lr"] = LR / (1 + k)
        for p in params:
            p.grad = (torch.randn(p.shape, generator=generator) + 1).bfloat16().to(dtype)
        step()
    return torch.cat([collage_fx.value(p).flatten() for p in params]), step


def graphs(step: Any) -> set[int]:
    """Return in how many steps Dynamo graphs have written the parameters."""
    return {s.graph for s in collage_fx.report(step).states if s.name.startswith("param")}


@pytest.mark.parametrize("arithmetic", ["eft", "wide"])
@pytest.mark.parametrize("update", ARITHMETIC)
@pytest.mark.quick("clipped-eft")
def test_what_only_computes_with_them_is_one_graph(update: Update, arithmetic: str) -> None:
    exact, plain = run(update, torch.float64)[0], run(update, torch.bfloat16)[0]
    found, step = run(update, torch.bfloat16, arithmetic=arithmetic)
    with warnings.catch_warnings():
        # Read back, a count is a constant to Dynamo of torch 2.11.
        warnings.filterwarnings("ignore", "collage_fx: the step makes a new graph at each call")
        recorded, other = run(update, torch.bfloat16, arithmetic=arithmetic, without=("numbers",))
    assert graphs(step) == {STEPS - 1}
    assert graphs(other) != graphs(step) or update is counted  # in graphs that hand nothing on
    assert step._collage.graphs <= 3  # though the rate changes
    assert error(found, exact) < 2 * error(recorded, exact) + 1e-5 < error(plain, exact) / 8


@pytest.mark.slow
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("update", OTHER)
@pytest.mark.quick("branches")
def test_what_does_more_with_them_is_recorded_as_before(update: Update) -> None:
    found, step = run(update, torch.bfloat16, record="auto")
    recorded, other = run(update, torch.bfloat16, without=("numbers",))
    assert torch.equal(found, recorded)
    assert graphs(step) == graphs(other)


def test_a_closure_is_compiled_as_the_user_has_set_it() -> None:
    seen: list[tuple[bool, bool]] = []
    config = torch._dynamo.config

    def closure() -> None:
        seen.append((config.capture_scalar_outputs, config.suppress_errors))

    optimizer = Each([nn.Parameter(torch.ones(3).bfloat16())], clipped)
    optimizer.param_groups[0]["params"][0].grad = torch.ones(3).bfloat16()
    step = collage_fx.compile(optimizer, storage="mcf2")
    for _ in range(3):
        step(closure)
    assert seen == [(False, False)] * 3 and not config.capture_scalar_outputs


def traced(function: Callable[..., Tensor], *given: Tensor) -> list[Any]:
    graphs: list[Any] = []

    def kept(gm: Any, _: Any) -> Any:
        graphs.append(gm)
        return gm

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        torch.compile(function, backend=kept)(*given)
    return graphs


def chosen(x: Tensor, y: Tensor) -> Tensor:
    a, b = x.item(), y.item()
    return torch.ones(2).double() * max(1.0, a) + min(b, a) * max(b, 2.0) - min(a, 3.0) / -b


@pytest.mark.parametrize("first", [-2.5, 2.0, 7.0, math.nan])
@pytest.mark.parametrize("second", [4.0, 1.5])
@pytest.mark.quick("4.0--2.5", "4.0-nan", "1.5-2.0", "1.5-7.0")
def test_python_chooses_as_in_eager_code(first: float, second: float) -> None:
    """Of NaN and a number max() returns the one that comes first."""
    given = torch.tensor(first), torch.tensor(second)
    (graph,) = traced(chosen, *given)
    assert read_numbers.reads_numbers(graph)
    read_numbers.read_numbers(graph)
    assert not read_numbers.reads_numbers(graph)
    torch.testing.assert_close(graph(*given)[0], chosen(*given), rtol=0, atol=0, equal_nan=True)


def test_what_is_read_is_the_value_of_that_time() -> None:
    def twice(x: Tensor) -> Tensor:
        before = x.item()
        x += 1
        return torch.ones(1).double() * before * x.item()

    (graph,) = traced(twice, torch.tensor(3.0))
    read_numbers.read_numbers(graph)
    assert float(graph(torch.tensor(3.0))[0]) == 12
    (graph,) = traced(twice, torch.tensor(3.0).double())
    # The control: Dynamo has read this one before, and traces it anew without such numbers.
    with pytest.raises(read_numbers.CannotRead):
        read_numbers.read_numbers(graph)
