"""Replicas that are sent what has changed have the bits of the parameters, after many steps.

For changes.taken.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from replicas import Lion, Replica, give, model, sizes
from torch.optim import SGD, Adafactor, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR

import collage_fx
from collage_fx.errors import OptionError, SubjectError
from collage_fx.runtime.residuals import changes
from collage_fx.runtime.residuals.changes import places_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*was cleared"),
    pytest.mark.filterwarnings("ignore:.*makes a new graph"),  # for each rate, on torch 2.11
]
KINDS: dict[str, Callable[[Any], Optimizer]] = {
    "AdamW": lambda params: AdamW(params, lr=1e-3),
    "Lion": lambda params: Lion(params, lr=1e-4),
    "Adafactor": lambda params: Adafactor(params, lr=1e-3),
    "SGD": lambda params: SGD(params, lr=1e-2, momentum=0.9),
}


def synchronised(make: Callable[[Any], Optimizer], steps: int, every: int = 3) -> bool:
    """Train, with all that happens in a training; return whether a replica had the same bits."""
    module = model()
    optimizer = make(module.parameters())
    collage_fx.compile_(optimizer, changed=True)
    scheduler = CosineAnnealingLR(optimizer, steps)
    replica, equal, saved = Replica(module), True, None
    for k in range(steps):
        give(module, k)
        if k % 11 == 5:
            module[0].bias.grad = None
        optimizer.step()
        scheduler.step()
        if k == steps // 4:
            saved = copy.deepcopy((module.state_dict(), optimizer.state_dict()))
        if k == steps // 2:
            assert saved is not None
            module.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        if k == 3 * steps // 4:
            with torch.no_grad():
                module[1].weight.mul_(1.25)
        if k % every == 0:
            replica.sync()
            equal &= replica.is_equal
    replica.sync()
    return equal and replica.is_equal


@pytest.mark.parametrize("kind", KINDS)
def test_a_replica_has_the_same_bits(kind: str) -> None:
    assert synchronised(KINDS[kind], 24)


@pytest.mark.slow
@pytest.mark.kernels
@pytest.mark.parametrize("kind", KINDS)
def test_a_replica_has_the_same_bits_after_a_thousand_steps(kind: str) -> None:
    assert synchronised(KINDS[kind], 1000, every=7)


def test_control_one_place_that_is_left_out_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "places_of", lambda bits: places_of(bits)[:-1])
    assert not synchronised(KINDS["AdamW"], 24)


def test_many_steps_are_one_change() -> None:
    module = model()
    optimizer = collage_fx.compile_(AdamW(module.parameters(), lr=1e-4), changed=True)
    replica = Replica(module)
    for k in range(12):
        give(module, k, share=0.02)
        optimizer.step()
        if k % 4 == 3:
            changed, sent = replica.changed(), replica.sync()
            assert replica.is_equal and sent.keys() >= changed.keys()
            total = sum(sizes(module).values())
            assert sum(changed.values()) <= sum(sent.values()) < total / 8
    assert collage_fx.take_changes(module) == {}


def test_a_tied_parameter_comes_once() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(7, 7), torch.nn.Linear(7, 7)).bfloat16()
    module[1].weight = module[0].weight
    optimizer = collage_fx.compile_(SGD(module.parameters(), lr=0.5), changed=True)
    give(module, 0, share=1.0)
    optimizer.step()
    assert list(collage_fx.take_changes(module)) == ["0.weight", "0.bias", "1.bias"]


def test_what_no_optimizer_trains() -> None:
    module = model()
    module[1].requires_grad_(False)
    optimizer = collage_fx.compile_(SGD(module[0].parameters(), lr=0.5), changed=True)
    give(module, 0, share=1.0)
    optimizer.step()
    assert collage_fx.take_changes(module).keys() == {"0.weight", "0.bias"}
    module[1].requires_grad_(True)
    with pytest.raises(OptionError, match=r"changes of 1\.weight, 1\.bias are not noted.*freeze"):
        collage_fx.take_changes(module)
    collage_fx.compile_(SGD(module[1].parameters(), lr=0.5), changed=True)
    assert collage_fx.take_changes(module) == {}
    with pytest.raises(SubjectError, match="got SGD"):
        collage_fx.take_changes(optimizer)  # type: ignore[arg-type]


def test_signs_of_zero_and_nan_are_bits() -> None:
    module = model()
    with torch.no_grad():
        module[0].weight.zero_()
    optimizer = collage_fx.compile_(SGD(module.parameters(), lr=1.0), changed=True)
    replica = Replica(module)
    with torch.no_grad():
        module[0].weight.neg_()
    assert replica.sync()["0.weight"] == 37 * 19 and replica.is_equal
    give(module, 0, share=0.0)
    module[0].weight.grad[0, 3], module[0].weight.grad[1, 4] = torch.nan, 2.0
    optimizer.step()
    changed = replica.changed()
    assert changed["0.weight"] >= 2  # -0.0 - 0.0 is -0.0; what is NaN or moved counts
    assert replica.sync()["0.weight"] == changed["0.weight"] and replica.is_equal
