"""A step that a number on the device leaves out: what does not look there asks, and ends it.

Kernels on a GPU do look: `tests/support/interpreted.py` has that, `tests/emulated` the launches.

For runtime.kernels.left_out and compilation.partition.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Adafactor, AdamW, Optimizer

import collage_fx
from collage_fx.compilation.partition import Direct
from collage_fx.compilation.side_inputs import Noted
from collage_fx.optimizer.ownership import owned_tensors
from collage_fx.runtime.kernels.left_out import ask, is_open, left_out_if

WAYS: dict[str, tuple[type[Optimizer], int, dict[str, Any]]] = {
    "a kernel": (AdamW, 9, {}),
    "every parameter by itself": (AdamW, 2, {}),
    "by chance": (AdamW, 9, {"arithmetic": "wide", "stochastic_rounding": True}),
    "recorded": (Adafactor, 2, {}),
    "recorded from the first step": (AdamW, 2, {"record": True}),
    "at once": (Adafactor, 2, {"record": False}),
}


def params(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    made = (torch.randn(4, 3, generator=generator).bfloat16() for _ in range(count))
    return [p.requires_grad_() for p in made]


def begun(way: str) -> tuple[Optimizer, Callable[[], Any]]:
    """Return an optimizer after four steps, and its step."""
    kind, count, options = WAYS[way]
    optimizer = kind(params(count), lr=1e-3)
    step = collage_fx.compile(optimizer, level="plus", without=("numbers", "repeat"), **options)
    for k in range(4):
        fill(optimizer, 0.1 * k + 0.01)
        step()
    return optimizer, step


def fill(optimizer: Optimizer, value: float) -> None:
    """Give all parameters gradients."""
    for p in optimizer.param_groups[0]["params"]:
        p.grad = torch.full((4, 3), value).bfloat16()
        p.grad[0] = value / 3


def words(optimizer: Optimizer) -> list[Tensor]:
    """Return copies of all that a step carries: parameters, states, counts and residuals."""
    tensors = [owned.tensor for owned in owned_tensors(optimizer)]
    found = [t.detach() for t in tensors] + [r for t in tensors for r in collage_fx.residuals(t)]
    return [t.clone() for t in found]


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.quick("recorded from*")
def test_what_does_not_look_on_the_device_asks_before_it_writes(way: str) -> None:
    (ours, step), (theirs, other) = begun(way), begun(way)
    before = words(ours)
    assert len(before) > 2 * len(ours.param_groups[0]["params"])
    fill(ours, torch.nan)
    for _ in range(2):
        with left_out_if(torch.tensor(1.0)):
            step()
            raise AssertionError("the step did not end")
        assert same(words(ours), before)
    fill(ours, 0.3)
    fill(theirs, 0.3)
    with left_out_if(torch.tensor(0.0)):
        step()
    other()
    assert same(words(ours), words(theirs)) and not same(words(ours), before)


def test_asked_once_it_is_known() -> None:
    ask()  # with no number nothing is left out
    with left_out_if(torch.tensor(0.0)):
        assert is_open()
        ask()
        assert not is_open()
    done = False
    with left_out_if(torch.tensor(2.0)):
        try:
            ask()
        except Exception:  # Dynamo would go on
            done = True
        done = True
    assert not done and not is_open()


@pytest.mark.parametrize("reads", [True, False])
def test_only_who_reads_what_kernels_write_has_them_wait(
    monkeypatch: pytest.MonkeyPatch, reads: bool
) -> None:
    optimizer, step = begun("a kernel")  # whose graph is looked at in each step, to be kept
    assert not Noted.reads
    monkeypatch.setattr(Direct, "may_be_left_out", True)  # as on a GPU
    monkeypatch.setattr(Noted, "reads", reads)
    fill(optimizer, 0.3)
    with left_out_if(torch.tensor(0.0)):
        step()
        assert is_open() != reads


def test_a_repeated_step_of_a_fused_optimizer_is_left_out() -> None:
    optimizer = AdamW(params(9), lr=1e-3, fused=True)
    optimizer.step = collage_fx.compile(optimizer)  # type: ignore[method-assign]
    scaler = GradScaler("cpu", init_scale=4.0)
    for k in range(8):
        scaler.scale(torch.ones(()))
        fill(optimizer, torch.inf if k in (1, 6) else 0.5)
        before = words(optimizer)
        scaler.step(optimizer)
        scaler.update()
        if k:
            assert same(before, words(optimizer)) == (k in (1, 6))
