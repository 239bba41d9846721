"""Recorded steps do what the same code does in eager PyTorch, in numbers that bf16 has exactly.

For segments.segment and segments.executors.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from recorded_steps import Each
from torch import Tensor

import collage_fx
from collage_fx.segments.executors import Executors
from collage_fx.segments.segment import Call, Segment


def numbers_from_tensors(p: Tensor) -> None:
    p.sub_(torch.tensor([(p.grad * 0.25).sum()]))
    p.add_(torch.as_tensor([(p.grad * 0.5).sum(), 1.0, 2.0, 3.0]))
    p.add_(p.new_tensor([(p.grad * 0.5).sum()]))


def written_by_autograd(p: Tensor) -> None:
    b, w = torch.ones(4), torch.full((4,), 5.0)
    float(b.sum())
    w.requires_grad_()
    c = b * 0.25
    with torch.enable_grad():
        b.mul_(w)  # done at once, after c
    p.sub_(c)


def shared_memory(p: Tensor) -> None:
    x = p.grad.float() * 0.25
    x.share_memory_()
    p.sub_(x)


def resized_out(p: Tensor) -> None:
    out = torch.empty(0, dtype=p.dtype)
    torch.mul(p.grad, 0.25, out=out)
    p.sub_(out)


def overlapping(p: Tensor) -> None:
    x = torch.arange(5.0)
    x[1:].add_(x[:-1])  # raises
    p.sub_(x[1:])


def expanded(p: Tensor) -> None:
    p.sub_(0.25)
    p[:1].expand(4).add_(1.0)  # raises
    p.sub_(0.5)


def out_of_range(p: Tensor) -> None:
    p.sub_(0.25)
    torch.ones(4).index_select(0, torch.tensor([100]))  # raises
    p.sub_(0.5)


def division_by_zero(p: Tensor) -> None:
    p.sub_(0.25)
    float(p.grad.sum())
    p.sub_(0.25)
    torch.ones(4, dtype=torch.int64) // torch.zeros(4, dtype=torch.int64)  # raises
    p.sub_(0.5)


def not_definite(p: Tensor) -> None:
    with contextlib.suppress(RuntimeError):
        torch.linalg.cholesky(-torch.eye(4))
    with contextlib.suppress(RuntimeError):
        torch.cholesky(-torch.eye(4))
    p.sub_(0.25)


def grown(p: Tensor) -> None:
    s = GROWN.setdefault(id(p), torch.zeros(4, dtype=p.dtype))
    s.add_(p.grad)
    s.resize_(8)
    s[4:].fill_(0.5)
    p.sub_(s[4:])
    s.resize_(4)


GROWN: dict[int, Tensor] = {}
UPDATES: list[Callable[[Tensor], None]] = [
    *(numbers_from_tensors, written_by_autograd, shared_memory, resized_out, overlapping),
    *(expanded, out_of_range, division_by_zero, not_definite, grown),
]


def trained(update: Callable[[Tensor], None], record: Any) -> tuple[list[float], list[str]]:
    p = torch.full((4,), 2.0, dtype=torch.bfloat16, requires_grad=True)
    p.grad = torch.ones_like(p)
    optimizer = Each([p], lambda p, g, state: update(p))
    step: Any = optimizer.step
    if record is not None:
        step = collage_fx.compile(optimizer, storage="remainder16", record=record)
    if record is False:  # Dynamo's graphs raise otherwise
        step = torch.compiler.set_stance("force_eager")(step)
    errors = []
    for _ in range(3):
        try:
            step()
        except (RuntimeError, IndexError) as error:
            errors.append(type(error).__name__)
    return p.tolist(), errors


@pytest.mark.filterwarnings("ignore:collage_fx", "ignore:torch.cholesky", "ignore:.*resize")
@pytest.mark.parametrize("record", [True, False])
@pytest.mark.parametrize("update", UPDATES)
def test_values_and_errors_are_those_of_eager_pytorch(
    update: Callable[[Tensor], None], record: bool
) -> None:
    GROWN.clear()
    expected = trained(update, None)
    GROWN.clear()
    assert trained(update, record) == expected
    assert expected[0] != [2.0] * 4 or expected[1]


def test_an_int_that_grows_is_a_number_and_not_a_structure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    segments: set[Segment] = set()
    run = Executors.run

    def noted(self: Executors, segment: Segment, call: Call) -> None:
        segments.add(segment)
        run(self, segment, call)

    monkeypatch.setattr(Executors, "run", noted)
    p = torch.full((4,), 2.0, dtype=torch.bfloat16, requires_grad=True)
    p.grad = torch.ones_like(p)
    k = 0

    def update(p: Tensor, g: Tensor, state: Any) -> None:
        nonlocal k
        k += 1
        p.data.sub_(torch.where(g > 0, g / (1000 * k), torch.full_like(g, float("nan"))))

    step = collage_fx.compile(Each([p], update), record=True)
    for _ in range(12):
        step()
    executors = step._collage.steps().executors  # type: ignore[attr-defined]
    assert executors.count <= 3 and len(segments) == 1
