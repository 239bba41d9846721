"""States that are never compensated beside those that are: updated with them, and left as they are.

All in one kernel for a class of parameters, equal to a kernel for each, against a run in float64.

For passes.frontend.slice and passes.codegen.emit.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

import collage_fx

RATE = 1e-3
SHAPES = [(4, 3), (7,)] * 4
Update = Callable[[Tensor, Tensor, Any], None]


def lookahead(p: Tensor, g: Tensor, s: Any) -> None:
    """Weights that the parameter is drawn to, and they to it."""
    p.sub_(RATE * g)
    s["w"].lerp_(p.to(s["w"].dtype), 0.4)
    p.copy_(s["w"])


def decayed_master(p: Tensor, g: Tensor, s: Any) -> None:
    """Weights that the parameter takes over, and enters by their decay."""
    wide = s["w"].dtype
    s["w"].sub_(RATE * (g.to(wide) + 1e-2 * p.to(wide)))
    p.copy_(s["w"])


def decayed_by_a_rate(p: Tensor, g: Tensor, s: Any) -> None:
    """The same with a factor that no compiler knows."""
    wide = s["w"].dtype
    s["w"].mul_(1 - s["rate"] * 0.1).sub_(s["rate"] * (g.to(wide) + 1e-2 * p.to(wide)))
    p.copy_(s["w"])


def snapshot(p: Tensor, g: Tensor, s: Any) -> None:
    """The new parameter in fp32, too: of which recorded steps alone know both words."""
    new = p.to(s["w"].dtype) - RATE * g.to(s["w"].dtype)
    s["w"].copy_(new)
    p.copy_(new)


def masked(p: Tensor, g: Tensor, s: Any) -> None:
    """A mask and a small count, overwritten, and read in the step."""
    s["mask"].copy_(g > 0)
    s["small"].copy_(g.sign())
    p.sub_(RATE * g * s["mask"] + RATE * s["small"])


STEPS = [lookahead, decayed_master, decayed_by_a_rate, snapshot, masked]


class Beside(Optimizer):
    def __init__(self, params: list[Tensor], update: Update) -> None:
        super().__init__(params, {})
        self.update = update
        for p in params:
            wide = torch.promote_types(p.dtype, torch.float32)
            state: dict[str, Any] = {"w": p.detach().to(wide).clone(), "rate": torch.tensor(RATE)}
            state |= {"mask": torch.zeros_like(p, dtype=torch.bool)}
            self.state[p] |= state | {"small": torch.zeros_like(p, dtype=torch.int8)}

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            self.update(p, p.grad, self.state[p])


def run(update: Update, shapes: list[Any], exact: bool = False, **options: Any) -> Any:
    """Return all that 20 steps leave: states, values of the parameters; and the report."""
    torch.compiler.reset()
    generator = torch.Generator().manual_seed(0)
    params = [torch.randn(s, generator=generator).bfloat16() for s in shapes]
    params = [(p.double() if exact else p).requires_grad_() for p in params]
    optimizer = Beside(params, update)
    step = optimizer.step if not options else collage_fx.compile(optimizer, **options)
    for _ in range(20):
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator).bfloat16().to(p.dtype)
        step()
    values = [collage_fx.value(p).detach() for p in params]
    return values, [list(optimizer.state[p].values()) for p in params], step


def error(values: list[Tensor], exact: list[Tensor]) -> float:
    return max(float((v.double() - x).abs().max()) for v, x in zip(values, exact, strict=True))


@pytest.mark.parametrize("update", STEPS)
@pytest.mark.quick("lookahead")
def test_one_kernel_for_all_is_equal_to_one_for_each_and_loses_nothing(update: Update) -> None:
    exact, weights, _ = run(update, SHAPES, exact=True)
    values, states, step = run(update, SHAPES, multi_tensor=True)
    served = collage_fx.report(step).states
    assert update is snapshot or all(s.graph and not s.joined for s in served)
    each, theirs, _ = run(update, SHAPES, multi_tensor=False)
    assert all(map(torch.equal, values, each))
    assert all(
        torch.equal(a, b)
        for x, y in zip(states, theirs, strict=True)
        for a, b in zip(x, y, strict=True)
    )
    plain, _, _ = run(update, SHAPES)
    takes_over = update in (decayed_master, decayed_by_a_rate)
    assert takes_over or error(values, exact) < error(plain, exact) / 30
    if update is not masked:
        ours = [s[0] for s in states]
        assert error(ours, [w[0] for w in weights]) < (2e-6 if takes_over else 1e-4)


@pytest.mark.parametrize("update", [decayed_master, decayed_by_a_rate, snapshot])
@pytest.mark.quick("decayed_master")
def test_weights_in_fp32_are_not_rounded_to_the_words_of_the_parameter(update: Update) -> None:
    """0-d ones too, which are in no class."""
    for shapes in (SHAPES, [()] * 3):
        _, exact, _ = run(update, shapes, exact=True)
        _, plain, _ = run(update, shapes)
        _, states, _ = run(update, shapes, multi_tensor="auto")
        theirs = error([s[0] for s in plain], [w[0] for w in exact])
        assert error([s[0] for s in states], [w[0] for w in exact]) < 2 * theirs + 1e-6


class Wide(Optimizer):
    """Averages in fp32, which the first step makes."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            if not self.state[p]:
                self.state[p]["m"] = torch.zeros_like(p, dtype=torch.float32)
                self.state[p]["last"] = torch.empty_like(p, dtype=torch.float32).fill_(1)
            self.state[p]["m"].lerp_(p.grad.float(), 0.1)
            self.state[p]["last"].copy_(p.grad)
            p.sub_((RATE * self.state[p]["m"]).to(p.dtype))


def test_states_in_fp32_that_the_first_step_makes_do_not_keep_others_from_graphs() -> None:
    torch.compiler.reset()
    optimizer = Wide([torch.ones(s).bfloat16().requires_grad_() for s in SHAPES], {})
    step = collage_fx.compile(optimizer, storage="mcf2")
    for _ in range(4):
        for p in optimizer.param_groups[0]["params"]:
            p.grad = torch.ones_like(p)
        step()
    served = collage_fx.report(step).states
    assert len(served) == len(SHAPES) and all((s.joined, s.graph) == (1, 3) for s in served)
