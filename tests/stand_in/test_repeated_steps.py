"""Steps that are done again as the last was, beside the same steps done as any other.

For stand_in.repeated_step, stand_in.group_numbers and binding.launches.
"""

import functools
import gc
import types
import weakref
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from interpreter import without_compiler
from repeated_steps import (
    CHANGES,
    by_turns,
    changing,
    compare,
    counted,
    give_gradients,
    made,
    params,
    params_of,
    trained,
    write,
)
from torch import Tensor
from torch.optim import SGD, Adafactor, Adam, AdamW, Muon, NAdam, Optimizer

import collage_fx
from collage_fx.passes.codegen import inductor_compile
from collage_fx.runtime.kernels.tensor_snapshot import TensorSnapshot

pytestmark = pytest.mark.kernels


CASES = [
    (AdamW, {"lr": 1e-3}, "mcf2"),
    (AdamW, {"lr": 1e-3, "fused": True}, "remainder16"),
    (Adam, {"lr": 1e-3, "amsgrad": True, "foreach": True}, "mcf2"),
    (SGD, {"lr": 1e-2, "momentum": 0.9}, "mcf2"),
    (NAdam, {"lr": 1e-3}, "remainder16"),
    (AdamW, {"lr": 1e-3, "by_chance": True}, "mcf2"),
    (AdamW, {"lr": 1e-3}, "sr"),
    (AdamW, {"lr": 1e-3}, "ulp4"),
]


@pytest.mark.parametrize(("kind", "options", "storage"), CASES)
@pytest.mark.quick("AdamW-options7-*")
def test_same_bits(
    monkeypatch: pytest.MonkeyPatch, kind: Any, options: dict[str, Any], storage: str
) -> None:
    repeats = compare(monkeypatch, lambda: made(kind, storage, **options), 12)
    assert len(repeats) >= 7


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Muon, Adafactor])
def test_steps_that_are_compiled_in_parts(monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
    """As where a step reduces: a weight is written before one step, later the rate changes."""
    shapes = [(4, 3)] * 9 + [(2, 6)] * 2

    def change(optimizer: Optimizer, i: int) -> None:
        if i == 7:
            write(optimizer)
        optimizer.param_groups[0]["lr"] = 1e-2 if i < 9 else 1e-3

    def steps(count: int) -> list[int]:
        make = functools.partial(made, kind, "mcf2", sizes=shapes, lr=1e-2)
        return compare(monkeypatch, make, count, change)

    own, last = TensorSnapshot.unchanged, [torch.zeros(())]

    def blind(self: TensorSnapshot, *compared: Any) -> list[Tensor]:
        last[:] = own(self, *compared) or last
        return last

    with without_compiler():
        repeats = steps(16)
        assert {5, 6, 15} <= {*repeats} and 7 not in repeats, repeats
        monkeypatch.setattr(TensorSnapshot, "unchanged", blind)
        with pytest.raises(AssertionError):
            steps(9)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Muon, Adafactor])
def test_a_part_that_compensates_nothing(monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
    """The part has no residuals; each of the others keeps its own."""

    def beside_fp32() -> Optimizer:
        optimizer = made(kind, "mcf2", sizes=[(4, 3)] * 8, lr=1e-2)
        optimizer.add_param_group({"params": params(1, [(4, 3)] * 8), "lr": 2e-2})
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(5, 3))]})
        return optimizer

    with without_compiler():
        assert len(compare(monkeypatch, beside_fp32, 7)) >= 3


def test_left_out_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with counted(monkeypatch, allowed=True) as repeats:
        optimizer = AdamW(params(0))
        step = collage_fx.compile(optimizer, without=("repeat",))
        for i in range(6):
            give_gradients(optimizer, i)
            step()
    assert not repeats


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        pytest.param(AdamW, {}, marks=pytest.mark.slow),
        (SGD, {"momentum": 0.9, "weight_decay": 0.1}),
        pytest.param(SGD, {"nesterov": True, "momentum": 0.9}, marks=pytest.mark.slow),
    ],
)
def test_rates_that_change(
    monkeypatch: pytest.MonkeyPatch, kind: Any, options: dict[str, Any]
) -> None:
    """A schedule makes the rate an input of the graph, and each step has another.

    Nothing but numbers, such as the negative rate, is then left to compile beside our kernels.
    """

    def schedule(optimizer: Optimizer, i: int) -> None:
        optimizer.param_groups[0]["lr"] = 1e-2 / (i + 1)
        optimizer.param_groups[1]["lr"] = 1e-3 * (i + 1)

    def two_groups() -> Optimizer:
        optimizer = made(kind, "mcf2", lr=1e-3, **options)
        optimizer.add_param_group({"params": params(1)[:2]})
        return optimizer

    inductor = Mock()
    monkeypatch.setattr(inductor_compile, "compile_functional", inductor)
    repeats = compare(monkeypatch, two_groups, 16, schedule)
    assert len(repeats) >= 5
    assert not inductor.called


