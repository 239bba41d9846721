"""On a CUDA device: the kernels against the eager reference, and CUDA graphs. `pytest -m gpu`."""

from typing import Any

import pytest
import torch
from graphs import differing
from interpreted import members_of, reference
from kernels import CASES, Case, rewritten, sweep_of
from torch import Tensor, optim
from torch.optim import Optimizer

import collage_fx

pytestmark = pytest.mark.gpu

SHAPES = ((64, 48), (7,), (130, 131), (1,), (3, 5, 7), (1024,), (33, 3), (256, 256))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_twenty_launches_are_the_steps_of_the_eager_reference(case: Case) -> None:
    of_class = rewritten(case)
    sweep = sweep_of(of_class)
    theirs = members_of(of_class)
    ours = [[x.cuda() for x in inputs] for inputs in theirs]
    for step in range(20):
        sizes = [max(x.numel() for x in inputs) for inputs in ours]
        sweep.run([list(column) for column in zip(*ours, strict=True)], sizes)
        for m, n in zip(ours, theirs, strict=True):
            reference(of_class, n)
            assert [differing(a.cpu(), b) for a, b in zip(m, n, strict=True)] == [0] * len(n)
            for i in sweep.read:
                m[i].copy_(n[i].mul_(-0.7 if step % 3 else 1.6))


def trained(
    kind: type[Optimizer], device: str, steps: int = 10, **options: Any
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the parameters after some steps, and their residuals."""
    chosen = {k: options.pop(k) for k in ("multi_tensor", "mode", "arithmetic") if k in options}
    generator = torch.Generator().manual_seed(0)
    params = [
        torch.randn(shape, generator=generator).bfloat16().to(device).requires_grad_()
        for shape in SHAPES
    ]
    for p in params:
        p.grad = torch.empty_like(p)
    step = collage_fx.compile(kind(params, **options), level="plus", **chosen)
    for _ in range(steps):
        for p in params:
            assert p.grad is not None
            p.grad.copy_(torch.randn(p.shape, generator=generator).bfloat16())
        step()
    values = [p.detach().cpu() for p in params]
    return values, [collage_fx.residuals(p)[0].cpu() for p in params]


def total(a: tuple[list[Tensor], ...], b: tuple[list[Tensor], ...]) -> int:
    """Return at how many elements two results differ."""
    pairs = (pair for x, y in zip(a, b, strict=True) for pair in zip(x, y, strict=True))
    return sum(differing(x, y) for x, y in pairs)


def test_a_step_on_the_gpu_is_that_of_the_cpu() -> None:
    on_cpu = trained(optim.SGD, "cpu", momentum=0.9, lr=1e-3)
    for multi_tensor in (True, False):
        on_gpu = trained(optim.SGD, "cuda", momentum=0.9, lr=1e-3, multi_tensor=multi_tensor)
        assert total(on_cpu, on_gpu) == 0


@pytest.mark.parametrize("capturable", [False, True])
def test_one_launch_is_equal_to_a_kernel_for_each(capturable: bool) -> None:
    together, apart = (
        trained(optim.AdamW, "cuda", capturable=capturable, multi_tensor=multi_tensor)
        for multi_tensor in (True, False)
    )
    assert total(together, apart) == 0


@pytest.mark.parametrize("multi_tensor", [True, False])
def test_a_replayed_cuda_graph_keeps_its_residuals(multi_tensor: bool) -> None:
    options = {"capturable": True, "multi_tensor": multi_tensor}
    launched = trained(optim.AdamW, "cuda", **options)
    assert total(launched, trained(optim.AdamW, "cuda", mode="reduce-overhead", **options)) == 0


def test_arithmetic_in_wide_is_near_that_in_eft() -> None:
    (wide, lows), (eft, _) = (
        trained(optim.AdamW, "cuda", arithmetic=arithmetic) for arithmetic in ("wide", "eft")
    )
    assert sum(int(low.count_nonzero()) for low in lows) > 1000
    for a, b in zip(wide, eft, strict=True):
        assert torch.allclose(a.float(), b.float(), rtol=2**-7, atol=1e-4)
