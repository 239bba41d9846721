"""Operations that take no wide values are done in the step's dtypes, as eager PyTorch does them.

For segments.segment.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from recorded_steps import LR, interpreted, off, start
from recorded_steps import train as train_all
from torch import Tensor

import collage_fx
from collage_fx.segments.segment import WholeValues


def _of_the_step(x: Tensor) -> None:
    if x.dtype != torch.bfloat16:
        raise RuntimeError(f"it takes bfloat16, not {x.dtype}")


def halved(x: Tensor) -> Tensor:
    _of_the_step(x)
    return x / 2


def halve_(x: Tensor, count: Tensor) -> None:
    count.add_(1)  # done before it fails
    _of_the_step(x)
    x.div_(2)


@pytest.fixture(scope="module")
def library() -> Iterator[None]:
    made = torch.library.Library("refusing", "DEF")
    made.define("halved(Tensor x) -> Tensor")
    made.define("halve_(Tensor(a!) x, Tensor(b!) count) -> ()")
    made.impl("halved", halved, "CPU")
    made.impl("halve_", halve_, "CPU")
    yield
    made._destroy()


def functional(p: Tensor, state: dict[str, Tensor]) -> None:
    state["s"].copy_(torch.ops.refusing.halved(p))


def in_place(p: Tensor, state: dict[str, Tensor]) -> None:
    state["s"].copy_(p)
    torch.ops.refusing.halve_(state["s"], state["count"])


UPDATES = (functional, in_place)


def train(update: Callable[..., None], **options: Any) -> dict[str, Tensor]:
    def step_of(p: Tensor, g: Tensor, state: Any) -> None:
        if not state:
            state["s"], state["count"] = torch.zeros_like(p), torch.zeros(4)
        update(p.detach(), state)
        p.add_(g, alpha=1e-4)

    return interpreted(step_of, 3, **options)


@pytest.mark.parametrize("record", [True, False])
@pytest.mark.parametrize("update", UPDATES)
def test_it_is_done_as_eager_pytorch_does_it(
    update: Callable[..., None], record: bool, library: None
) -> None:
    expected = train(update)
    with pytest.warns(collage_fx.CollageWarning, match="knows no low words"):
        found = train(update, record=record)
    assert torch.equal(found["s"], expected["s"]), (found, expected)
    assert torch.equal(found["count"], expected["count"]), "it was counted twice"


def test_an_error_of_the_step_comes_up(library: None) -> None:
    """The control: what refuses the step's dtypes too raises, and writes what eager writes."""

    def wrong(p: Tensor, state: dict[str, Tensor]) -> None:
        torch.ops.refusing.halve_(p.float(), state["count"])

    with pytest.raises(RuntimeError, match="it takes bfloat16"):
        train(wrong, record=True)


def quantized(x: Tensor) -> Tensor:
    return torch.quantize_per_tensor(x, 0.1, 0, torch.qint8).dequantize()


def fake_quantized(x: Tensor) -> Tensor:
    scale, zero = torch.full((len(x),), 0.1), torch.zeros(len(x), dtype=torch.int32)
    return torch.fake_quantize_per_channel_affine(x, scale, zero, 0, -127, 127)


@pytest.mark.filterwarnings("ignore:.*fails on a part of the step", "ignore:.*quantize_per_tensor")
@pytest.mark.parametrize("operation", [quantized, fake_quantized])
def test_what_takes_fp32_only_is_given_that(
    operation: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of fp32 values steps are done in float64, beside states in mcf2."""

    def update(p: Tensor, g: Tensor, state: Any) -> None:
        if bool(p.isfinite().all()):
            p.sub_(operation(p.float()).to(p.dtype), alpha=LR).sub_(g, alpha=LR)

    exact, _ = train_all(update, torch.float64)
    begin = torch.cat([p.detach().double().flatten() for p in start(torch.bfloat16)])
    assert off(train_all(update, record=True, storage="mcf2")[0], exact, begin) < 0.02
    if operation is fake_quantized:  # the control; the other is done at once
        monkeypatch.setattr(WholeValues, "_narrowed", WholeValues._value)
        with pytest.raises(RuntimeError, match="found Double"):
            train_all(update, record=True, storage="mcf2")
