"""The interpreter of rewritten graphs does, bit for bit, what Inductor's kernels do.

For tests/support/interpreter.py.
"""

from collections.abc import Callable
from typing import Any

import interpreter
import pytest
import torch
from floats import mixed
from interpreter import without_compiler
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

import collage_fx
from collage_fx.runtime.ops import collage

pytestmark = pytest.mark.kernels

BF16, FP16 = torch.bfloat16, torch.float16


class Own(Optimizer):
    """A user's: counts in Python, and an average of the parameter that the graph reads too."""

    def __init__(self, params: list[Tensor]) -> None:
        super().__init__(params, {"lr": 1e-2})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state |= {"k": 0, "v": torch.zeros_like(p), "slow": p.detach().clone()}
                state["k"] += 1
                state["v"].mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
                size = (state["v"] / (1 - 0.999 ** state["k"])).sqrt() + 1e-8
                p.mul_(1 - 0.01 * group["lr"]).addcdiv_(p.grad, size, value=-group["lr"])
                state["slow"].lerp_(p, 0.01)


Make = Callable[[list[Tensor]], Optimizer]
CASES: dict[str, tuple[Make, int, torch.dtype, dict[str, Any]]] = {
    "adamw-light": (AdamW, 1, BF16, {"level": "light", "storage": "mcf2"}),
    "adamw-plus": (AdamW, 1, BF16, {"level": "plus", "storage": "mcf2"}),
    "sgd-mcf3": (
        lambda p: SGD(p, lr=1e-3, momentum=0.99),
        1,
        BF16,
        {"level": "all", "storage": "mcf3"},
    ),
    "adamw-ulp8": (AdamW, 1, BF16, {"level": "all", "storage": "ulp8"}),
    "adamw-remainder16": (AdamW, 1, BF16, {"level": "all", "storage": "remainder16"}),
    "adam-fp16-wide": (
        lambda p: Adam(p, weight_decay=0.1, foreach=False),
        1,
        FP16,
        {"level": "all", "arithmetic": "wide"},
    ),
    "adamw-double-single": (AdamW, 1, torch.float32, {"storage": "double_single"}),
    "own": (Own, 2, BF16, {"storage": "mcf2"}),
    "adamw-class": (AdamW, 9, BF16, {"level": "plus", "storage": "mcf2"}),
    "own-class-by-chance": (Own, 9, BF16, {"stochastic_rounding": True, "seed": 3}),
    "sgd-class-mixed": (
        lambda p: SGD(p, lr=1e-3, momentum=0.99, nesterov=True),
        9,
        BF16,
        {"storage": {"param": "mcf3", "*": "ulp8"}, "level": "all"},
    ),
}


def bits(x: Tensor) -> Tensor:
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32}
    numbers = torch.nan_to_num(x, nan=0.125) if x.is_floating_point() else x
    return numbers.contiguous().view(kinds[x.element_size()]) if x.dtype != torch.float64 else x


def trained(name: str, steps: int = 5) -> tuple[dict[str, Tensor], int]:
    """Return all states and residuals of a case after some steps, and how many graphs there were.

    Values are of every bit pattern; what overflows stays so.
    """
    make, count, dtype, options = CASES[name]
    generator = torch.Generator().manual_seed(1)

    def some(scale: float) -> Tensor:
        if dtype == torch.float32:
            return torch.randn(4096, generator=generator) * scale
        return mixed(scale, dtype, generator)[: 4096 if count < 8 else None]

    params = [some(1.0).requires_grad_() for _ in range(count)]
    optimizer = make(params)
    step = collage_fx.compile(optimizer, multi_tensor=count > 2, **options)
    for _ in range(steps):
        for p in params:
            p.grad = some(1e-2)
        step()
    found = {}
    for i, p in enumerate(params):
        for key, x in {"p": p.detach(), **optimizer.state[p]}.items():
            if isinstance(x, Tensor):
                found[f"{key}{i}"] = bits(x)
                for k, low in enumerate(collage_fx.residuals(p if key == "p" else x)):
                    found[f"{key}{i}_lo{k}"] = bits(low)
    served = collage_fx.report(step).states
    return found, sum(state.graph for state in served)


