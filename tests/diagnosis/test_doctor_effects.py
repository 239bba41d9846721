"""collage_fx/diagnosis: a run with a doctor has no effects that it has not without one.

For diagnosis.doctor.
"""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch.nn import Parameter
from torch.optim import SGD, AdamW

import collage_fx
from collage_fx.diagnosis.doctor import Doctor

BF16 = torch.bfloat16


class Effects(SGD):
    """A step that counts and draws."""

    calls = 0
    draw = torch.Generator()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        Effects.calls += 1
        super().step()
        for p in self.param_groups[0]["params"]:
            p.add_(torch.rand(p.shape, generator=Effects.draw), alpha=1e-2)


def test_code_of_a_user_runs_once_and_a_step_within_a_step_is_one(doctors: list[Doctor]) -> None:
    plain = SGD([Parameter(torch.ones(2))], lr=1e-3)  # from then on steps of SGD have hooks
    p = Parameter(torch.ones(2000, dtype=BF16))
    doctors.append(collage_fx.doctor(Effects([p], lr=1e-3)))
    optimizer = doctors[0].lookers[0].optimizer()
    assert optimizer is None  # which is not kept alive
    optimizer = Effects([p], lr=1e-3)
    doctors.append(collage_fx.doctor(optimizer))
    for step in range(4):
        p.grad = torch.ones_like(p)
        optimizer.step()
        if step == 1:
            with pytest.raises(TypeError):
                optimizer.step(1, 2)  # type: ignore[call-arg]
    assert Effects.calls == 4 and plain is not None
    found = doctors[1].finding()
    assert found.seen[0].steps == 5 and "may have effects" in found.seen[0].estimated
    (row,) = found.parameters
    assert not row.exact and row.edq > 0.5 and row.never_moved < 0.5  # with what it draws


def test_tensors_are_not_kept_alive(doctors: list[Doctor]) -> None:
    p = Parameter(torch.ones(3000, dtype=BF16))
    optimizer = AdamW([p], lr=1e-3)
    doctors.append(collage_fx.doctor(optimizer))
    p.grad = torch.ones_like(p)
    optimizer.step()
    alive = [weakref.ref(t) for t in (p, optimizer.state[p]["exp_avg"])]
    del p, optimizer
    gc.collect()
    assert [ref() for ref in alive] == [None, None]
    assert doctors[0].finding().parameters[0].elements == 3000


def test_what_is_lost_is_not_made_up_for_by_what_is_rounded_up() -> None:
    """Half of the elements never move, and the others by a third too much."""
    p = Parameter(torch.ones(2000, dtype=BF16) * torch.tensor([1.0, 1.99]).repeat(1000).to(BF16))
    optimizer = SGD([p], lr=2.0**-8 * 0.75)
    with collage_fx.doctor(optimizer) as doctor:
        p.grad = -torch.ones_like(p)
        p.grad[1::2] /= 2
        optimizer.step()
    (row,) = doctor.finding().parameters
    assert row.gone > 0.1 and row.losing and row.loss == max(row.gone, 1 - row.edq)
