"""Numbers that a scheduler changes: an input of the graph wherever the step uses them.

For passes.rewrite.symbolic_scalars and hooks.symbolic_numbers.
"""

from collections.abc import Callable

import pytest
import torch
from tensors import bf16
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR

import collage_fx
from collage_fx.runtime.torch_versions import installed

Form = Callable[[Tensor, Tensor, float], object]

FORMS: dict[str, Form] = {
    "add": lambda p, g, s: p.add_(g, alpha=-s),
    "sub": lambda p, g, s: p.sub_(g, alpha=s),
    "mul": lambda p, g, s: p.mul_(1 - s),
    "product": lambda p, g, s: p.sub_(s * g),
    "addcmul": lambda p, g, s: p.addcmul_(g, g, value=-s),
    "addcdiv": lambda p, g, s: p.addcdiv_(g, g.abs() + 1, value=-s),
    "lerp": lambda p, g, s: p.lerp_(g, s),
    "pow": lambda p, g, s: p.sub_(0.01 * g.abs().pow(s)),
    "base": lambda p, g, s: p.sub_(0.01 * torch.pow(s, g.abs())),
    "clamp": lambda p, g, s: p.sub_(g.clamp(-s, s)),
    "fill": lambda p, g, s: p.sub_(torch.full_like(g, s)),
    "where": lambda p, g, s: p.sub_(torch.where(g > 0, 0.001 * g, s)),
    "either": lambda p, g, s: p.sub_(torch.where(g > 0, s, -s)),
    "masked": lambda p, g, s: p.sub_((0.001 * g).masked_fill(g > 0, s)),
    "tensor": lambda p, g, s: p.sub_(torch.tensor(s) * g),
    "foreach add": lambda p, g, s: torch._foreach_add_([p], [g], alpha=-s),
    "foreach mul": lambda p, g, s: torch._foreach_mul_([p], 1 - s),
    "foreach addcmul": lambda p, g, s: torch._foreach_addcmul_([p], [g], [g], -s),
    "foreach addcdiv": lambda p, g, s: torch._foreach_addcdiv_([p], [g], [g.abs() + 1], [-s]),
    "foreach lerp": lambda p, g, s: torch._foreach_lerp_([p], [g], s),
    "foreach pow": lambda p, g, s: p.sub_(0.01 * torch._foreach_pow([g.abs()], s)[0]),
}


EDGES: dict[str, Form] = {
    "compare": lambda p, g, s: p.sub_((g > 10 * s).to(p.dtype)),
    "not above": lambda p, g, s: p.sub_((g <= 10 * s).to(p.dtype)),
    "shrink": lambda p, g, s: p.sub_(torch.where(g.abs() > 100 * s, g, 0 * g)),
    "mask": lambda p, g, s: p.mul_(p > -s),
    "integer": lambda p, g, s: p.sub_(torch.full(p.shape, 1000 * s, dtype=torch.int64)),
    "bool": lambda p, g, s: p.sub_(torch.full(p.shape, s, dtype=torch.bool).to(p.dtype)),
    "rounded down": lambda p, g, s: p.sub_(torch.div(g, 500 * s, rounding_mode="trunc")),
    "all the way": lambda p, g, s: p.lerp_(g, 1 + 0 * s),
    "foreach list": lambda p, g, s: torch._foreach_lerp_([p], [g], [1 + 0 * s]),
}
"""Forms that give whole numbers here, so that a result is equal or wrong."""


class EachForm(Optimizer):
    """Updates each parameter by another form of using the learning rate."""

    def __init__(self, params: list[Tensor], forms: dict[str, Form]) -> None:
        super().__init__(params, {"lr": 0.0})
        self.forms = list(forms.values())

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p, form in zip(group["params"], self.forms, strict=True):
                form(p, p.grad, group["lr"])


def run(params: list[Tensor], steps: int, way: Callable[[Optimizer], Callable[[], object]]) -> None:
    """Step with another learning rate each time."""
    generator = torch.Generator().manual_seed(1)
    optimizer = EachForm(params, FORMS)
    step = way(optimizer)
    for k in range(steps):
        optimizer.param_groups[0]["lr"] = 1e-3 * (1 + 0.5 * k)
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator).bfloat16().to(p.dtype)
        step()


