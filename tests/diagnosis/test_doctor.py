"""collage_fx/diagnosis: what a doctor sees of the steps of optimizers that are not compiled.

For diagnosis.looks and diagnosis.tally.
"""

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD, Adafactor, AdamW, Muon, Optimizer

import collage_fx
from collage_fx.diagnosis import looks
from collage_fx.diagnosis.doctor import Doctor
from collage_fx.diagnosis.finding import Finding

BF16 = torch.bfloat16
Make = Callable[[list[Parameter]], Optimizer]


class Normed(Optimizer):
    """Updates that are as long as the parameter: what is done to an element depends on all."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-3})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad * (p.norm() / p.grad.norm()), alpha=self.param_groups[0]["lr"])


class Mastered(Optimizer):
    """Steps on an fp32 copy of each weight."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            master = state.setdefault("master", p.float() * 1.0001)
            master.sub_(p.grad.float(), alpha=1e-5)
            p.copy_(master)


class Noisy(SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for p in self.param_groups[0]["params"]:
            p.add_(torch.randn_like(p) * random.random(), alpha=1e-2)


def trained(
    make: Make, *, steps: int = 6, looked: bool = True, closure: bool = False, shape: Any = (80, 60)
) -> tuple[list[Tensor], Finding | None]:
    torch.manual_seed(0)
    random.seed(0)
    params = [Parameter(torch.randn(shape).to(BF16)), Parameter(torch.ones(7, dtype=BF16))]
    optimizer = make(params)
    doctor = collage_fx.doctor(optimizer) if looked else None
    draw = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for p in params:
            p.grad = torch.randn(p.shape, generator=draw).to(BF16)
        grads = [p.grad for p in params]

        def again(grads: Any = grads) -> None:
            for p, g in zip(params, grads, strict=True):
                p.grad = g

        if closure:
            optimizer.zero_grad()
            optimizer.step(again)  # type: ignore[arg-type]
        else:
            optimizer.step()
    if doctor is not None:
        doctor.stop()
    return [p.detach() for p in params], doctor.finding() if doctor is not None else None


def exact_shares(make: Make, steps: int = 4) -> tuple[float, float]:
    """The share of updates that are lost whole, and EDQ, of all elements, each step in float64."""
    torch.manual_seed(0)
    p = Parameter(torch.randn(80, 60).to(BF16))
    optimizer = make([p])
    draw = torch.Generator().manual_seed(1)
    found = torch.zeros(4, dtype=torch.float64)
    for _ in range(steps):
        p.grad = torch.randn(p.shape, generator=draw).to(BF16)
        twin = copy.deepcopy(optimizer)
        (q,) = twin.param_groups[0]["params"]
        q.data, q.grad = p.detach().double(), p.grad.double()
        for name, state in twin.state[q].items():
            twin.state[q][name] = state.double() if state.dim() else state
        before = q.detach().clone()
        twin.step()
        optimizer.step()
        exact, stored = q.detach() - before, p.detach().double() - before
        lost = (exact != 0) & (stored == 0)
        found += torch.stack(
            [lost.sum(), (exact != 0).sum(), (exact * stored).sum(), (exact * exact).sum()]
        )
    lost_count, count, dot, square = found.tolist()
    return lost_count / count, dot / square


@pytest.mark.parametrize(
    "make",
    [
        lambda p: AdamW(p, lr=1e-3),
        lambda p: AdamW(p, lr=1e-5, foreach=True),
        lambda p: SGD(p, lr=1e-3, momentum=0.9),
        lambda p: Adafactor(p, lr=1e-3),
        Normed,
    ],
    ids=["adamw", "foreach", "momentum", "adafactor", "normed"],
)
def test_shares_are_those_of_all_elements_in_float64(
    make: Make, doctors: list[Doctor], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert looks.ELEMENTS < 4800
    torch.manual_seed(0)
    p = Parameter(torch.randn(80, 60).to(BF16))
    optimizer = make([p])
    doctors.append(collage_fx.doctor(optimizer))
    draw = torch.Generator().manual_seed(1)
    for _ in range(4):
        p.grad = torch.randn(p.shape, generator=draw).to(BF16)
        optimizer.step()
    (row,) = doctors[0].finding().parameters
    lost, edq = exact_shares(make)
    near = 0.05 if row.exact else 0.2  # fitted
    assert abs(row.lost - lost) < near and abs(row.edq - edq) < near
    assert row.exact or isinstance(optimizer, Adafactor | Normed)
    assert row.tensors == 1 and row.elements == 4800


@pytest.mark.parametrize(
    "make",
    [
        lambda p: AdamW(p, lr=1e-4),
        lambda p: AdamW(p, lr=1e-4, fused=True),
        lambda p: Muon(p[:1], lr=1e-4),
        Noisy,
    ],
    ids=["adamw", "fused", "muon", "noisy"],
)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.quick("False-adamw", "False-noisy")
def test_no_bit_of_a_run_changes(make: Make, compiled: bool) -> None:
    def made(params: list[Parameter]) -> Optimizer:
        optimizer = make(params)
        if compiled:
            optimizer.step = torch.compile(optimizer.step, backend="aot_eager")  # type: ignore[method-assign]
        return optimizer

    with_doctor, finding = trained(made)
    drawn = torch.rand(1), random.random()
    without, _ = trained(made, looked=False)
    assert drawn == (torch.rand(1), random.random())
    assert all(map(torch.equal, with_doctor, without))
    assert finding is not None
    if finding.status == "unknown":  # not by the fused kernel, which Dynamo leaves to Python
        assert compiled and "TORCH_COMPILE_DISABLE=1" in str(finding)


def test_a_closure_and_a_step_that_is_not_taken() -> None:
    def make(params: list[Parameter]) -> Optimizer:
        return SGD(params, lr=1e-3)

    direct, by_closure = trained(make)[1], trained(make, closure=True)[1]
    assert direct is not None and by_closure is not None
    assert direct.parameters == by_closure.parameters and all(r.exact for r in direct.parameters)
    p = Parameter(torch.ones(4, dtype=BF16))
    optimizer = AdamW([p], lr=1e-3, fused=True)
    with collage_fx.doctor(optimizer) as doctor:
        optimizer.step()  # no gradient
        p.grad = torch.ones_like(p)
        optimizer.grad_scale, optimizer.found_inf = None, torch.ones(())  # type: ignore[attr-defined]
        optimizer.step()
    assert doctor.finding().seen[0].looks == 0


def test_wide_weights_and_masters_lose_nothing_and_a_compensated_step_is_named() -> None:
    params = [Parameter(torch.randn(40, 30))]
    for make, said in (
        (lambda: AdamW(params, lr=1e-5), "the weights are float32"),
        (lambda: Mastered([Parameter(torch.randn(40, 30).to(BF16))]), "the states master"),
        (lambda: SGD([Parameter(torch.randn(40, 30).to(BF16))], lr=1.0), "large enough"),
        (lambda: _compensated(), "collage_fx compensates the steps of SGD"),
    ):
        optimizer = make()  # type: ignore[no-untyped-call]
        with collage_fx.doctor(optimizer) as doctor:
            for _ in range(3):
                for p in optimizer.param_groups[0]["params"]:
                    p.grad = torch.randn_like(p)
                optimizer.step()
        finding = doctor.finding()
        assert finding.status == "fine" and said in str(finding), str(finding)


def _compensated() -> Optimizer:
    return collage_fx.compile_(SGD([Parameter(torch.randn(4).to(BF16))], lr=1e-4))


def test_an_average_that_cannot_decay_is_named() -> None:
    def averaged(dtype: torch.dtype) -> Finding:
        p = Parameter(torch.randn(30, 40, generator=torch.Generator().manual_seed(0)).to(dtype))
        optimizer = AdamW([p], lr=1e-2)
        draw = torch.Generator().manual_seed(1)
        with collage_fx.doctor(optimizer) as doctor:
            for step in range(60):
                # Its gradients become small: the average of their squares is to become small too.
                p.grad = torch.randn(p.shape, generator=draw).to(dtype) * (1 if step < 6 else 0.01)
                optimizer.step()
        return doctor.finding()

    finding = averaged(BF16)
    (squares,) = [r for r in finding.averages if r.name == "exp_avg_sq"]
    assert squares.biased and squares.missing < -0.3 and squares.lost > 0.5
    assert "exp_avg_sq too large (" in str(finding)
    assert not averaged(torch.float32).averages


def test_a_sample_that_steps_otherwise_is_told_where_all_updates_are_lost() -> None:
    params = [Parameter(torch.ones(shape, dtype=BF16)) for shape in ((80, 60), (30, 30))]
    optimizer = Adafactor(params, lr=1e-6)
    with collage_fx.doctor(optimizer) as doctor:
        p, q = params
        p.grad, q.grad = (torch.randn(x.shape).to(BF16) for x in params)
        optimizer.step()  # the first, in which a sample has no states of other sizes
    large, small = doctor.finding().parameters
    assert large.lost == small.lost == 1.0
    assert small.exact and not large.exact  # of which the sample is no matrix
