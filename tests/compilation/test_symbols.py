"""A graph that is compiled again keeps its symbols: no number of one call stays in it.

For dynamo.symbols and dynamo.backend.
"""

from typing import Any

import pytest
import torch
from interpreter import without_compiler
from torch import Tensor, nn
from torch._dynamo.exc import TensorifyScalarRestartAnalysis
from torch.fx import GraphModule
from torch.optim import Optimizer

import collage_fx
from collage_fx.dynamo import backend
from collage_fx.dynamo.symbols import Symbols
from collage_fx.errors import CollageWarning
from collage_fx.hooks import traces
from collage_fx.runtime.torch_versions import installed


class HandWritten(Optimizer):
    """Adam with L2 decay, which counts its steps by a Python number."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                st = self.state[p]
                if not st:
                    st.update(k=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
                st["k"] += 1
                g = p.grad.add(p, alpha=1e-2)
                st["m"].mul_(0.9).add_(g, alpha=0.1)
                st["v"].mul_(0.999).addcmul_(g, g, value=1e-3)
                root = (st["v"] / (1 - 0.999 ** st["k"])).sqrt_().add_(1e-8)
                p.addcdiv_(st["m"] / (1 - 0.9 ** st["k"]), root, value=-group["lr"])


def moved(rates: list[float], dtype: torch.dtype, *, compiled: bool) -> float:
    """Return the distance that a parameter of ones goes."""
    p = nn.Parameter(torch.ones(4, dtype=dtype))
    optimizer = HandWritten([p])
    step = collage_fx.compile(optimizer) if compiled else optimizer.step
    for k, rate in enumerate(rates):
        optimizer.param_groups[0]["lr"] = rate
        p.grad = torch.full((4,), 0.5 + 0.125 * (k % 3), dtype=dtype)
        step()
    return 1 - float(collage_fx.value(p)[0])


def test_a_step_count_goes_on_counting() -> None:
    rates = [1e-3] * 12
    exact = moved(rates, torch.float64, compiled=False)
    found = moved(rates, torch.bfloat16, compiled=True)
    assert abs(found - exact) < 5e-3 * exact  # the bias correction of step 3: 0.15 of it


def test_a_correction_by_a_count_is_compiled_where_a_state_enters_it_too() -> None:
    """The value assumed for the count, to compare coefficients, may be a pole of 1/(1 - 0.9**k)."""

    def step(p: Tensor, g: Tensor, k: int) -> None:
        p.sub_((g + 0.1 * p) / (1 - 0.9**k), alpha=1e-3)

    p, g = torch.ones(4, dtype=torch.bfloat16), torch.ones(4, dtype=torch.bfloat16)
    compiled = collage_fx.compile(step)
    for k in range(1, 5):
        compiled(p, g, k)
    (state,) = collage_fx.report(compiled).states
    assert state.graph == 4 and state.joined == 0


class Attribute(Optimizer):
    """Counts its steps in an attribute, of which Dynamo loses what a step assigns."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        self.k = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.k += 1
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad, alpha=1e-3 * self.k)


