"""Steps that leave zeros where they have read gradients; with clipping and without.

For gradients.scaled_step and passes.frontend.canonicalize.
"""

import copy
from typing import Any

import pytest
import torch
from clipped_runs import LR, NORM, Descent, error, exactly, give, params
from torch.amp import GradScaler
from torch.optim import SGD, Adafactor, AdamW, RMSprop

import collage_fx

CLIPS = {"clip_grad_norm": NORM}
KINDS = pytest.mark.parametrize("kind", [SGD, AdamW, Adafactor, RMSprop, Descent])


def accumulate(optimizer: Any, k: int) -> list[Any]:
    """Add the gradients of a step to what is there."""
    given = optimizer.param_groups[0]["params"]
    before = [p.grad for p in given]
    fresh = [g.clone() for g in give(optimizer, k)]
    for p, old, new in zip(given, before, fresh, strict=True):
        p.grad = new if old is None else old.add_(new)
    return [p.grad for p in given]


def run(kind: Any, **options: Any) -> Any:
    optimizer = kind(params(), lr=LR if kind in (SGD, Descent) else 1e-3)
    collage_fx.compile_(optimizer, zero_grads=True, **options)
    for k in range(8):
        found = accumulate(optimizer, k)
        versions = [g._version for g in found]
        optimizer.step()
        after = [p.grad for p in optimizer.param_groups[0]["params"]]
        assert list(map(id, after)) == list(map(id, found))
        assert not any(g.any() for g in found)
        assert all(g._version > before for g, before in zip(found, versions, strict=True))
    return optimizer


@KINDS
@pytest.mark.parametrize("clips", [{}, CLIPS])
@pytest.mark.quick("clips1-SGD", "clips1-Descent", "clips0-AdamW")
def test_steps_are_those_of_fresh_gradients(kind: Any, clips: Any) -> None:
    optimizer = run(kind, **clips)
    other = kind(params(), lr=optimizer.param_groups[0]["lr"])
    collage_fx.compile_(other, **clips)
    for k in range(8):
        give(other, k)
        other.step()
    pairs = zip(optimizer.param_groups[0]["params"], other.param_groups[0]["params"], strict=True)
    assert all(torch.equal(collage_fx.value(p), collage_fx.value(q)) for p, q in pairs)


@pytest.mark.kernels
def test_one_kernel_reads_and_zeroes() -> None:
    optimizer = run(SGD, clip_grad_norm=NORM)
    assert error(optimizer, exactly(lr=LR)) < 2.0**-19
    session = optimizer.step._collage
    assert session.graphs == 1 and session.calls < 4
    explained = collage_fx.explain(optimizer)
    assert len(explained.kernels) == 1 and "copy_" not in explained.after[0].code


def test_zeros_stand_where_there_were_no_numbers() -> None:
    optimizer = SGD(params(), lr=LR)
    collage_fx.compile_(optimizer, zero_grads=True)
    for k in range(4):
        found = give(optimizer, k)
        found[0][0, 0], found[1][1, 1] = torch.nan, -torch.inf
        optimizer.step()
        assert not any(g.any() for g in found)


@pytest.mark.parametrize(("clips", "fused"), [({}, True), (CLIPS, True), (CLIPS, False)])
def test_a_step_that_is_left_out_zeroes_too(clips: Any, fused: bool) -> None:
    optimizer = AdamW(params(), lr=1e-3, fused=fused)
    collage_fx.compile_(optimizer, zero_grads=True, **clips)
    scaler = GradScaler("cpu", init_scale=4.0)
    for k in range(4):
        scaler.scale(torch.ones(1))
        found = give(optimizer, k)
        before = [p.clone() for p in optimizer.param_groups[0]["params"]]
        if k == 2:
            found[0][0, 0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        after = optimizer.param_groups[0]["params"]
        assert all(map(torch.equal, before, after)) is (k == 2)
        assert not any(g.any() for g in found)


def test_checkpoints_are_as_without() -> None:
    optimizer = run(AdamW)
    loaded = AdamW(params(), lr=1e-3)
    collage_fx.compile_(loaded, zero_grads=True)
    with torch.no_grad():
        for p, q in zip(
            loaded.param_groups[0]["params"], optimizer.param_groups[0]["params"], strict=True
        ):
            p.copy_(q)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one in (optimizer, loaded):
        give(one, 9)
        one.step()
    pairs = zip(loaded.param_groups[0]["params"], optimizer.param_groups[0]["params"], strict=True)
    assert all(torch.equal(collage_fx.value(p), collage_fx.value(q)) for p, q in pairs)
