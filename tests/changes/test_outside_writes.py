"""Writes from outside of steps: all of a tensor counts as changed, once.

For runtime.residuals.changes and record.steps.
"""

import copy
import gc

import pytest
import torch
from interpreter import without_compiler
from replicas import Lion, Replica, follow, give, model, sizes
from torch.optim import SGD, AdamW

import collage_fx
from collage_fx.record import steps

pytestmark = pytest.mark.filterwarnings("ignore:.*was cleared")


def test_a_write_from_outside_marks_all_of_a_tensor() -> None:
    module = model()
    optimizer = collage_fx.compile_(AdamW(module.parameters(), lr=1e-4), changed=True)
    replica = Replica(module)
    for k in range(6):
        give(module, k)
        optimizer.step()
        whole = []
        if k == 2:
            with torch.no_grad():
                module[0].weight[0, 0] += 1
            whole = ["0.weight"]
        if k == 4:
            module[1].bias.data = module[1].bias.data.clone()
            whole = ["1.bias"]
        sent = replica.sync()
        assert replica.is_equal
        assert {n: sent[n] for n in whole} == sizes(module, whole) or not whole
        assert "0.weight" in whole or sent["0.weight"] < 37 * 19 / 2


def test_a_load_marks_all_tensors_once() -> None:
    module = model()
    optimizer = collage_fx.compile_(AdamW(module.parameters(), lr=1e-4), changed=True)
    follow(module, optimizer, steps=3)
    saved = copy.deepcopy((module.state_dict(), optimizer.state_dict()))
    follow(module, optimizer, first=3, steps=2)
    replica = Replica(module)
    module.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    assert replica.sync() == sizes(module) and replica.is_equal
    follow(module, optimizer, first=5, steps=2)
    module.load_state_dict(saved[0])  # and nobody asks before the next step
    optimizer.load_state_dict(saved[1])
    give(module, 7)
    optimizer.step()
    assert replica.sync() == sizes(module) and replica.is_equal


def test_storages_that_residuals_are_converted_to() -> None:
    """The first word may be another one then, which is written through `.data`."""
    module = model()
    optimizer = collage_fx.compile_(AdamW(module.parameters(), lr=1e-4), changed=True)
    follow(module, optimizer, steps=2)
    replica = Replica(module)
    collage_fx.convert_residuals(optimizer, "mcf2")
    assert replica.sync() == sizes(module) and replica.is_equal


def test_parameters_that_are_added() -> None:
    module = model()
    module[1].requires_grad_(False)
    optimizer = collage_fx.compile_(Lion(module[0].parameters()), changed=True)
    replica = Replica(module)
    for k in range(5):
        if k == 3:
            module[1].requires_grad_(True)
            optimizer.add_param_group({"params": list(module[1].parameters())})
        give(module, k)
        optimizer.step()
        changed, sent = replica.changed(), replica.sync()
        assert sent == changed | (sizes(module, ["1.weight", "1.bias"]) if k == 3 else {})
        assert replica.is_equal


def test_another_optimizer_that_notes_nothing() -> None:
    module = model()
    optimizer = collage_fx.compile_(SGD(module.parameters(), lr=1e-3), changed=True)
    other = collage_fx.compile_(SGD(module.parameters(), lr=1e-3, momentum=0.5))
    replica = Replica(module)
    for k in range(10):
        give(module, k)
        (optimizer if k % 2 else other).step()
        if k % 3:
            replica.sync()
            assert replica.is_equal


def test_other_memory_at_the_same_address() -> None:
    """The allocator may give an address again, and no version counts other memory."""
    module = torch.nn.Linear(64, 64, bias=False).bfloat16()
    optimizer = collage_fx.compile_(AdamW(module.parameters(), lr=1e-4), changed=True)
    follow(module, optimizer, steps=3)
    replica, weight = Replica(module), module.weight
    first = weight.data_ptr()
    for k in range(64):
        weight.data = weight.data.mul(1.5)
        if k and weight.data_ptr() == first:
            break
    assert replica.sync() == sizes(module) and replica.is_equal
    weight.data = weight.data.t()
    assert replica.sync() == sizes(module) and replica.is_equal


def test_an_optimizer_that_is_gone() -> None:
    """The last changes are there to be taken, also of a model that is frozen then."""
    module = model()
    optimizer = collage_fx.compile_(AdamW(module.parameters(), lr=1e-3), changed=True)
    replica = Replica(module)
    give(module, 0)
    optimizer.step()
    del optimizer
    gc.collect()
    module.requires_grad_(False)
    changed = replica.changed()
    assert changed and replica.sync() == changed and replica.is_equal


def test_a_class_that_compiles_its_own_step_notes_from_the_beginning() -> None:
    module = model()
    optimizer = collage_fx.optim.AdamW(module.parameters(), lr=1e-4, changed=True)
    replica = Replica(module)
    assert replica.sync() == {}
    with torch.no_grad():
        module[0].weight.mul_(2)
    give(module, 0)
    optimizer.step()
    assert replica.sync()["0.weight"] == 37 * 19 and replica.is_equal
    follow(module, optimizer, first=1, steps=2)


class TwoSteps(SGD):
    """Takes its step by another method too."""

    def second_step(self) -> None:
        self.step()


def test_a_method_that_takes_the_step() -> None:
    module = model()
    optimizer = collage_fx.compile_(TwoSteps(module.parameters(), lr=1e-3), changed=True)
    replica = Replica(module)
    for k in range(4):
        give(module, k)
        optimizer.second_step() if k % 2 else optimizer.step()
        changed = replica.changed()
        assert replica.sync() == changed and replica.is_equal


@pytest.mark.parametrize("noted", [True, pytest.param(False, id="control")])
def test_a_function_writes_through_a_view(noted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The version of the parameter does not count what is written to `p.data`."""
    if not noted:
        monkeypatch.setattr(steps, "note_write", lambda tensor: None)
    module = model()
    optimizer = collage_fx.compile_(AdamW(module.parameters(), lr=1e-4), changed=True)
    scaled = collage_fx.compile(torch.no_grad()(lambda rows: rows.mul_(1.5)))
    with without_compiler():
        follow(module, optimizer, steps=2)
        replica, equal = Replica(module), []
        for k in range(3):
            give(module, k)
            optimizer.step()
            scaled(module[0].weight.data[:2])
            replica.sync()
            equal.append(replica.is_equal)
    assert equal == [noted] * 3
