"""Compiled segments on whole values: no rounding is left out or done twice, no low word is lost.

For segments.joined_compiler.
"""

import math
from typing import Any

import pytest
import torch
from interpreter import without_compiler
from recorded_steps import LR, start, train
from torch import Tensor

import collage_fx
from collage_fx.passes.ir.program import CONVERT
from collage_fx.runtime.ops import collage
from collage_fx.runtime.torch_versions import drops_roundings


def update(p: Tensor, g: Tensor, state: Any) -> None:
    """Halves of a step with a value between them that has more bits than 16."""
    m = state["m"] = state.get("m", torch.zeros_like(p))
    m.mul_(0.99).add_(g, alpha=0.01)
    change = m * 0.3 + p * 0.01
    float(change.sum())
    p.data.sub_(change * LR)


def words(params: list[Tensor]) -> list[Tensor]:
    return [collage_fx.value(p) for p in params]


@pytest.mark.kernels
@pytest.mark.parametrize("arithmetic", ["wide", "eft"])
@pytest.mark.parametrize("storage", ["mcf2", "remainder16", "mcf3"])
@pytest.mark.quick("mcf2-wide")
def test_a_compiled_segment_has_the_bits_of_an_interpreted_one(
    storage: str, arithmetic: str
) -> None:
    """Of the largest numbers and of those that are none too."""
    edges = torch.tensor([math.inf, -math.inf, math.nan, 3.3895e38, -3.3895e38, 1e-38, 0.0, -0.0])
    # The default is eft, which nobody may ask for beside remainder16.
    options: dict[str, Any] = {} if arithmetic == "eft" else {"arithmetic": arithmetic}
    found = []
    for stance in ("default", "force_eager"):
        params = start(torch.bfloat16, (16, 40))
        with torch.no_grad():
            params[0].view(-1)[:8] = edges.bfloat16()
        with torch.compiler.set_stance(stance):
            _, step = train(update, params=params, record=True, storage=storage, steps=6, **options)
        executors = step._collage.steps().executors
        assert bool(executors.runs["joined"]) == (stance == "default"), executors.runs
        found.append(words(params))
    for compiled, interpreted in zip(*found, strict=True):
        assert torch.equal(compiled.nan_to_num(0.5), interpreted.nan_to_num(0.5))
        assert float((compiled - compiled.bfloat16().double()).abs().nan_to_num(0).max()) > 0


def test_what_is_stored_is_rounded_once() -> None:
    with without_compiler() as graphs:
        train(update, record=True, arithmetic="wide", steps=4)
    counted = 0
    for gm in graphs:
        nodes = list(gm.graph.nodes)
        rounding = [n for n in nodes if n.target is CONVERT and n.args[1] is torch.bfloat16]
        if drops_roundings():  # a conversion counts for nothing, and none but one stands in for it
            counted += len(rounding)
            assert all(n.args[0].target is collage.round.default for n in rounding)
        else:
            counted += [n.target for n in nodes].count(collage.narrow.default)
            assert not rounding
    assert counted > 0


@pytest.mark.parametrize("arithmetic", ["wide", "eft"])
@pytest.mark.quick("wide")
def test_a_parameter_that_is_given_new_memory_is_compiled(arithmetic: str) -> None:
    """The parameter is read where it was, with the low word that it had then."""

    def moved(p: Tensor, g: Tensor, state: Any) -> None:
        m = state["m"] = state.get("m", torch.zeros_like(p))
        m.mul_(0.99).add_(g, alpha=0.01)
        p.data = p.data * 0.9999 - m * LR

    found = []
    for stance in ("default", "force_eager"):
        params = start(torch.bfloat16, (16, 40))
        with torch.compiler.set_stance(stance):
            _, step = train(moved, params=params, record=True, arithmetic=arithmetic)
        runs = step._collage.steps().executors.runs
        assert (runs["joined"] >= 7) == (stance == "default"), runs
        found.append(words(params))
    exact = start(torch.float64, (16, 40))
    begin = words(start(torch.bfloat16, (16, 40)))
    train(moved, torch.float64, params=exact)
    for compiled, interpreted, truth, before in zip(*found, exact, begin, strict=True):
        assert torch.equal(compiled, interpreted)
        off = float((compiled - truth.detach()).norm())
        assert off < 0.1 * float((truth.detach() - before).norm())