def momenta(optimizer: Optimizer, i: int) -> None:
    """Change rate and momentum as OneCycleLR does; in the end to 0, for which Dynamo has guards."""
    group = optimizer.param_groups[0]
    group["lr"], group["momentum"] = 1e-2 / (i + 1), 0.8 + 0.01 * i if i < 12 else 0.0


def betas(optimizer: Optimizer, i: int) -> None:
    """Change the first beta in each step, and the second, which is a constant, in one."""
    group = optimizer.param_groups[0]
    group["lr"], group["betas"] = 1e-2 / (i + 1), (0.8 + 0.01 * i, 0.99 if i == 12 else 0.999)


@pytest.mark.parametrize(
    ("kind", "options", "cycle"),
    [(SGD, {"momentum": 0.9}, momenta), pytest.param(AdamW, {}, betas, marks=pytest.mark.slow)],
)
def test_momenta_that_change(
    monkeypatch: pytest.MonkeyPatch, kind: Any, options: dict[str, Any], cycle: Any
) -> None:
    """Steps are repeated while what Dynamo has guarded of such numbers holds."""
    make = functools.partial(made, kind, "mcf2", lr=1e-3, **options)
    repeats = compare(monkeypatch, make, 16, cycle)
    assert {6, 7, 8, 9, 10, 11} <= {*repeats}
    assert not {12, 13} & {*repeats}


@pytest.mark.slow
def test_closures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is called once, with gradients on, and its loss returned, whoever does the step."""
    calls: list[bool] = []

    def step(optimizer: Optimizer, i: int) -> None:
        def closure() -> int:
            calls.append(torch.is_grad_enabled())
            give_gradients(optimizer, i)
            return i

        if i == 8:
            optimizer.param_groups[0]["lr"] = 3e-3
        loss: Any = optimizer.step(closure) if i % 2 else optimizer.step(closure=closure)  # type: ignore[call-overload]
        assert loss == i

    def steps() -> Optimizer:
        optimizer = made(AdamW, "mcf2", lr=1e-3)
        with torch.no_grad():
            for i in range(12):
                step(optimizer, i)
        return optimizer

    assert len(compare(monkeypatch, steps, 2)) >= 6
    assert calls == [True] * 24


REBOUND = {"written", "data", "residual", "loaded", "gradients off"}
"""Changes after which the same kernels do the step, over the tensors and residuals that there
are now."""
FEW = ("written", "data", "no gradient", "residual", "stance", "state lost", "wrong call")


def test_what_has_changed_by_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before one step each, and in that step only; steps are repeated again in between."""
    names = {7 + 6 * k: name for k, name in enumerate(FEW)}
    make = functools.partial(made, AdamW, "mcf2", lr=1e-3)
    repeats = compare(monkeypatch, make, 7 + 6 * len(FEW), by_turns(names))
    found = {name: (i - 1 in repeats, i in repeats) for i, name in names.items()}
    assert found == {name: (True, name in REBOUND) for name in FEW}


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGES)
def test_what_has_changed(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Before one step, and in that step only."""
    repeats = compare(monkeypatch, lambda: made(AdamW, "mcf2", lr=1e-3), 14, changing(name, 7))
    assert 6 in repeats and (7 in repeats) is (name in REBOUND)


def test_control(monkeypatch: pytest.MonkeyPatch) -> None:
    """If nothing were compared, a residual would be added to a value that it does not belong to."""
    own = TensorSnapshot.unchanged

    def blind(self: TensorSnapshot, *compared: Any) -> list[Tensor]:
        return own(self, *compared) or [torch.zeros(())]

    monkeypatch.setattr(TensorSnapshot, "unchanged", blind)
    with pytest.raises(AssertionError):
        compare(
            monkeypatch,
            lambda: made(AdamW, "mcf2", lr=1e-3),
            10,
            lambda optimizer, i: write(optimizer) if i == 7 else None,
        )


@pytest.mark.parametrize("refers", [False, True])
def test_is_let_go_of(refers: bool) -> None:
    """A repeated step keeps no optimizer alive that nobody else needs."""
    optimizer = made(AdamW, "mcf2", lr=1e-3)
    if refers:  # as where a framework patches a method
        vars(optimizer)["zero_grad"] = types.MethodType(AdamW.zero_grad, optimizer)
    trained(optimizer, 6)
    gone = [weakref.ref(optimizer), *map(weakref.ref, params_of(optimizer))]
    del optimizer
    gc.collect()
    assert not any(reference() is not None for reference in gone)
