"""Steps that do a part in inference mode: what that makes cannot be written outside of it.

For runtime.residuals.residual and runtime.storage.components.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from interpreter import without_compiler
from recorded_steps import LR, off, start, train
from torch import Tensor

from collage_fx.runtime.residuals import residual


def update_within(p: Tensor, g: Tensor, state: Any) -> None:
    with torch.inference_mode():
        p.add_(g, alpha=-LR / 2)
    p.add_(g, alpha=-LR / 2)


def flush_within(p: Tensor, g: Tensor, state: Any) -> None:
    """Have what waits done in inference mode, and put another value in the parameter's place."""
    p.mul_(1 - LR * 0.1)
    with torch.inference_mode():
        u = (g * 1.0).reshape(-1).view(g.shape)
    p.data = p - LR * u


def replace_within(p: Tensor, g: Tensor, state: Any) -> None:
    if not state:
        state["q"] = torch.zeros_like(p)
    with torch.inference_mode():
        state["q"] = 0.9 * state["q"] + 0.1 * g
    p.add_(state["q"], alpha=-LR)


def make_within(p: Tensor, g: Tensor, state: Any) -> None:
    with torch.inference_mode():
        if not state:
            state["m"] = torch.zeros_like(p)
        state["m"].lerp_(g, 0.1)
    p.add_(state["m"], alpha=-LR)


def write_between(p: Tensor, g: Tensor, state: Any) -> None:
    """Write a value with low words in inference mode, and then outside of it."""
    u = g * LR
    with torch.inference_mode():
        u.mul_(0.7)
    u.add_(g, alpha=LR * 0.3)
    p.sub_(u)


def read_within(p: Tensor, g: Tensor, state: Any) -> None:
    """Cut Dynamo's graphs behind inference mode."""
    with torch.inference_mode():
        u = (g * 1.0).reshape(-1).view(g.shape)
    read = torch.from_numpy(u.float().reshape(-1).numpy() * 1.0)
    p.sub_(read.view(p.shape).to(p.dtype), alpha=LR)


UPDATES = [update_within, flush_within, replace_within, make_within, write_between, read_within]


@pytest.fixture(autouse=True)
def by_the_interpreter() -> Iterator[None]:
    torch.compiler.reset()
    with without_compiler():
        yield


def error(update: Any, **options: Any) -> float:
    """Return the error of fp32 values after some steps as a share of the way."""
    exact, _ = train(update, torch.float64)
    begin = torch.cat([p.detach().double().flatten() for p in start(torch.bfloat16)])
    return off(train(update, storage="mcf3", **options)[0], exact, begin)


@pytest.mark.filterwarnings("ignore:.*(drops its low word|is done operation by operation)")
@pytest.mark.parametrize("record", ["auto", True, False])
@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.quick("*-auto", "update_within-True", "read_within-False")
def test_parameters_keep_their_updates(update: Any, record: Any) -> None:
    assert error(update, plain=True) > 0.5
    assert error(update, record=record) < 0.02


def test_a_residual_is_no_inference_tensor() -> None:
    p = torch.ones(3, dtype=torch.bfloat16)
    with torch.inference_mode():
        assert residual.zeros(p, "mcf3")[0].is_inference() is False
        assert torch.zeros_like(p).is_inference()


def test_residuals_of_inference_mode_would_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    def zeros(tensor: Tensor, storage: str) -> tuple[Tensor, ...]:
        return tuple(torch.zeros_like(tensor) for _ in range(2))

    monkeypatch.setattr(residual, "zeros", zeros)
    with pytest.raises(RuntimeError, match="inference tensor"):
        error(flush_within, record=True)
