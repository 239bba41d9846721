"""Steps without low words are plain PyTorch's: 16-bit temporaries are rounded.

For record.recorder.
"""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from recorded_steps import LR, Each, off, start, train
from torch import Tensor

import collage_fx
from collage_fx.compilation import aot
from collage_fx.record.recorder import Recorder

pytestmark = pytest.mark.filterwarnings("ignore:.*nothing needed compensation")
SHAPE = (6, 4)


def orthogonalized(p: Tensor, g: Tensor, state: Any) -> None:
    """Iterations of Newton-Schulz in bf16, as Muon does them."""
    m = state["m"] = state.get("m", torch.zeros_like(p))
    m.lerp_(g, 0.1)
    x = m.bfloat16()
    x.div_(x.norm() + 1e-7)
    for _ in range(2):
        a = x @ x.T
        x = torch.addmm(x, torch.addmm(a, a, a, beta=-4.775, alpha=2.0315), x, beta=3.4445)
    p.sub_(x * 0.3 + x * x, alpha=LR * 100)


def read_between(p: Tensor, g: Tensor, state: Any) -> None:
    """A temporary of 16 bits lives on after its data are read."""
    x = g.bfloat16() * 0.3
    scale = float(x.abs().max())
    p.sub_((x * 0.7 + 0.1) / scale, alpha=LR * 100)


def by_chance(p: Tensor, g: Tensor, state: Any) -> None:
    """Stochastic rounding to a bf16 temporary."""
    bits = (g.float() * 0.3).view(torch.int32) + torch.randint(
        0, 1 << 16, g.shape, dtype=torch.int32
    )
    p.sub_((bits & -65536).view(torch.float32).bfloat16(), alpha=LR * 100)


UPDATES = [orthogonalized, read_between, by_chance]


def by_a_norm(p: Tensor, g: Tensor, state: Any) -> None:
    """A norm in 16 bits is made of one that was read, and written in place, as AdaMuon does it."""
    x, norm = g.bfloat16() * 0.3, g.norm()
    if float(norm):
        p.sub_(x.mul_(0.7 / norm.bfloat16().add_(1e-2)), alpha=LR * 100)


def run(update: Any, dtype: torch.dtype = torch.float32, **options: Any) -> Tensor:
    torch.manual_seed(3)
    return train(update, params=start(dtype, SHAPE), steps=4, **options)[0]


@pytest.mark.parametrize("update", [*UPDATES, by_a_norm])
@pytest.mark.parametrize("options", [{}, {"record": True}, {"arithmetic": "wide", "record": True}])
@pytest.mark.quick("options0-orthogonalized", "options1-read_between", "options2-by_chance")
def test_fp32_parameters_have_the_bits_of_plain_pytorch(update: Any, options: Any) -> None:
    stance = "default" if options else "force_eager"
    with torch.compiler.set_stance(stance):
        found = run(update, **options)
    assert torch.equal(found, run(update, plain=True))


def test_a_norm_of_the_host_would_be_memory_from_before_the_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of_host = Recorder._on_host
    monkeypatch.setattr(Recorder, "_on_host", lambda self, op, args, _: of_host(self, op, args, {}))
    assert not torch.equal(run(by_a_norm, record=True), run(by_a_norm, plain=True))


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.quick("orthogonalized", "by_chance")
def test_of_bf16_parameters_temporaries_are_kept_whole(update: Any) -> None:
    """The control: that is how far from plain PyTorch a step is whose 16-bit values are wide."""
    with torch.compiler.set_stance("force_eager"):
        found = run(update, torch.bfloat16, storage="remainder16")
    begin = torch.cat([p.detach().double().flatten() for p in start(torch.float32, SHAPE)])
    assert off(found, run(update, plain=True), begin) > 1e-4


def two_groups(update: Any, *, plain: bool = False) -> list[Tensor]:
    params = [*start(torch.bfloat16, SHAPE, 1), *start(torch.float32, SHAPE, 1)]
    torch.manual_seed(3)
    with torch.compiler.set_stance("force_eager"):
        train(update, params=params, steps=4, plain=plain, record=True)
    return [collage_fx.value(p) for p in params]


@pytest.mark.parametrize("update", [orthogonalized, by_chance])
def test_fp32_parameters_beside_bf16_ones_have_the_same_bits(update: Any) -> None:
    """The two groups have nothing in common: each is done as it would be by itself."""
    (narrow, wide), (narrow_plain, wide_plain) = two_groups(update), two_groups(update, plain=True)
    assert torch.equal(wide, wide_plain)
    assert not torch.equal(narrow, narrow_plain)


def averaged(p: Tensor, g: Tensor, state: Any) -> None:
    """A bf16 state of an fp32 parameter, which the first step makes."""
    if not state:
        state["m"] = torch.zeros_like(p, dtype=torch.bfloat16 if p.dtype != torch.float64 else None)
    state["m"].mul_(0.999).add_(g.to(state["m"].dtype), alpha=0.001)
    p.sub_(state["m"].to(p.dtype), alpha=LR)


def test_a_16_bit_state_of_an_fp32_parameter_has_low_words_from_the_first_step() -> None:
    def state(dtype: torch.dtype, **options: Any) -> Tensor:
        params = start(dtype, SHAPE, 1)
        optimizer = Each(params, averaged)
        step = collage_fx.compile(optimizer, **options) if options else optimizer.step
        for k in range(4):
            params[0].grad = torch.full(SHAPE, 0.3 + k / 7).bfloat16().to(dtype)
            step()
        return collage_fx.value(optimizer.state[params[0]]["m"])

    exact, plain = state(torch.float64), state(torch.float32)
    with torch.compiler.set_stance("force_eager"):
        found = state(torch.float32, storage="remainder16", level="all")
    error = (found - exact).abs().max() / exact.abs().max()
    assert error < 1e-6 < 1e-4 < (plain - exact).abs().max() / exact.abs().max()


def chained(p: Tensor, g: Tensor, state: Any) -> None:
    """Do what Inductor fuses, and keeps in fp32 between."""
    x = g.bfloat16() * 0.3
    y = x * x * 0.7
    p.sub_(torch.sigmoid(y) * x - (y * 1.3).bfloat16().float(), alpha=LR * 100)


@pytest.mark.kernels
def test_a_compiled_graph_carries_out_all_roundings() -> None:
    assert off_plain(chained) < 1e-6


@pytest.mark.kernels
def test_without_them_it_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aot, "noted_roundings", nullcontext)
    assert off_plain(chained) > 1e-4


def off_plain(update: Any) -> float:
    begin = torch.cat([p.detach().double().flatten() for p in start(torch.float32, SHAPE)])
    return off(run(update), run(update, plain=True), begin)


@pytest.mark.kernels
def test_a_graph_whose_parameters_are_attributes_is_not_plain() -> None:
    """Dynamo hands over few parameters so: a factor near one is not rounded to 16 bits."""

    def update(p: Tensor, g: Tensor, state: Any) -> None:
        p.mul_(1 - 1e-3 * p.std())

    exact, _ = train(update, torch.float64)
    plain, _ = train(update, plain=True)
    found, _ = train(update, storage="remainder16")
    assert torch.allclose(found, exact, rtol=1e-6)
    assert not torch.allclose(plain, exact, rtol=1e-4)
