"""Storages: checkpoints, what is refused or warned of, and what `explain` says.

For runtime.storage.registry, runtime.storage.components and inspection.explain.
"""

import copy
from typing import Any

import pytest
import torch
from storage_runs import LR, MEMBERS, WAYS, compiled, start, steps
from tensors import bf16
from torch import Tensor
from torch.optim import Optimizer

import collage_fx
from collage_fx.errors import CheckpointError, CollageWarning, ResidualError, StorageError
from collage_fx.optimizer.ownership import PARAM
from collage_fx.runtime.residuals.store import STORE


class Mixed(Optimizer):
    """bf16 parameters with a momentum in fp16, made in the first step."""

    def __init__(self, params: list[Tensor], decay: float) -> None:
        super().__init__(params, {"lr": 1e-3, "decay": decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        for p in group["params"]:
            if not self.state[p]:
                self.state[p]["m"] = torch.zeros_like(p, dtype=torch.float16)
            m = self.state[p]["m"].mul_(group["decay"]).add_(p.grad.half())
            p.sub_(group["lr"] * m.to(p.dtype))


@pytest.mark.filterwarnings("ignore:bf16 and fp16 are mixed")
@pytest.mark.parametrize("way", ["each", "eager"])
@pytest.mark.quick("eager")
def test_a_plain_state_need_not_be_held_and_one_that_is_not_held_is_named(way: str) -> None:
    if way != "eager":  # where nothing is judged
        optimizer = Mixed(start(2, torch.bfloat16), 0.5)
        steps(optimizer, compiled(optimizer, way, storage="remainder16"), 0, 3)
    optimizer = Mixed(start(2, torch.bfloat16), 0.9999)
    with pytest.warns(CollageWarning, match=r"not compensated: .*remainder16.*m of .*float16"):
        steps(optimizer, compiled(optimizer, way, storage="remainder16"), 0, 3)
    params = optimizer.param_groups[0]["params"]
    assert all(r.dtype == torch.int16 for p in params for r in collage_fx.residuals(p))


def test_two_optimizers_of_one_parameter_with_two_storages_warn() -> None:
    params = start(1, torch.bfloat16)
    first, second = (torch.optim.SGD(params, lr=1e-6) for _ in range(2))
    fine = collage_fx.compile(first, storage="remainder16")
    coarse = collage_fx.compile(second, storage="ulp8")
    STORE._coarser.clear()
    steps(first, fine, 0, 1)
    with pytest.warns(CollageWarning, match="16 bits instead of 24"):
        steps(second, coarse, 1, 2)
    steps(first, fine, 2, 3)  # and never again


@pytest.mark.slow
@pytest.mark.parametrize("storage", ["mcf3", "remainder16", "ulp8"])
def test_resumed_run_is_bit_equal(storage: str) -> None:
    def run(params: list[Tensor], first: int, last: int, saved: Any = None) -> Optimizer:
        optimizer = torch.optim.AdamW(params, lr=LR)
        if saved is not None:
            optimizer.load_state_dict(saved)
        steps(optimizer, collage_fx.compile(optimizer, storage=storage), first, last)
        return optimizer

    params = start(2, torch.bfloat16)
    saved = copy.deepcopy(run(params, 0, 4).state_dict())
    there = [p.detach().clone().requires_grad_() for p in params]
    run(there, 4, 8, saved)
    whole = start(2, torch.bfloat16)
    run(whole, 0, 8)
    for a, b in zip(there, whole, strict=True):
        assert torch.equal(collage_fx.value(a), collage_fx.value(b))
        pairs = zip(collage_fx.residuals(a), collage_fx.residuals(b), strict=True)
        assert all(torch.equal(x, y) for x, y in pairs)


def test_a_checkpoint_of_another_storage_is_converted() -> None:
    params = start(2, torch.bfloat16)
    optimizer = torch.optim.SGD(params, lr=1e-4)
    steps(optimizer, collage_fx.compile(optimizer, storage="remainder16"), 0, 5)
    values = [collage_fx.value(p) for p in params]
    saved = copy.deepcopy(optimizer.state_dict())
    again = [p.detach().clone().requires_grad_() for p in params]
    optimizer = torch.optim.SGD(again, lr=0.0)
    optimizer.load_state_dict(saved)
    optimizer.param_groups[0]["lr"] = 0.0
    STORE._coarser.clear()
    with pytest.warns(CollageWarning, match="17 bits instead of 24"):
        steps(optimizer, collage_fx.compile(optimizer, storage="mcf2"), 5, 6)
    for p, exact in zip(again, values, strict=True):
        (lo,) = collage_fx.residuals(p)
        assert lo.dtype == torch.bfloat16
        assert ((collage_fx.value(p) - exact).abs() <= 2.0**-17 * exact.abs()).all()
        assert not torch.equal(p.double(), exact)  # as if the residual had been dropped


@pytest.mark.parametrize("first", ["load", "compile"])
def test_a_checkpoint_of_another_dtype_is_refused(first: str) -> None:
    params = start(1, torch.bfloat16)
    optimizer = torch.optim.SGD(params, lr=1e-4)
    steps(optimizer, collage_fx.compile(optimizer, storage="remainder16"), 0, 1)
    other = torch.optim.SGD(start(1, torch.float16), lr=1e-4)
    if first == "compile":
        collage_fx.compile(other)
    with pytest.raises(CheckpointError, match="which is float16"):
        other.load_state_dict(optimizer.state_dict())
        collage_fx.compile(other)


@pytest.mark.parametrize("first", ["load", "compile"])
@pytest.mark.parametrize("as_bits", [False, True])
@pytest.mark.quick("False-load", "True-compile")
def test_a_checkpoint_with_words_that_were_cast_is_refused(first: str, as_bits: bool) -> None:
    """By a tool: to another dtype, or to that in which their bits travel."""
    params = start(1, torch.bfloat16)
    optimizer = torch.optim.SGD(params, lr=1e-4)
    steps(optimizer, collage_fx.compile(optimizer, storage="remainder16"), 0, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    entry = f"collage_fx.{PARAM}.remainder16.0"
    words = saved["state"][0][entry].view(torch.int16) | 1
    saved["state"][0][entry] = words.bfloat16() if as_bits else words.float() / 1024
    params = [p.detach().clone().requires_grad_() for p in params]
    optimizer = torch.optim.SGD(params, lr=1e-4)
    if first == "compile":
        collage_fx.compile(optimizer, storage="remainder16")
    if not as_bits and first == "compile":
        with pytest.raises(CheckpointError, match=r"residual is torch\.float32"):
            optimizer.load_state_dict(saved)
        return
    optimizer.load_state_dict(saved)
    with pytest.warns(CollageWarning, match="not as they were saved"):
        steps(optimizer, collage_fx.compile(optimizer, storage="remainder16"), 2, 3)


def test_residuals_that_were_saved_apart_come_back_in_their_storage() -> None:
    p = bf16(16)
    optimizer = torch.optim.SGD([p], lr=1e-4)
    steps(optimizer, collage_fx.compile(optimizer, storage="ulp8"), 0, 3)
    other = p.detach().clone()
    collage_fx.load_residuals(other, collage_fx.residuals(p))
    assert torch.equal(collage_fx.value(other), collage_fx.value(p))
    with pytest.raises(ResidualError, match="int32"):
        collage_fx.load_residuals(other, [torch.zeros(16, dtype=torch.int32)])


@WAYS
@pytest.mark.quick("shared", "eager")
def test_a_state_that_the_storage_cannot_hold_is_refused_before_anything_changes(way: str) -> None:
    params = start(MEMBERS[way], torch.float16)
    before = [p.detach().clone() for p in params]
    optimizer = torch.optim.SGD(params, lr=0.1)
    with pytest.raises(StorageError, match=r"remainder16.*float16; 'mcf2'"):
        steps(optimizer, compiled(optimizer, way, storage="remainder16"), 0, 1)
    assert all(torch.equal(a, b) for a, b in zip(params, before, strict=True))
    assert all(STORE.get(p) is None for p in params)


@pytest.mark.parametrize(
    "storage, lr, finer",
    [
        ("mcf2", 1e-3, ""),
        ("mcf2", 1e-7, "'mcf3' or 'remainder16' keeps more"),
        ("ulp8", 1e-7, "'mcf2' or 'mcf3' or 'remainder16' keeps more"),
        ("remainder16", 1e-9, "no storage keeps more"),
    ],
)
@pytest.mark.quick("mcf2-0.001-", "ulp8-*")
def test_explain_says_what_a_storage_keeps_and_when_it_is_too_small(
    storage: str, lr: float, finer: str
) -> None:
    params = start(2, torch.bfloat16)
    for p in params:
        p.grad = torch.ones_like(p)
    found = collage_fx.explain(torch.optim.Adam(params, lr=lr), storage=storage)
    kept = {"mcf2": "7.6e-06", "ulp8": "1.5e-05", "remainder16": "6.0e-08"}[storage]
    row = next(line for line in str(found).splitlines() if "x parameter  " in line)
    assert f"  {storage}  " in row and f"  {kept}  " in row
    assert ("keeps changes of" in str(found)) == bool(finer) and finer in str(found)


def test_explain_of_an_optimizer_is_of_the_step_that_was_assigned_to_it() -> None:
    optimizer = torch.optim.SGD(start(1, torch.bfloat16), lr=1e-4)
    optimizer.step = collage_fx.compile(optimizer, storage="ulp8")  # type: ignore[method-assign]
    (state,) = collage_fx.explain(optimizer).plan
    assert state.storage == "ulp8"


@pytest.mark.parametrize("compile_", [True, False])
@pytest.mark.quick("False")
def test_explain_sees_the_optimizer_behind_the_step_of_a_scheduler(compile_: bool) -> None:
    p = torch.ones(4).bfloat16().requires_grad_()
    p.grad = torch.ones_like(p)
    optimizer = torch.optim.SGD([p], lr=0.1)
    if compile_:
        optimizer.step = collage_fx.compile(optimizer, level="all")  # type: ignore[method-assign]
    torch.optim.lr_scheduler.ConstantLR(optimizer)
    for subject in (optimizer, optimizer.step)[: 1 + compile_]:
        found = collage_fx.explain(subject)
        assert (found.subject, found.config.level) == ("SGD", "all" if compile_ else "auto")
        assert torch.equal(p, torch.ones_like(p))


def test_explain_is_silent_about_updates_of_a_learning_rate_of_zero() -> None:
    params = start(1, torch.bfloat16)
    params[0].grad = torch.ones_like(params[0])
    assert "keeps changes of" not in str(collage_fx.explain(torch.optim.SGD(params, lr=0.0)))
