"""Steps of one operation, compiled, are bit-identical to the eager functions on any bits."""

from collections.abc import Callable

import pytest
import torch
from test_bits import differing, mixed
from torch import Tensor

import collage_fx
from collage_fx.runtime.arithmetic import Expansion, add, div, grow, mul, split_constant, sqrt
from collage_fx.runtime.storage import join, split

Eager = Callable[[Tensor, Tensor, Tensor], Expansion]


def constant(c: float) -> Eager:
    return lambda p, lo, q: div(p, lo, *split_constant(c, p.dtype))


def larger(p: Tensor, lo: Tensor, q: Tensor) -> Expansion:
    whole = join(*grow(p, lo, q))
    return split(torch.maximum(whole, q.float()), p.dtype)


def chosen(p: Tensor, lo: Tensor, q: Tensor) -> Expansion:
    hi, tail = grow(p, lo, q)
    return torch.where(q > 0, hi, q), torch.where(q > 0, tail, 0.0)


STEPS: dict[str, tuple[Callable[[Tensor, Tensor], object], Eager]] = {
    "p / 3": (lambda p, q: p.div_(3.0), constant(3.0)),
    "p / q": (lambda p, q: p.div_(q), lambda p, lo, q: div(p, lo, q, 0.0)),
    "q / p": (lambda p, q: p.copy_(q / p), lambda p, lo, q: div(q, 0.0, p, lo)),
    "sqrt p": (lambda p, q: p.sqrt_(), lambda p, lo, q: sqrt(p, lo)),
    "p + p": (lambda p, q: p.add_(p), lambda p, lo, q: add(p, lo, p, lo)),
    "p * p": (lambda p, q: p.mul_(p), lambda p, lo, q: mul(p, lo, p, lo)),
    "larger": (lambda p, q: p.copy_(torch.maximum(p + q, q)), larger),
    "where": (lambda p, q: p.copy_(torch.where(q > 0, p + q, q)), chosen),
}


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_compiled_operation_is_bit_identical_to_eager(name: str, dtype: torch.dtype) -> None:
    function, eager = STEPS[name]
    generator = torch.Generator().manual_seed(3)
    p, q = (mixed(1.0, dtype, generator) for _ in range(2))
    lo = (p.float() * torch.finfo(dtype).eps / 8 * torch.rand(len(p), generator=generator)).to(
        dtype
    )
    lo = torch.where(lo.isfinite() & p.isfinite(), lo, 0)
    expected = eager(p.clone(), lo, q)
    collage_fx.load_residuals(p, [lo])
    torch.compiler.reset()
    collage_fx.compile(function, level="all", on_unsupported="error")(p, q)
    assert differing(p, expected[0]) == 0
    assert differing(collage_fx.residuals(p)[0], expected[1]) == 0
    assert collage_fx.residuals(p)[0].any()
