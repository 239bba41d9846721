"""Bias corrections have equal bits in every way that a step is done, and are rounded once.

For passes.rewrite.wider.
"""

import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from fractions import Fraction
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import interpreter
import power_steps
import pytest
import torch
from graphs import differing
from power_steps import BETAS, CASES, COUNTS, EVERY, FEW, WAYS, powers, trained
from tensors import bf16, with_grads
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import collage_fx
from collage_fx.passes.codegen.multi_tensor_kernel import MULTI_TENSOR_KERNELS
from collage_fx.passes.rewrite.wider import on_wider

pytestmark = pytest.mark.kernels

aten = torch.ops.aten
IN_PROCESS = tuple(way for way in WAYS if way != "Triton's")


def by_triton(name: str) -> Any:
    """Return what power_steps.py saves, run by Triton's interpreter, which is chosen at import."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    with TemporaryDirectory() as folder:
        command = [sys.executable, power_steps.__file__, f"{folder}/saved", name]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        return torch.load(f"{folder}/saved")[name]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_steps_have_equal_words_in_every_way(case: str) -> None:
    expected = trained(case, IN_PROCESS[0])
    for way in IN_PROCESS[1:]:
        assert sum(map(differing, trained(case, way), expected)) == 0, way
    assert sum(map(differing, by_triton(case), expected)) == 0


def pushed(push: Callable[[Tensor], Tensor]) -> Any:
    """Let the interpreter have powers that are off, by what is done to each in float64."""

    def of(op: Any) -> Callable[..., Tensor]:
        def power(x: Any, y: Any) -> Tensor:
            exact: Tensor = op(x, y)
            assert exact.dtype == torch.float64
            return push(exact)

        return power

    ops = (aten.pow.Scalar, aten.pow.Tensor_Scalar)
    return mock.patch.multiple(
        interpreter,
        LIKE_KERNELS=interpreter.LIKE_KERNELS | {op: of(op) for op in ops},
        READY=weakref.WeakKeyDictionary(),
    )


def next_(x: Tensor) -> Tensor:
    return torch.nextafter(x, torch.tensor(torch.inf, dtype=x.dtype))


@pytest.mark.slow
def test_a_power_off_by_an_ulp_of_fp32_is_seen_and_by_two_of_float64_is_not() -> None:
    expected = trained("capturable", "interpreted", 12)
    with pushed(lambda x: next_(next_(x))):
        assert sum(map(differing, trained("capturable", "interpreted", 12), expected)) == 0
    with pushed(lambda x: next_(x.float()).double()):
        found = trained("capturable", "interpreted", 12)
    # Parameter, its low word, average, second moment and its low word, for each parameter.
    lows = list(zip(found[1::5], expected[1::5], strict=True))
    assert sum(differing(a, b) for a, b in lows) > sum(a.numel() for a, _ in lows) / 2


def in_fp32(beta: float, count: int) -> float:
    """Return the power of an fp32 number, computed with integers and rounded once to fp32."""
    exact = Fraction(torch.tensor(beta).item()) ** count
    exponent = exact.numerator.bit_length() - exact.denominator.bit_length()
    while Fraction(2) ** exponent > exact:
        exponent -= 1
    last = Fraction(2) ** (max(exponent, -126) - 23)
    return float(round(exact / last) * last)  # round() takes ties to even


@pytest.fixture(scope="module")
def exact() -> Tensor:
    return torch.tensor([[in_fp32(b, k) for b in BETAS] for k in range(1, COUNTS + 1)])


@pytest.mark.parametrize("way", IN_PROCESS)
@pytest.mark.quick("recorded", "Inductor's", "C++")
def test_powers_are_rounded_correctly(way: str, exact: Tensor) -> None:
    MULTI_TENSOR_KERNELS.clear()
    assert differing(powers(way, range(1, COUNTS + 1, FEW)), exact[::FEW]) == 0
    if way == "C++":
        sources = [kernel.sources["cpu"] for kernel in MULTI_TENSOR_KERNELS.values()]
        assert any("std::pow" in source for source in sources)


@pytest.mark.slow
def test_powers_of_triton_kernels_are_rounded_correctly(exact: Tensor) -> None:
    assert differing(by_triton("powers"), exact[::EVERY]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("foreach", [False, True])
def test_powers_beside_joined_values_are_rounded_correctly(foreach: bool, exact: Tensor) -> None:
    p = with_grads([bf16(5)])[0]
    optimizer = power_steps.ComputedAnew([p], foreach=foreach)
    with interpreter.without_compiler():
        step = collage_fx.compile(optimizer, arithmetic="wide")
        for k in range(300):
            step()
            assert optimizer.state[p]["power"] == exact[k, 1]
    assert all("joined" in s.reason for s in collage_fx.report(step).states[:1])


@pytest.mark.parametrize("traced", [False, True])
def test_every_operation_that_takes_powers_is_rounded_correctly(
    traced: bool, exact: Tensor
) -> None:
    counts = [torch.tensor(float(k)) for k in range(1, 601, 50)]
    base = torch.tensor(BETAS[1])

    def taken(op: Any, *args: Any) -> list[Tensor]:
        function = on_wider(op)
        made = (make_fx(function)(*args) if traced else function)(*args)
        return made if isinstance(made, list) else [made]

    expected = list(exact[:600:50, 1])
    assert taken(aten._foreach_pow.ScalarAndTensor, BETAS[1], counts) == expected
    assert taken(aten._foreach_pow.List, [base] * len(counts), counts) == expected
    for count, power in zip(counts[::4], expected[::4], strict=True):
        assert taken(aten.pow.Scalar, BETAS[1], count) == [power]
        assert taken(aten.pow.Tensor_Tensor, base, count) == [power]
        assert taken(aten.pow.Tensor_Scalar, base, int(count)) == [power]
    if not traced:
        written = [base.clone() for _ in counts]
        on_wider(aten._foreach_pow_.List)(written, counts)
        assert written == expected
        assert on_wider(aten.pow_.Tensor)(base.clone(), counts[9]) == expected[9]


def test_the_oracle_can_fail(exact: Tensor) -> None:
    """PyTorch's fp32 power on a CPU is off by a unit in the last place at times."""
    counts = torch.arange(1.0, COUNTS + 1, FEW)
    found = torch.stack([torch.pow(beta, counts) for beta in BETAS], 1)
    assert differing(found, exact[::FEW]) > 0
    assert torch.allclose(found, exact[::FEW], rtol=2**-22, atol=2**-149)


@pytest.mark.filterwarnings("ignore:collage_fx. nothing needed compensation")
@pytest.mark.parametrize("record", ["auto", True])
@pytest.mark.quick("auto")
def test_a_step_without_compensation_has_the_powers_of_plain_pytorch(record: Any) -> None:
    p = torch.ones(3, requires_grad=True)
    p.grad = torch.zeros_like(p)
    optimizer = power_steps.Powers([p])
    step = collage_fx.compile(optimizer, record=record)
    state = optimizer.state[p]
    for count in range(1, 301):
        state["step"].fill_(count - 1)
        step()
        for beta in BETAS:
            assert state[str(beta)] == beta ** torch.tensor(float(count))
