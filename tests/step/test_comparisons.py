"""A number that a 16-bit tensor is compared with is rounded first, as eager PyTorch does.

For passes.rewrite.wider, passes.rewrite.symbolic_scalars and passes.frontend.decompose.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

import collage_fx
from collage_fx.passes.frontend import decompose
from collage_fx.passes.rewrite import symbolic_scalars

NAMES = ("eq", "ne", "ge", "gt", "le", "lt")
NUMBERS = (0.1, -0.3, 1e-3, 0.5, 257)
TENTHS = (0.1, 0.1, 0.1)
UNIT = 2.0**-11
WAYS: dict[str, dict[str, Any]] = {
    "eft": {"multi_tensor": False},
    "wide": {"arithmetic": "wide", "storage": "remainder16"},
    "class": {"multi_tensor": True},
    "recorded": {"record": True},
    "recorded wide": {"record": True, "arithmetic": "wide"},
    "at once": {"record": False},
}


def neighbours(number: float, dtype: torch.dtype) -> Tensor:
    """Return the number in a dtype, and what stands next to it on either side."""
    x = torch.tensor(float(number)).to(dtype)
    ends = (torch.tensor(end, dtype=dtype) for end in (-torch.inf, torch.inf))
    return torch.stack([torch.nextafter(x, end) for end in ends] + [x, x])


class Compares(Optimizer):
    """Moves parameters up where a comparison of their gradients holds, and down elsewhere."""

    def __init__(self, params: list[Tensor], number: float, cut: str = "") -> None:
        super().__init__(params, {"number": number})
        self.cut = cut

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        number = self.param_groups[0]["number"]
        for p in self.param_groups[0]["params"]:
            if self.cut == "joined":
                p.sub_(p.amax() * 0)
            for weight, (mask, is_float) in enumerate(self._masks(p.grad, number)):
                if self.cut == "item":
                    mask.sum().item()
                chosen = mask if is_float else torch.where(mask, 1.0, 0.0)
                p.add_(chosen.to(p.dtype), alpha=UNIT * 2**weight)

    def _masks(self, x: Tensor, number: float) -> list[tuple[Tensor, bool]]:
        clamped = x.clamp(-abs(number), abs(number))
        in_place = [x.clone() for _ in NAMES]
        for y, name in zip(in_place, NAMES, strict=True):
            getattr(y, name + "_")(number)
        found = [(getattr(torch, name)(x, number), False) for name in NAMES]
        found += [(y, True) for y in in_place[:2]]
        return [*found, (clamped == number, False), (clamped < number, False)]


def moved(
    numbers: Sequence[float], dtype: torch.dtype, compile_: Callable[[Optimizer], Any], **kw: Any
) -> Any:
    """Return how far steps with these numbers have gone, in units: a bit for each comparison."""
    params = [torch.zeros(4, dtype=dtype) for _ in range(2)]
    optimizer = Compares(params, numbers[0], **kw)
    step = compile_(optimizer)
    for number in numbers:
        optimizer.param_groups[0]["number"] = number
        for p in params:
            p.grad = neighbours(number, dtype)
        step()
    return collage_fx.value(params[0]).double() / UNIT


def exact(numbers: Sequence[float], dtype: torch.dtype) -> Tensor:
    """Return the same by eager PyTorch's comparisons of 16-bit tensors."""
    total = torch.zeros(4).double()
    for number in numbers:
        masks = Compares([torch.zeros(1)], number)._masks(neighbours(number, dtype), number)
        total += sum(mask.double() * 2**k for k, (mask, _) in enumerate(masks))
    return total


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.quick("-0.3-wide")
def test_comparisons_are_those_of_eager_pytorch(number: float, way: str) -> None:
    for dtype in (torch.bfloat16, torch.float16) if "wide" not in way else (torch.bfloat16,):
        numbers = [number] * 3
        found = moved(numbers, dtype, lambda o: collage_fx.compile(o, level="all", **WAYS[way]))
        assert torch.equal(found, exact(numbers, dtype)), dtype


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("numbers", [(0.1, 0.3, -0.7, 0.11, 0.2), (3, 257, -259, 7, 1001)])
@pytest.mark.quick("numbers0-wide", "numbers0-recorded", "numbers1-eft", "numbers1-recorded")
def test_so_they_are_where_the_number_changes(
    numbers: Sequence[float], way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dynamo makes a symbol of it."""

    def found() -> Tensor:
        return moved(numbers, torch.bfloat16, lambda o: collage_fx.compile(o, **WAYS[way]))

    def unrounded(op: Any, dtype: torch.dtype, x: Tensor, number: Any) -> Tensor:
        return getattr(torch.ops.aten, op._opname).Tensor(x.float(), torch.scalar_tensor(number))

    assert torch.equal(found(), exact(numbers, torch.bfloat16))
    monkeypatch.setattr(symbolic_scalars, "compared", unrounded)
    torch.compiler.reset()
    assert not torch.equal(found(), exact(numbers, torch.bfloat16))


@pytest.mark.parametrize("record", ["auto", True])
@pytest.mark.parametrize("cut", ["joined", "item"])
@pytest.mark.quick("joined-auto")
def test_joined_graphs_and_segments(cut: str, record: Any) -> None:
    found = moved(TENTHS, torch.bfloat16, lambda o: collage_fx.compile(o, record=record), cut=cut)
    assert torch.equal(found, exact(TENTHS, torch.bfloat16))


def test_interpreted_steps() -> None:
    with torch.compiler.set_stance("force_eager"):
        found = moved(TENTHS, torch.bfloat16, collage_fx.compile)
    assert torch.equal(found, exact(TENTHS, torch.bfloat16))


@pytest.mark.slow
@pytest.mark.kernels
@pytest.mark.parametrize("way", ["eft", "class", "recorded wide"])
def test_compiled_kernels(way: str) -> None:
    found = moved(TENTHS, torch.bfloat16, lambda o: collage_fx.compile(o, **WAYS[way]))
    assert torch.equal(found, exact(TENTHS, torch.bfloat16))


def test_a_number_that_is_not_rounded_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control."""
    monkeypatch.setattr(decompose, "_in_16_bits", lambda number, dtype: number)
    found = moved(TENTHS, torch.bfloat16, collage_fx.compile)
    assert not torch.equal(found, exact(TENTHS, torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_numbers_are_rounded_as_tensors_are(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    scale = torch.randint(-40, 20, (20000,), generator=generator)
    numbers = torch.randn(20000, generator=generator, dtype=torch.float64) * 2.0**scale
    ties = torch.arange(0x3F80, 0x3F90).to(torch.int32) * 65536 + 32768
    many = [*numbers.tolist(), *ties.view(torch.float32).tolist(), 65519.9, 65520.0, -0.0]
    for number in many:
        wanted = torch.full((), number).to(dtype).item()
        assert decompose._in_16_bits(number, dtype) == wanted, number
