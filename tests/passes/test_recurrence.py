"""Recurrences x' = a*x + B of states, and whether they call for a residual.

For passes.analysis.recurrence, passes.analysis.affine and passes.analysis.criticality.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphs import BF16, FP16, capture, capture_optimizer
from torch import Tensor, optim
from torch.optim import Optimizer

from collage_fx.passes.ir.program import Level

LEVELS: tuple[Level, ...] = ("light", "plus", "auto", "all")
# optimizer, options -> for each state its recurrence and the levels that compensate it
STEPS: list[tuple[type[Optimizer], dict[str, Any], dict[str, tuple[str, str]]]] = [
    (
        optim.AdamW,
        {},
        {
            "param": ("x' = 0.99999*x + B", "light plus auto all"),
            "exp_avg": ("x' = 0.9*x + B", "all"),
            "exp_avg_sq": ("x' = 0.999*x + B", "plus auto all"),
        },
    ),
    (
        optim.AdamW,
        {"betas": (0.95, 0.95), "weight_decay": 0.0},
        {
            "param": ("x' = x + B", "light plus auto all"),
            "exp_avg": ("x' = 0.95*x + B", "plus all"),
            "exp_avg_sq": ("x' = 0.95*x + B", "plus all"),
        },
    ),
    (
        optim.Adam,
        {"weight_decay": 0.1},
        {
            "param": ("x' = x + B(x)", "light plus auto all"),
            "exp_avg": ("x' = 0.9*x + B", "all"),
            "exp_avg_sq": ("x' = 0.999*x + B", "plus auto all"),
        },
    ),
    (optim.SGD, {"lr": 0.1}, {"param": ("x' = x + B", "light plus auto all")}),
    (
        optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
        {
            "param": ("x' = 0.999*x + B", "light plus auto all"),
            "momentum_buffer": ("x' = 0.9*x + B", "all"),
        },
    ),
    (
        optim.Adagrad,
        {},
        {
            "param": ("x' = x + B", "light plus auto all"),
            "sum": ("x' = x + B", "plus auto all"),
        },
    ),
    (
        optim.Adamax,
        {},
        {
            "param": ("x' = x + B", "light plus auto all"),
            "exp_avg": ("x' = 0.9*x + B", "all"),
            "exp_inf": ("x' = 0.999*x or B", "plus auto all"),
        },
    ),
]


def named(value: object) -> str | None:
    """A readable parameter id."""
    if isinstance(value, dict):
        return "-".join(str(v) for v in value.values() if not isinstance(v, tuple)) or "default"
    return getattr(value, "__name__", None)


@pytest.mark.parametrize("kind, options, expected", STEPS, ids=named)
@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.quick("True-AdamW-default-*", "False-SGD-0.1-default")
def test_recurrences_and_verdicts_of_optimizers(
    kind: type[Optimizer],
    options: dict[str, Any],
    expected: dict[str, tuple[str, str]],
    foreach: bool,
) -> None:
    captured = capture_optimizer(kind, foreach=foreach, **options)
    for level in LEVELS:
        found = captured.plan(level)
        assert {k: (found[k].recurrence, found[k].compensated) for k in expected} == {
            k: (text, level in levels.split()) for k, (text, levels) in expected.items()
        }
        assert all(s.reason for s in found.values())


def test_a_tensor_learning_rate_is_a_symbolic_factor() -> None:
    captured = capture_optimizer(optim.AdamW, lr=torch.tensor(1e-3), foreach=False)
    state = captured.plan()["param"]
    assert state.compensated and "not a constant" in state.reason
    assert state.recurrence.startswith("x' = ") and state.recurrence.endswith("*x + B")


@pytest.mark.parametrize(
    "dtype, critical", [(BF16, [True, True]), (FP16, [True, False])], ids=["bf16", "fp16"]
)
@pytest.mark.quick("fp16")
def test_fp16_judges_by_its_own_roundoff(dtype: torch.dtype, critical: list[bool]) -> None:
    """1 - 0.999 is 0.26 u of bf16 and 2 u of fp16; 1 - 0.99 is 2.6 u and 20 u."""
    found = [
        capture_optimizer(optim.AdamW, betas=(0.9, b), dtype=dtype).plan() for b in (0.999, 0.99)
    ]
    assert [f["exp_avg_sq"].compensated for f in found] == critical


def test_reasons_give_the_distance_from_one_in_roundoffs() -> None:
    found = capture_optimizer(optim.AdamW).plan()
    assert found["exp_avg_sq"].reason.startswith("1-a = 0.001 is 0.26 u")
    assert found["exp_avg"].reason.startswith("1-a = 0.1 is 26 u")


def test_residual_bytes_are_those_of_the_compensated_states() -> None:
    found = capture_optimizer(optim.AdamW).plan()
    assert {k: s.residual_bytes for k, s in found.items() if s.shape == (4, 3)} == {
        "param": 24,
        "exp_avg": 0,
        "exp_avg_sq": 24,
    }


def scaled(p: Tensor, q: Tensor) -> None:
    p.mul_(0.5).sub_(q, alpha=2)


def reversed_difference(p: Tensor, q: Tensor) -> None:
    p.copy_(q - p)


def quotient(p: Tensor, q: Tensor) -> None:
    p.div_(4).add_(q)


def average(p: Tensor, q: Tensor) -> None:
    p.lerp_(q, 0.001)


def average_from_its_end(p: Tensor, q: Tensor) -> None:
    p.copy_(torch.lerp(q, p, 0.999))


def twice(p: Tensor, q: Tensor) -> None:
    p.add_(p).add_(q)


def square(p: Tensor, q: Tensor) -> None:
    p.mul_(p).add_(q)


def bounded(p: Tensor, q: Tensor) -> None:
    p.add_(q).clamp_(-1, 1)


def decayed_in_fp32(p: Tensor, q: Tensor) -> None:
    p.copy_((p.float() * 0.999 + q.float()).to(p.dtype))


def skipped(p: Tensor, q: Tensor) -> None:
    p.copy_(torch.where(q > 0, p + q, p))


def either(p: Tensor, q: Tensor) -> None:
    p.copy_(torch.where(q > 0, p + q, p - q))


def rescaled(p: Tensor, q: Tensor) -> None:
    p.mul_(torch.exp(q))


@pytest.mark.parametrize(
    "step, text, compensated",
    [
        (scaled, "x' = 0.5*x + B", False),
        (reversed_difference, "x' = -1*x + B", True),
        (quotient, "x' = 0.25*x + B", False),
        (average, "x' = 0.999*x + B", True),
        (average_from_its_end, "x' = 0.999*x + B", True),
        (twice, "x' = 2*x + B", True),
        (square, "x' = B(x)", True),
        (bounded, "x' = x + B or B", True),
        (decayed_in_fp32, "x' = 0.999*x + B", True),
        (skipped, None, True),
        (either, None, True),
        (rescaled, None, True),
    ],
    ids=named,
)
@pytest.mark.quick(
    "scaled-*", "average-*", "reversed*", "bounded*", "skipped*", "square*", "either*"
)
def test_recurrences_of_plain_functions(
    step: Callable[[Tensor, Tensor], None], text: str | None, compensated: bool
) -> None:
    program = capture(step, torch.ones(4, dtype=BF16), torch.ones(4, dtype=BF16)).program()
    (state,) = program.plan
    assert (state.recurrence, state.compensated) == (text or state.recurrence, compensated)


def test_states_that_feed_each_other_are_told_apart() -> None:
    """Momentum reads the gradient, the parameter reads the momentum."""

    def step(p: Tensor, m: Tensor, g: Tensor) -> None:
        m.mul_(0.9).add_(g)
        p.sub_(m, alpha=0.1)

    program = capture(step, *(torch.ones(4, dtype=BF16) for _ in range(3))).program()
    assert {s.name: s.recurrence for s in program.plan} == {
        "p": "x' = x + B",
        "m": "x' = 0.9*x + B",
    }


def test_level_light_without_known_parameters_takes_what_is_nearly_pure_accumulation() -> None:
    def step(p: Tensor, v: Tensor, g: Tensor) -> None:
        v.mul_(0.99).addcmul_(g, g, value=0.01)
        p.sub_(g, alpha=0.1)

    program = capture(step, *(torch.ones(4, dtype=BF16) for _ in range(3))).program("light")
    assert {s.name: s.compensated for s in program.plan} == {"p": True, "v": False}
    assert all("no tensor of this graph is a known parameter" in s.reason for s in program.plan)
