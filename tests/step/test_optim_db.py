"""The options that PyTorch tests its own optimizers with: 20 steps against float64.

The weights are around 0 at scale 0.05, or around 1, where 16 bits lose nearly every update. The
full value, high word and residual, has to be nearer to the float64 result than its rounding to 16
bits is.

For step.compiled_step.
"""

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from optim_cases import (
    INFOS,
    NOT_AFFINE,
    Case,
    Way,
    cases,
    compiled,
    error,
    plain,
    rounded,
    trained,
    untraced,
)
from torch import Tensor
from torch.optim import _muon

ORTHOGONALIZE = "_zeropower_via_newtonschulz"
BF16, FP16 = torch.bfloat16, torch.float16
PLAIN_STATES = 1.6
"""Factor by which a way of 0.2 from weights of 0.05 is off, at level auto, beyond their rounding:
by that of the first moments, which are plain there. At level all they are not."""
RANGE = {
    ("Adadelta", "single"): "its second accumulator starts at 1e-8",
    ("Adadelta", "foreach"): "its second accumulator starts at 1e-8",
    ("RAdam", "foreach"): "it divides a root by a number that leaves a subnormal",
    ("LBFGS", "only"): "it divides by a scalar product that is zero",
}
"""Reasons why fp16 has no numbers for a case, compensated or not."""
EVERY = list(cases())
RICHEST = [c for c in EVERY if c.options == len(c.info.optim_inputs_func(device="cpu")) - 1]
"""The last input of each optimizer, which mostly combines options."""
UNTRACED = [c for c in EVERY if c.impl != "capturable"]
"""Cases without `capturable`: such steps run, without a GPU, in compiled graphs only."""


def rounds_first(dtype: torch.dtype) -> Callable[..., Tensor]:
    """Return what orthogonalises an update of Muon, rounded to a dtype before."""
    orthogonalize = getattr(_muon, ORTHOGONALIZE)
    return lambda update, *args: orthogonalize(update.to(dtype).to(update.dtype), *args)


def check(case: Case, dtype: torch.dtype, scale: float, way: Way, allowed: float = 1.0) -> None:
    """Hold the error of the full value against that of rounding the exact result.

    Where the optimizer is not affine in its states, against twice that of training in fp32 with
    the parameters rounded, and what enters products of matrices, as graphs round it.
    """
    if dtype is FP16 and (case.name, case.impl) in RANGE:
        pytest.skip(f"fp16: {RANGE[case.name, case.impl]}")
    if case.name == "Rprop":
        pytest.xfail("its step sizes grow by 1.2 rounded to the parameter's dtype")
    # A capturable step runs in compiled graphs only; its reference is the plain one.
    reference = Case(case.name, case.options, "single") if case.impl == "capturable" else case
    exact = trained(reference, torch.float64, dtype, scale)
    found = error(trained(case, dtype, dtype, scale, way), exact)
    if case.name in NOT_AFFINE:
        with mock.patch.object(_muon, ORTHOGONALIZE, rounds_first(dtype)):
            in_fp32 = trained(reference, torch.float32, dtype, scale)
        limit = 2 * allowed * error(rounded(in_fp32, dtype), exact)
    else:
        limit = allowed * error(rounded(exact, dtype), exact)
    assert found <= limit, f"{found:.2e} > {limit:.2e}"


def each(chosen: list[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", chosen, ids=str)


dtypes = pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
scales = pytest.mark.parametrize("scale", [0.05, 1.0])


@each([c for c in RICHEST if c in UNTRACED])
@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(BF16, id="bf16"),
        pytest.param(FP16, id="fp16", marks=pytest.mark.slow),
    ],
)
@pytest.mark.quick(
    "*-A*-single-*",
    "*-[NS]*-single-*",
    "*-RMSprop-single-*",
    "*-LBFGS-*",
    "*-Muon-*",
    "*-Adam-foreach-*",
    "*-fused-*",
)
def test_untraced_on_the_richest_options(case: Case, dtype: torch.dtype) -> None:
    check(case, dtype, 1.0, untraced)


@each([Case("AdamW", 4, "foreach"), Case("NAdam", 6, "capturable"), Case("SGD", 8, "single")])
@pytest.mark.quick("NAdam-*", "SGD-*")
def test_compiled_on_the_richest_options(case: Case) -> None:
    check(case, BF16, 1.0, compiled)


@pytest.mark.slow
@each(UNTRACED)
@dtypes
@scales
def test_untraced_on_every_option(case: Case, dtype: torch.dtype, scale: float) -> None:
    check(case, dtype, scale, untraced, PLAIN_STATES if scale == 0.05 else 1.0)


@pytest.mark.slow
@each([c for c in UNTRACED if c.name not in NOT_AFFINE or c.name == "Muon"])
@dtypes
@scales
def test_every_state_compensated_on_every_option(
    case: Case, dtype: torch.dtype, scale: float
) -> None:
    check(case, dtype, scale, lambda optimizer: untraced(optimizer, level="all"))


@pytest.mark.slow
@each(EVERY)
def test_compiled_on_every_option(case: Case) -> None:
    check(case, BF16, 1.0, compiled)


@each([c for c in RICHEST if c.impl in ("single", "only") and c.name != "LBFGS"])
@pytest.mark.quick("Ad*", "SGD*")
def test_plain_bf16_fails_the_same_check(case: Case) -> None:
    """The negative control: around 1, plain bf16 is worse than rounding the exact result once."""
    exact = trained(case, torch.float64, BF16, 1.0)
    lost = error(trained(case, BF16, BF16, 1.0, plain), exact)
    assert lost > error(rounded(exact, BF16), exact)


def test_every_optimizer_of_pytorch_is_among_the_cases() -> None:
    names = {n for n in vars(torch.optim) if isinstance(getattr(torch.optim, n), type)}
    assert names - {"Optimizer"} == set(INFOS) == {c.name for c in EVERY}