def start(dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    values = [1 + torch.rand(64, generator=generator) for _ in FORMS]
    return [v.bfloat16().to(dtype).requires_grad_() for v in values]


def errors(found: list[Tensor], exact: list[Tensor]) -> dict[str, float]:
    """Return the error of each form relative to how far the parameter went."""
    moved = [e.detach() - s.detach() for e, s in zip(exact, start(torch.float64), strict=True)]
    off = [collage_fx.value(f) - e.detach() for f, e in zip(found, exact, strict=True)]
    return {n: float(o.norm() / m.norm()) for n, o, m in zip(FORMS, off, moved, strict=True)}


@pytest.mark.slow
def test_no_form_of_a_changing_number_makes_another_graph() -> None:
    exact, params, plain = start(torch.float64), start(torch.bfloat16), start(torch.bfloat16)
    run(exact, 6, lambda optimizer: optimizer.step)
    run(plain, 6, lambda optimizer: optimizer.step)
    steps = []

    def compiled(optimizer: Optimizer) -> Callable[[], object]:
        steps.append(collage_fx.compile(optimizer))
        return steps[0]

    run(params, 6, compiled)
    assert steps[0]._collage.graphs == 2  # one with the first value, one with any
    found, lost = errors(params, exact), errors(plain, exact)
    assert max(found.values()) < 0.02, found
    assert min(lost.values()) > 0.1, lost


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:collage_fx. nothing needed compensation")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_numbers_keep_their_values_where_they_stay_constants_too(dtype: torch.dtype) -> None:
    def trained(compiled: bool) -> list[Tensor]:
        params = [torch.arange(1.0, 9).to(dtype).requires_grad_() for _ in EDGES]
        params[-2].data.mul_(1e8)  # of which nothing is left
        optimizer = EachForm(params, EDGES)
        step = collage_fx.compile(optimizer, level="all") if compiled else optimizer.step
        for k in range(4):
            optimizer.param_groups[0]["lr"] = 0.004 * (k + 1)
            for p in params:
                p.grad = torch.arange(-3.0, 5).to(dtype)
            step()
        return [collage_fx.value(p).detach() for p in params]

    for name, found, exact in zip(EDGES, trained(True), trained(False), strict=True):
        assert torch.equal(found, exact), name


def test_it_made_a_graph_for_each_value_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control."""
    monkeypatch.setattr("collage_fx.compilation.aot.keep_symbols", lambda table: table)
    p = bf16(8)
    p.grad = torch.ones_like(p)
    optimizer = torch.optim.SGD([p], lr=1e-3, momentum=0.9, dampening=0.1)
    step = collage_fx.compile(optimizer)
    for k in range(4):
        optimizer.param_groups[0]["momentum"] = 0.9 - 0.01 * k
        optimizer.param_groups[0]["dampening"] = 0.1 + 0.01 * k
        step()
    assert step._collage.graphs >= 4


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.RAdam, torch.optim.NAdam])
@pytest.mark.quick("AdamW")
def test_a_schedule_of_betas_is_one_graph(make: type[Optimizer]) -> None:
    if make is torch.optim.NAdam and installed() < (2, 13):
        pytest.skip("before 2.13 a number that is only used negated is a constant")

    def trained(dtype: torch.dtype, compiled: bool) -> tuple[Tensor, int]:
        generator = torch.Generator().manual_seed(3)
        p = (1 + torch.rand(64, generator=generator)).bfloat16().to(dtype).requires_grad_()
        optimizer = make([p], lr=1e-4)  # type: ignore[call-arg]
        if compiled:
            step = optimizer.step = collage_fx.compile(optimizer)  # type: ignore[method-assign]
        schedule = OneCycleLR(optimizer, 1e-3, total_steps=10)
        for _ in range(8):
            p.grad = torch.randn(64, generator=generator).bfloat16().to(dtype)
            optimizer.step()
            schedule.step()
        return collage_fx.value(p).detach(), step._collage.graphs if compiled else 0

    exact, _ = trained(torch.float64, False)
    plain, _ = trained(torch.bfloat16, False)
    found, graphs = trained(torch.bfloat16, True)
    assert graphs <= 3
    assert (found - exact).norm() < 0.05 * (plain - exact).norm()
