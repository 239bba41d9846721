"""Gradients are clipped in the step: as exactly as in float64, and left as they are.

For gradients.clipping.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from clipped_runs import (
    LR,
    NORM,
    Descent,
    Writing,
    Zeroing,
    error,
    exactly,
    give,
    gradients,
    norm_of,
    params,
)
from torch import Tensor
from torch.optim import SGD, Adafactor, AdamW, Optimizer, RMSprop

import collage_fx
from collage_fx.errors import NonFiniteError, OptionError

ROUNDED = 2.0**-11
"""Least error where products are rounded to bf16."""


def run(optimizer: Any, steps: int = 8, **options: Any) -> Any:
    collage_fx.compile_(optimizer, **{"clip_grad_norm": NORM, **options})
    for k in range(steps):
        before = [g.clone() for g in give(optimizer, k)]
        optimizer.step()
        after = [p.grad for p in optimizer.param_groups[0]["params"]]
        assert all(map(torch.equal, before, after))
        assert optimizer.step.grad_norm == pytest.approx(float(norm_of(before)), rel=1e-6)
    return optimizer


def apart(optimizer: Any, steps: int = 8) -> Any:
    collage_fx.compile_(optimizer)
    for k in range(steps):
        give(optimizer, k)
        torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], NORM)
        optimizer.step()
    return optimizer


WAYS: dict[str, tuple[Callable[..., Optimizer], dict[str, Any]]] = {
    "a class": (SGD, {}),
    "each": (SGD, {"without": ("deduplicate",)}),
    "level light": (SGD, {"level": "light"}),
    "recorded": (SGD, {"record": True}),
    "at once": (SGD, {"record": False}),
    "cut": (Descent, {}),
    "verified": (SGD, {"verify": 2}),
    "budget": (SGD, {"budget": 6.0}),
}


@pytest.mark.parametrize("way", WAYS)
def test_products_are_not_rounded(way: str) -> None:
    kind, options = WAYS[way]
    found = error(run(kind(params(), lr=LR), **options), exactly(lr=LR))
    assert found < (2.0**-14 if way == "budget" else 2.0**-19)


def test_control_products_of_torch_are_rounded() -> None:
    assert error(apart(SGD(params(), lr=LR)), exactly(lr=LR)) > ROUNDED
    assert error(run(SGD(params(), lr=LR), clip_grad_norm=2 * NORM), exactly(lr=LR)) > 0.5


@pytest.mark.kernels
def test_kernels_multiply_in_registers() -> None:
    optimizer = run(SGD(params(), lr=LR))
    assert error(optimizer, exactly(lr=LR)) < 2.0**-19
    session = optimizer.step._collage
    assert session.graphs == 1
    assert session.calls < 4, "later steps are repeated without Python"


@pytest.mark.parametrize("kind", [AdamW, Adafactor, RMSprop])
def test_other_optimizers(kind: Any) -> None:
    lr = 1e-2 if kind is Adafactor else 1e-3
    clipped, plain = run(kind(params(), lr=lr)), apart(kind(params(), lr=lr))
    exact = exactly(kind, lr=lr)
    assert error(clipped, exact) < 1.25 * error(plain, exact)
    if kind is RMSprop:
        assert error(clipped, exact) < ROUNDED < error(plain, exact)


def test_a_loaded_checkpoint_compiles_nothing_anew() -> None:
    optimizer = run(AdamW(params(), lr=1e-3), 4)
    graphs = optimizer.step._collage.graphs
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    other = AdamW(params(), lr=1e-3)
    collage_fx.compile_(other, clip_grad_norm=NORM)
    for k in range(6):
        give(other, k)
        other.step()
        if k > 3:
            give(optimizer, k)
            optimizer.step()
    assert optimizer.step._collage.graphs == graphs
    pairs = zip(optimizer.param_groups[0]["params"], other.param_groups[0]["params"], strict=True)
    assert all(torch.equal(collage_fx.value(p), collage_fx.value(q)) for p, q in pairs)


@pytest.mark.parametrize(("kind", "zeros"), [(Writing, False), (Zeroing, True)])
@pytest.mark.parametrize("record", ["auto", True, False])
def test_what_a_step_writes_to_gradients_is_there(kind: Any, zeros: bool, record: Any) -> None:
    optimizer = kind(params())
    collage_fx.compile_(optimizer, clip_grad_norm=NORM, record=record)
    for k in range(8):
        give(optimizer, k)
        optimizer.step()
    exact = exactly(kind)
    assert error(optimizer, exact) < (2.0**-19 if zeros else 2.0**-8)
    found = [p.grad for p in optimizer.param_groups[0]["params"]]
    expected = [p.grad for p in exact.param_groups[0]["params"]]
    assert all(
        torch.allclose(g.double(), e, rtol=2.0**-8) for g, e in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize("kind", [SGD, Descent])
def test_gradients_of_a_closure_are_clipped(kind: Any) -> None:
    optimizer = kind(params(), lr=LR)
    collage_fx.compile_(optimizer, clip_grad_norm=NORM)
    for k in range(8):
        given: list[Tensor] = []

        def closure(k: int = k, given: list[Tensor] = given) -> float:
            given += give(optimizer, k)
            return 1.5

        assert optimizer.step(closure) == 1.5
        assert all(map(torch.equal, given, gradients(k)))
    assert error(optimizer, exactly(lr=LR)) < 2.0**-19


def test_a_norm_that_changes_and_the_norms_of_a_run() -> None:
    most, optimizer = torch.tensor(1e9), SGD(params(), lr=LR)
    collage_fx.compile_(optimizer, clip_grad_norm=most)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    assert optimizer.step.grad_norm is None
    moved, norms = [], []
    for k in range(4):
        most.fill_(1e9 if k % 2 else NORM)
        before = [collage_fx.value(p) for p in optimizer.param_groups[0]["params"]]
        expected = norm_of(give(optimizer, k))
        optimizer.step()
        scheduler.step()
        after = [collage_fx.value(p) for p in optimizer.param_groups[0]["params"]]
        moved.append(float(norm_of([b - a for a, b in zip(after, before, strict=True)])))
        norms.append((optimizer.step.grad_norm, expected))
    wanted = [LR * (float(n) if k % 2 else NORM) for k, (_, n) in enumerate(norms)]
    assert moved == pytest.approx(wanted, rel=1e-5)
    assert all(found == pytest.approx(float(exact), rel=1e-6) for found, exact in norms)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("record", ["auto", True])
def test_gradients_that_are_not_finite(bad: float, record: Any) -> None:
    ours, eager = (SGD(params(d), lr=LR) for d in (torch.bfloat16, torch.float32))
    collage_fx.compile_(ours, clip_grad_norm=NORM, record=record)
    for optimizer in (ours, eager):
        give(optimizer, 0)[1][2, 3] = bad
    torch.nn.utils.clip_grad_norm_(eager.param_groups[0]["params"], NORM)
    ours.step()
    eager.step()
    pairs = zip(ours.param_groups[0]["params"], eager.param_groups[0]["params"], strict=True)
    assert all(torch.equal(p.isnan(), q.isnan()) for p, q in pairs)


def test_an_error_comes_before_anything_is_written() -> None:
    optimizer = AdamW(params(), lr=1e-3)
    collage_fx.compile_(optimizer, clip_grad_norm=NORM, error_if_nonfinite=True)
    for k in range(4):
        given = give(optimizer, k)
        before = copy.deepcopy(optimizer.state_dict()), [p.clone() for p in params()]
        if k == 2:
            before = copy.deepcopy(optimizer.state_dict()), _values(optimizer)
            given[0][0, 0] = torch.inf
            with pytest.raises(NonFiniteError, match="is inf"):
                optimizer.step()
            assert all(map(torch.equal, before[1], _values(optimizer)))
            assert str(before[0]) == str(optimizer.state_dict())
        else:
            optimizer.step()


def _values(optimizer: Optimizer) -> list[Tensor]:
    return [collage_fx.value(p) for p in optimizer.param_groups[0]["params"]]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"clip_grad_norm": -1.0}, "neither a number from 0 on"),
        ({"clip_grad_norm": torch.ones(2)}, "neither a number from 0 on"),
        ({"clip_grad_norm": True}, "neither a number from 0 on"),
        ({"clip_grad_norm": 1.0, "clip_over": [3]}, "not a sequence of optimizers"),
        ({"error_if_nonfinite": True}, "for clip_grad_norm, which is not given"),
        ({"clip_over": SGD(params(), lr=LR)}, "for clip_grad_norm, which is not given"),
    ],
)
def test_options_that_do_not_fit(options: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        collage_fx.compile_(SGD(params(), lr=LR), **options)


@pytest.mark.parametrize("options", [{"clip_grad_norm": 1.0}, {"zero_grads": True}])
def test_only_steps_of_optimizers_have_gradients(options: dict[str, Any]) -> None:
    name = next(iter(options))
    with pytest.raises(OptionError, match=f"{name} is for the gradients of an optimizer"):
        collage_fx.compile(torch.Tensor.add_, **options)
    step = torch.compile(SGD(params(), lr=LR).step, backend="collage", options=options)
    with pytest.raises(OptionError, match=f"{name} is for collage_fx.compile"):
        step()


def test_a_part_of_another_step_is_not_clipped_in_silence() -> None:
    class Around(Optimizer):
        def __init__(self, inner: Optimizer) -> None:
            self.optimizer = inner
            super().__init__(inner.param_groups, {})

        def step(self) -> None:  # type: ignore[override]
            self.optimizer.step()

    inner = collage_fx.compile_(SGD(params(), lr=LR), clip_grad_norm=NORM)
    outer = Around(inner)
    step = collage_fx.compile(outer)
    give(inner, 0)
    with pytest.raises(OptionError, match="give it to that one"):
        step()


def test_reports_and_explanations_say_so() -> None:
    optimizer = run(AdamW(params(), lr=1e-3), 3, clip_grad_norm=torch.tensor(NORM))
    assert any("clip_grad_norm" in note for note in collage_fx.report(optimizer).notes)
    explained = collage_fx.explain(optimizer, replay=3)
    assert "clip_grad_norm" in str(explained)
    assert explained.replayed is not None
    names = [s.name for s in explained.plan if s.state_name.is_param]
    *_, (plain, compensated) = explained.replayed.errors(names)
    assert compensated < plain / 8


def test_monitors_measure_clipped_updates() -> None:
    optimizer = SGD(params(), lr=LR)
    collage_fx.compile_(optimizer, clip_grad_norm=NORM, record=True)
    found = collage_fx.monitor(optimizer, every=1)
    for k in range(3):
        give(optimizer, k)
        optimizer.step()
    stats = [m["kinds"]["parameter"]["edq"] for m in found.history]
    assert stats == pytest.approx([1.0] * 3, abs=1e-5)
