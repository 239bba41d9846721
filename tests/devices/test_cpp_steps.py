"""Twenty steps by printed C++ kernels are those of the eager functions, bit for bit.

For passes.codegen.printers.cpp_kernel and runtime.kernels.cpp_loop.
"""

from typing import Any

import pytest
import torch
from graphs import differing
from interpreter import without_compiler
from tensors import bf16, with_grads

import collage_fx
from collage_fx.passes.codegen.multi_tensor_kernel import MULTI_TENSOR_KERNELS

pytestmark = pytest.mark.kernels

CASES: dict[str, dict[str, Any]] = {
    f"{level}-{storage}{'-by-chance' if by_chance else ''}-{arithmetic}": {
        "level": level,
        "storage": storage,
        "arithmetic": arithmetic,
        "stochastic_rounding": by_chance,
    }
    for level in ("light", "plus", "all")
    for storage, arithmetic, by_chance in (
        ("mcf2", "eft", False),
        ("mcf2", "wide", False),
        ("mcf2", "wide", True),
        ("mcf3", "eft", False),
        ("remainder16", "wide", False),
        ("ulp8", "wide", False),
        ("ulp8", "wide", True),
        ("ulp4", "wide", False),
        ("sr", "wide", False),
    )
}
EVERY_DAY = ("plus-mcf2-eft", "all-remainder16-wide", "light-ulp8-by-chance-wide", "all-ulp4-wide")


def trained(options: dict[str, Any], steps: int = 20) -> list[torch.Tensor]:
    """The words of all states after some steps with new gradients, infinite ones among the last."""
    torch.manual_seed(0)
    params = with_grads([bf16(3 + 7 * i) for i in range(9)])
    optimizer = torch.optim.AdamW(params, lr=1e-3)
    step = collage_fx.compile(optimizer, **options)
    for k in range(steps):
        for p in params:
            p.grad = torch.randn_like(p)
            if k == steps - 2:
                p.grad[0] = torch.inf
        step()
    states = [t for p in params for t in (p, *optimizer.state[p].values())]
    return [word for t in states for word in (t.detach(), *collage_fx.residuals(t))]


@pytest.mark.parametrize(
    "name", [n if n in EVERY_DAY else pytest.param(n, marks=pytest.mark.slow) for n in CASES]
)
@pytest.mark.quick("light-*")
def test_steps_by_printed_kernels_are_the_eager_ones(name: str) -> None:
    MULTI_TENSOR_KERNELS.clear()
    compiled = trained(CASES[name])
    kernels = list(MULTI_TENSOR_KERNELS.values())
    assert kernels and not any(k.by_inductor for k in kernels)
    assert all("#pragma omp simd" in k.sources["cpu"] for k in kernels)
    torch.compiler.reset()
    with without_compiler():
        eager = trained(CASES[name])
    assert not any(map(differing, compiled, eager))
    torch.compiler.reset()
    with without_compiler():
        fewer = trained(CASES[name], steps=19)
    assert any(map(differing, compiled, fewer))  # the comparison can fail