def differences(name: str) -> dict[str, int]:
    """Return at how many elements each state of a case differs between the two."""
    compiled, served = trained(name)
    torch.compiler.reset()
    with without_compiler() as graphs:
        interpreted, _ = trained(name)
    assert served and graphs
    assert compiled.keys() == interpreted.keys() and any("lo" in key for key in compiled)
    found = {k: int((compiled[k] != interpreted[k]).sum()) for k in compiled}
    return {k: n for k, n in found.items() if n}


FEW = ("adamw-plus", "sgd-mcf3", "adamw-remainder16", "adamw-double-single", "own-class-by-chance")


@pytest.mark.parametrize(
    "name", [n if n in FEW else pytest.param(n, marks=pytest.mark.slow) for n in CASES]
)
@pytest.mark.quick("adamw-plus")
def test_interpreted_steps_are_those_of_inductor_bit_for_bit(name: str) -> None:
    assert differences(name) == {}


@pytest.mark.parametrize(
    ("name", "operation", "wrong", "differ"),
    [
        ("adamw-plus", collage.round.default, lambda x, dtype: x, {"p0_lo0", "exp_avg_sq0_lo0"}),
        ("adamw-remainder16", torch.ops.aten.sqrt.default, torch.sqrt, {"p0_lo0"}),
    ],
    ids=["roundings", "roots"],
)
@pytest.mark.quick("roundings")
def test_the_comparison_can_fail(
    name: str, operation: Any, wrong: Any, differ: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without roundings all residuals are zero; eager fp32 roots are off by an ulp."""
    monkeypatch.setitem(interpreter.LIKE_KERNELS, operation, wrong)
    monkeypatch.setattr(interpreter, "READY", type(interpreter.READY)())
    assert differ <= differences(name).keys()


def test_constants_of_a_graph_are_found() -> None:
    def step(p: Tensor) -> None:
        p.sub_(torch.tensor([1e-3, 2e-3]).bfloat16())

    p = torch.ones(2).bfloat16()
    with without_compiler():
        compiled = collage_fx.compile(step)
        for _ in range(10):
            compiled(p)
    assert torch.allclose(1 - collage_fx.value(p), torch.tensor([1e-2, 2e-2]).double(), rtol=0.01)


@pytest.mark.slow
def test_outside_of_regions_values_are_rounded_where_kernels_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def step(p: Tensor, g: Tensor, trust: Tensor, m: Tensor) -> None:
        ratio = (p / (p.norm() + 1)) @ (g.sin() * g / (g.norm() + 1))
        trust.copy_(ratio.tanh())
        m.mul_(0.999).add_((g * 0.3).abs().mean(1, keepdim=True) * g)
        p.sub_(g * trust, alpha=0.01).sub_(m / (g * 1.1).norm(), alpha=0.01)

    begin, g = torch.randn(33, 33).bfloat16(), torch.randn(33, 33).bfloat16()

    def run() -> Tensor:
        p, trust, m = begin.clone(), torch.zeros_like(begin), torch.zeros_like(begin)
        torch.compiler.reset()
        compiled = collage_fx.compile(step, storage="mcf2")
        for _ in range(3):
            compiled(p, g, trust, m)
        return torch.stack([collage_fx.value(p) - begin.double(), collage_fx.value(m)])

    kernels = run()
    with without_compiler():
        found = run()
        monkeypatch.setattr(interpreter, "fused", lambda gm: gm)
        rounded = run()
    far, near = (((x - kernels).norm() / kernels.norm()).item() for x in (rounded, found))
    assert near < 2**-14 < 2**-11 < far < 3 * 2**-8
