"""Steps of one operation, compiled, are bit-identical to the eager functions on any bits.

For runtime.ops and passes.codegen.inductor_lowering.
"""

from collections.abc import Callable, Sequence

import pytest
import torch
from floats import differing, mixed
from torch import Tensor

import collage_fx
from collage_fx.runtime.expansion import components
from collage_fx.runtime.expansion.arithmetic import (
    Expansion,
    add,
    div,
    grow,
    mul,
    sqrt,
)
from collage_fx.runtime.storage.layouts import join, split, split3

pytestmark = pytest.mark.kernels

Eager = Callable[[Tensor, Tensor, Tensor], Expansion]


def constant(c: float) -> Eager:
    return lambda p, lo, q: div(p, lo, *components.split_constant(c, p.dtype, 2))


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
@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(torch.bfloat16, id="bf16"),
        pytest.param(torch.float16, id="fp16", marks=pytest.mark.slow),
    ],
)
@pytest.mark.quick("bf16-p / q", "bf16-sqrt p", "bf16-p ? p")
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
    collage_fx.compile(
        function, level="all", on_unsupported="error", multi_tensor=False, storage="mcf2"
    )(p, q)
    assert differing(p, expected[0]) == 0
    assert differing(collage_fx.residuals(p)[0], expected[1]) == 0
    assert collage_fx.residuals(p)[0].any()


Triple = tuple[Tensor, ...]
Q = Tensor


def number(c: float) -> Callable[[Triple, Q], Triple]:
    return lambda x, q: components.div(x, components.split_constant(c, q.dtype, 3))


def near_one(x: Triple, q: Q) -> Triple:
    """A factor close to one is added as a term of the wide dtype."""
    return components.add(x, split3((0.999 - 1) * join(*x).nan_to_num(0, 0, 0), q.dtype))


def larger3(x: Triple, q: Q) -> Triple:
    return split3(torch.maximum(join(*components.add(x, (q,))), q.float()), q.dtype)


def chosen3(x: Triple, q: Q) -> Triple:
    total = components.add(x, (q,))
    zero = torch.zeros_like(q)
    return tuple(torch.where(q > 0, c, d) for c, d in zip(total, (q, zero, zero), strict=True))


THREE: dict[str, tuple[Callable[[Tensor, Tensor], object], Callable[[Triple, Q], Triple]]] = {
    "p + q": (lambda p, q: p.add_(q), lambda x, q: components.add(x, (q,))),
    "p - q": (lambda p, q: p.sub_(q), lambda x, q: components.sub(x, (q,))),
    "q - p": (lambda p, q: p.copy_(q - p), lambda x, q: components.sub((q,), x)),
    "p * q": (lambda p, q: p.mul_(q), lambda x, q: components.mul(x, (q,))),
    "p / 3": (lambda p, q: p.div_(3.0), number(3.0)),
    "0.999 p": (lambda p, q: p.mul_(0.999), near_one),
    "p / q": (lambda p, q: p.div_(q), lambda x, q: components.div(x, (q,))),
    "q / p": (lambda p, q: p.copy_(q / p), lambda x, q: components.div((q,), x)),
    "sqrt p": (lambda p, q: p.sqrt_(), lambda x, q: components.sqrt(x)),
    "p + p": (lambda p, q: p.add_(p), lambda x, q: components.add(x, x)),
    "p * p": (lambda p, q: p.mul_(p), lambda x, q: components.mul(x, x)),
    "larger": (STEPS["larger"][0], larger3),
    "where": (STEPS["where"][0], chosen3),
}


def triples(dtype: torch.dtype) -> tuple[Triple, Tensor]:
    """States of three components, and the other operand."""
    generator = torch.Generator().manual_seed(3)
    p, q = (mixed(1.0, dtype, generator) for _ in range(2))
    u = torch.finfo(dtype).eps / 2
    lows = [p.float() * u**k / 4 * torch.rand(len(p), generator=generator) for k in (1, 2)]
    finite = [torch.where(p.isfinite(), lo, 0).to(dtype) for lo in lows]
    return components.add((p, *finite), (torch.zeros_like(p),)), q


SHORT = ("p + q", "p * q", "p / 3", "0.999 p", "sqrt p")
"""Operations that one graph compiles in a few seconds."""
WAYS = [
    pytest.param(SHORT, id="short graph"),
    pytest.param(list(THREE), id="graph", marks=pytest.mark.slow),
]


@pytest.mark.slow
@pytest.mark.parametrize("names", WAYS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_operations_on_three_components_are_those_of_the_functions(
    dtype: torch.dtype, names: Sequence[str]
) -> None:
    if dtype == torch.float16 and names is SHORT:
        pytest.skip("the slow case has it; one short graph is enough for every day")
    x, q = triples(dtype)
    states = [x[0].clone() for _ in names]
    for p in states:
        collage_fx.load_residuals(p, x[1:])

    def step(states: list[Tensor], q: Tensor) -> None:
        for p, name in zip(states, names, strict=True):
            THREE[name][0](p, q)

    torch.compiler.reset()
    options = {"storage": "mcf3", "on_unsupported": "error", "multi_tensor": False}
    run = collage_fx.compile(step, level="all", **options)
    run(states, q)
    for p, name in zip(states, names, strict=True):
        found = (p, *collage_fx.residuals(p))
        wrong = [differing(c, e) for c, e in zip(found, THREE[name][1](x, q), strict=True)]
        assert wrong == [0, 0, 0], name
        assert all(lo.isfinite().all() for lo in found[1:]) and found[2].any(), name
