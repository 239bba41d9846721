"""A function that the step compiles itself, and that Dynamo has compiled for others before.

For hooks.nested_compile.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import eval_frame
from torch._inductor.compile_fx import compile_fx
from torch.optim import Optimizer

import collage_fx

LR = 1e-3
STEPS = 5


class Momentum(Optimizer):
    """Moves parameters by what a function that is compiled returns, or writes."""

    def __init__(self, params: list[Tensor], direction: Callable[..., Tensor]) -> None:
        super().__init__(params, {"lr": LR})
        self.direction = direction

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        self._step()

    @torch.compiler.disable(recursive=False)
    def _step(self) -> None:
        for p in self.param_groups[0]["params"]:
            if not self.state[p]:
                self.state[p]["m"] = torch.zeros_like(p)
            p.data.sub_(self.direction(self.state[p]["m"], p.grad) * self.param_groups[0]["lr"])


def direction(m: Tensor, g: Tensor) -> Tensor:
    m.lerp_(g, 0.1)
    return m.clone()


def by_hand(gm: Any, inputs: Any) -> Any:
    return compile_fx(gm, inputs)


def train(function: Any, dtype: torch.dtype, stance: str = "", **options: Any) -> list[Tensor]:
    """Return where the parameters have moved; collage_fx does the steps if it has options."""
    generator = torch.Generator().manual_seed(3)
    start = [torch.rand(6, generator=generator).bfloat16().double() + 1 for _ in range(2)]
    params = [nn.Parameter(s.bfloat16().to(dtype)) for s in start]
    start = [p.detach().double().clone() for p in params]
    optimizer = Momentum(params, function)
    step = collage_fx.compile(optimizer, **options) if options else optimizer.step
    for i in range(STEPS):
        for p in params:
            p.grad = (torch.randn(p.shape, generator=generator) + 1).bfloat16().to(dtype)
        late = stance and i >= STEPS - 2
        with torch.compiler.set_stance(stance) if late else nullcontext():
            step()
    values = [collage_fx.value(p) if options else p.detach() for p in params]
    return [v.double() - s for v, s in zip(values, start, strict=True)]


def lost(moved: list[Tensor], exact: list[Tensor]) -> float:
    """Return the share of the way that is missing, in the 2-norm."""
    return float((torch.cat(moved) - torch.cat(exact)).norm() / torch.cat(exact).norm())


@pytest.mark.parametrize("backend", ["inductor", by_hand, "collage", "aot_eager", None])
@pytest.mark.filterwarnings("ignore:collage_fx. nothing needed compensation")  # of plain steps
@pytest.mark.quick("inductor")
def test_a_function_compiled_before_for_plain_steps_is_compiled_anew(backend: Any) -> None:
    """The old code would read memory that has no data yet: NaN."""
    torch.compiler.reset()
    compiled = torch.compile(direction, fullgraph=True, backend=backend) if backend else direction
    exact = train(compiled, torch.float64)
    plain = train(compiled, torch.bfloat16)
    assert lost(plain, exact) > 0.5
    assert lost(train(compiled, torch.bfloat16, storage="mcf3"), exact) < 5e-3
    again = train(compiled, torch.bfloat16)
    assert all(map(torch.equal, again, plain)), "steps outside of collage_fx are as they were"


@pytest.mark.slow
def test_each_optimizer_has_its_own_options() -> None:
    """Optimizers that share a compiled function."""
    torch.compiler.reset()
    compiled = torch.compile(direction, fullgraph=True)
    exact = train(direction, torch.float64)
    errors = [
        lost(train(compiled, torch.bfloat16, storage=s), exact) for s in ("ulp8", "mcf3", "ulp8")
    ]
    assert errors[0] == errors[2] > 1.2 * errors[1]


def test_eager_on_recompile_runs_what_was_compiled_for_the_step_only() -> None:
    torch.compiler.reset()
    compiled = torch.compile(direction, fullgraph=True)
    exact = train(direction, torch.float64)
    train(compiled, torch.bfloat16)
    options = {"storage": "mcf3", "stance": "eager_on_recompile"}
    assert lost(train(compiled, torch.bfloat16, **options), exact) < 5e-3


@pytest.mark.slow
def test_what_many_optimizers_compile_leaves_plain_steps_their_limit() -> None:
    """Dynamo counts what it compiles of a function; a fullgraph function raises at the eighth."""
    if not hasattr(torch._dynamo.eval_frame, "set_eval_frame_isolate_recompiles_id"):
        pytest.skip("this torch counts all of a function together")
    torch.compiler.reset()
    compiled = torch.compile(direction, fullgraph=True, dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=2):
        for _ in range(3):
            train(compiled, torch.bfloat16, storage="mcf3")
        train(compiled, torch.bfloat16)


@pytest.mark.parametrize("backend", ["inductor", by_hand, "collage", "eager"])
@pytest.mark.quick("collage")
def test_a_backend_that_is_forced_is_the_steps(backend: Any) -> None:
    torch.compiler.reset()
    exact = train(direction, torch.float64)
    with torch.compiler.set_stance(force_backend=backend):
        moved = train(torch.compile(direction), torch.bfloat16, storage="mcf3")
    assert lost(moved, exact) < 5e-3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:collage_fx. nothing needed compensation")
def test_a_function_that_dynamo_optimizes_is_compiled_anew() -> None:
    torch.compiler.reset()
    optimized = torch._dynamo.optimize("inductor")(direction)
    exact, plain = train(optimized, torch.float64), train(optimized, torch.bfloat16)
    moved = train(optimized, torch.bfloat16, storage="mcf3")
    assert lost(moved, exact) < 5e-3 < 0.5 < lost(plain, exact)


def test_the_hook_is_there_while_a_step_runs() -> None:
    """And not between steps, nor after one that raises, where Dynamo's own is again."""
    own = eval_frame._callback_from_stance
    seen: list[bool] = []

    @torch.compiler.disable
    def look(fails: bool) -> None:
        seen.append(eval_frame._callback_from_stance is not own)
        if fails:
            raise KeyError("in the step")

    def update(p: Tensor, g: Tensor, fails: bool) -> None:
        p.sub_(g, alpha=1e-3)
        look(fails)

    step = collage_fx.compile(update)
    p, g = torch.ones(2, 4).bfloat16()
    step(p, g, False)
    assert eval_frame._callback_from_stance is own
    with pytest.raises(KeyError):
        step(p, g, True)
    assert eval_frame._callback_from_stance is own and seen == [True, True]
