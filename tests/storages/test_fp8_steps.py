"""Moments in fp8, with residuals: in graphs, of classes, operation by operation.

For runtime.storage.registry.
"""

import copy
from typing import Any

import pytest
import torch
from fp8_steps import Adam8
from storage_runs import MEMBERS, compiled, start, steps
from torch import Tensor

import collage_fx
from collage_fx.errors import CollageWarning
from collage_fx.runtime.expansion.eft import FP8

E4M3, E5M2 = FP8
formats = pytest.mark.parametrize("dtype", FP8, ids=["e4m3fn", "e5m2"])


def moments(optimizer: Adam8, name: str) -> Tensor:
    values = (collage_fx.value(state[name]).flatten() for state in optimizer.state.values())
    return torch.cat(list(values))


def trained(way: str, dtype: torch.dtype, **options: Any) -> Adam8:
    params = start(MEMBERS[way], torch.bfloat16)
    optimizer = Adam8(params, lr=1e-4, moments=dtype)
    steps(optimizer, compiled(optimizer, way, **options) if options else optimizer.step, 0, 40)
    return optimizer


def error(found: Adam8, exact: Adam8, name: str) -> float:
    a, b = moments(found, name), moments(exact, name)
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize(
    "way, dtype",
    [
        *(("eager", dtype) for dtype in FP8),
        *(("each", E4M3), ("shared", E5M2)),
        pytest.param("each", E5M2, marks=pytest.mark.slow),
        pytest.param("shared", E4M3, marks=pytest.mark.slow),
    ],
)
@pytest.mark.quick("each-dtype2")
def test_each_word_more_is_so_many_bits_more(way: str, dtype: torch.dtype) -> None:
    exact, plain = trained(way, torch.float32), trained(way, dtype)
    two = trained(way, dtype, storage="mcf2")
    three = trained(way, dtype, storage="mcf3", level="all")
    for name in ("exp_avg", "exp_avg_sq"):
        errors = [error(found, exact, name) for found in (plain, two, three)]
        # A word more is 4 or 5 bits more; as many steps round as many times.
        assert errors[0] > 10 * errors[1] > 60 * errors[2], (name, errors)
        assert errors[2] < (2.0**-12 if dtype == E4M3 else 2.0**-9), (name, errors)
    assert all(len(collage_fx.residuals(s["exp_avg"])) == 2 for s in three.state.values())


@formats
def test_an_overflow_is_that_of_the_plain_optimizer_and_passes(dtype: torch.dtype) -> None:
    """Beyond the range the high word is what PyTorch makes of it, in each engine; lows are 0."""
    found: dict[str, Tensor] = {}
    for way in ("plain", "each", "eager"):
        (p,) = start(1, torch.bfloat16)
        optimizer = Adam8([p], moments=dtype)
        step = optimizer.step if way == "plain" else compiled(optimizer, way, storage="mcf2")
        for scale in (1.0, 1e7, 1.0):
            p.grad = torch.full_like(p, scale)
            p.grad[0, 0] = 1.0
            step()
        state = optimizer.state[p]
        found[way] = state["exp_avg_sq"].float()
        if way != "plain":
            (lo,) = collage_fx.residuals(state["exp_avg_sq"])
            assert lo.float().isfinite().all() and not lo.float()[found[way].isnan()].any()
            assert not lo.float()[found[way].isinf()].any()
    edge = [(found[way][0, 1]).nan_to_num(nan=-1.0, posinf=-2.0).item() for way in found]
    assert edge[0] == edge[1] == edge[2] or (dtype == E4M3 and abs(edge[1]) >= 440), edge
    assert torch.equal(found["each"].nan_to_num(-1), found["eager"].nan_to_num(-1))


@pytest.mark.parametrize("known", [True, False])
def test_moments_of_a_checkpoint_stay_in_fp8(known: bool) -> None:
    """Keep load_state_dict() from casting them to the dtype of the parameter."""
    params = start(1, torch.bfloat16)
    optimizer = Adam8(params)
    step = compiled(optimizer, "eager")
    steps(optimizer, step, 0, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    copies = [p.detach().clone().requires_grad_() for p in params]
    other = Adam8(copies)
    again = compiled(other, "eager") if known else None
    other.load_state_dict(saved)
    if again is None:  # and PyTorch has cast them before anyone knew better
        with pytest.warns(CollageWarning, match=r"cast exp_avg, exp_avg_sq.* as float8_e4m3fn"):
            again = compiled(other, "eager")
        with pytest.warns(CollageWarning, match="not as they were saved"):
            steps(other, again, 2, 3)
        return
    steps(optimizer, step, 2, 4)
    steps(other, again, 2, 4)
    for p, q in zip(params, copies, strict=True):
        for name, state in optimizer.state[p].items():
            assert other.state[q][name].dtype == state.dtype
            assert torch.equal(collage_fx.value(other.state[q][name]), collage_fx.value(state))


def test_other_formats_of_8_bits_are_refused_by_name() -> None:
    optimizer = Adam8(start(1, torch.bfloat16), moments=torch.float8_e4m3fnuz)
    step = collage_fx.compile(optimizer)
    steps(optimizer, step, 0, 2)
    text = str(collage_fx.explain(optimizer))
    assert "refused" in text and "float8_e4m3fn, float8_e5m2" in text


@pytest.mark.parametrize("storage", ["remainder16", "ulp8"])
def test_a_storage_that_cannot_hold_fp8_says_which_can(storage: str) -> None:
    optimizer = Adam8(start(1, torch.bfloat16))
    with pytest.warns(CollageWarning, match=r"exp_avg.*float8_e4m3fn; 'mcf2', 'mcf3', 'sr' can"):
        steps(optimizer, collage_fx.compile(optimizer, storage=storage), 0, 2)