class CutBefore(Attribute):
    """Dynamo has no graph of what assigns the attribute."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.k += 1
        torch._dynamo.graph_break()
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad, alpha=1e-3 * self.k)


@pytest.mark.skipif(installed() < (2, 13), reason="Dynamo fails itself, with an error")
@pytest.mark.parametrize("seen", [True, False])
def test_an_attribute_that_is_assigned_in_no_graph(
    seen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not seen:
        monkeypatch.setattr(traces, "_traced_for", lambda: None)
    torch.compiler.reset()
    p = nn.Parameter(torch.ones(4).bfloat16())
    optimizer = CutBefore([p])
    step = collage_fx.compile(optimizer)
    p.grad = torch.ones(4).bfloat16()
    with without_compiler():
        for _ in range(6):
            step()
    right = (collage_fx.value(p) - (1 - 21e-3)).abs().max() < 1e-4
    assert (optimizer.k == 6) == bool(right) == seen


@pytest.mark.filterwarnings("ignore:.*Attempted setattr")  # before 2.13
def test_an_attribute_that_a_step_counts_in() -> None:
    p = nn.Parameter(torch.ones(4).bfloat16())
    optimizer = Attribute([p])
    step = collage_fx.compile(optimizer)
    p.grad = torch.ones(4).bfloat16()
    for _ in range(6):
        step()
    assert optimizer.k == 6
    assert (collage_fx.value(p) - (1 - 21e-3)).abs().max() < 1e-4
    if installed() < (2, 13):
        return  # there Dynamo fails itself, with an error
    torch.compiler.reset()
    p = nn.Parameter(torch.ones(4).bfloat16())
    p.grad = torch.ones(4).bfloat16()
    with pytest.warns(CollageWarning, match=r"assigns self\.k.*collage_fx\.compile"):
        torch.compile(Attribute([p]).step, backend="collage", fullgraph=True)()


# Before 2.13 torch asks to trace again, and such a step is left to the engine.
@pytest.mark.filterwarnings("ignore:.*(TensorifyScalarRestart|makes a new graph at each call)")
def test_the_rate_of_a_second_optimizer_changes_in_its_second_step() -> None:
    changing = [1e-3 * (k + 1) for k in range(8)]
    for rates in ([1e-3] * 4, changing, changing):
        exact = moved(rates, torch.float64, compiled=False)
        assert abs(moved(rates, torch.bfloat16, compiled=True) - exact) < 1e-2 * exact


@pytest.mark.filterwarnings("ignore:collage_fx. nothing needed")
def test_a_function_takes_other_sizes_after_residuals_were_loaded() -> None:
    def step(p: Tensor, g: Tensor) -> None:
        p.mul_(0.5).add_(g, alpha=1e-3)

    compiled = collage_fx.compile(step)
    for k, n in enumerate((8, 16, 24, 40, 112, 40, 8)):
        p, low = torch.ones(n).bfloat16(), 1e-4 if k > 2 else 0.0
        if low:  # the graph was made for a state that needs no residual
            collage_fx.load_residuals(p, [torch.full((n,), low).bfloat16()])
        for _ in range(3):
            compiled(p, torch.ones(n).bfloat16())
        exact = (1 + low) / 8 + 1.75e-3
        assert (collage_fx.value(p) - exact).abs().max() < (1e-6 if low else 1e-3)


def test_what_is_assumed_of_symbols_is_looked_at_in_each_call() -> None:
    found: list[Symbols] = []

    def backend(gm: GraphModule, inputs: Any) -> Any:
        found.append(Symbols(gm))
        return gm

    function = torch.compile(lambda x: x * 2, backend=backend, dynamic=True)
    function(torch.ones(40))
    (symbols,) = found
    args = tuple(40 if isinstance(x, torch.SymInt) else torch.ones(40) for x in symbols.examples)
    others = tuple(
        112 if isinstance(x, torch.SymInt) else torch.ones(112) for x in symbols.examples
    )
    with symbols.compiling_again(args) as inputs:
        assert any(isinstance(x, torch.SymInt) for x in inputs)
    assert symbols.hold(args) and symbols.hold(others)
    with symbols.compiling_again(args) as inputs:
        (size,) = (x for x in inputs if isinstance(x, torch.SymInt))
        assert size % 8 == 0  # as a kernel might be specialized
    assert symbols.assumed
    assert symbols.hold(args) and symbols.hold(others)
    with symbols.compiling_again(args) as inputs:
        assert size < 64
    assert symbols.hold(args) and not symbols.hold(others)


@pytest.mark.parametrize("static", [True, False])
def test_a_graph_without_symbols_is_compiled_for_the_call(static: bool) -> None:
    found: list[Symbols] = []

    def backend(gm: GraphModule, inputs: Any) -> Any:
        found.append(Symbols(gm))
        return gm

    torch.compile(lambda x: x * 2, backend=backend, dynamic=not static)(torch.ones(3))
    args = (torch.ones(3),)
    with found[0].compiling_again(args) as inputs:
        assert (inputs is args) == static


def test_what_asks_dynamo_to_trace_again_too_late_is_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = backend.compile_graph

    def asks(session: Any, gm: Any, inputs: Any, args: Any = (), **options: Any) -> Any:
        if args:  # of a call, in which nobody traces
            raise TensorifyScalarRestartAnalysis
        return original(session, gm, inputs, args, **options)

    monkeypatch.setattr(backend, "compile_graph", asks)
    p = torch.ones(4).bfloat16().requires_grad_()
    optimizer = HandWritten([p])
    step = collage_fx.compile(optimizer)

    def steps(first: int, last: int) -> None:
        for k in range(first, last):
            p.grad = torch.ones_like(p)
            optimizer.param_groups[0]["lr"] = 1e-3 * (k + 1)
            step()

    steps(0, 4)
    m = optimizer.state[p]["m"]  # judged plain: its graph is compiled again if it has a residual
    collage_fx.load_residuals(m, [torch.zeros_like(m)])
    with pytest.warns(CollageWarning, match="TensorifyScalarRestartAnalysis.*by operation"):
        steps(4, 6)
    assert float(collage_fx.value(p).mean()) == pytest.approx(1 - 21e-3, rel=1e-4)


class SharedFactor(Optimizer):
    """Computes a factor for one parameter, and uses it for all that have taken as many steps."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-3})
        self.last = [0, 0.0]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            st = self.state[p]
            st.setdefault("k", 0)
            st["k"] += 1
            if st["k"] != self.last[0]:
                self.last[:] = [st["k"], 1.5e-3 / (1 - 0.9 ** st["k"])]
            p.sub_(p.grad, alpha=self.last[1])


@pytest.mark.slow
@pytest.mark.kernels
def test_one_symbol_may_take_the_place_of_another() -> None:
    """Inductor alone raises NameError: its code has the name of a symbol that no input has."""

    def run(dtype: torch.dtype, *, compiled: bool) -> Tensor:
        params = [nn.Parameter(torch.ones(n, dtype=dtype)) for n in (4, 6)]
        optimizer = SharedFactor(params)
        step = collage_fx.compile(optimizer, multi_tensor=False) if compiled else optimizer.step
        for i in range(5):
            for p in params:
                p.grad = torch.full_like(p, 0.25 + i / 8)
            step()
        return torch.cat([collage_fx.value(p) if compiled else p.detach() for p in params]).double()

    exact = run(torch.float64, compiled=False)
    moved = (exact - 1).norm()
    assert float((run(torch.bfloat16, compiled=True) - exact).norm() / moved) < 1e-2
    assert float((run(torch.bfloat16, compiled=False) - exact).norm() / moved) > 0.1
