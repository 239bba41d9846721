"""Arguments of a function that are filled with other values between calls have no low word then.

For compilation.residual_binding and runtime.residuals.residual.
"""

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from interpreter import without_compiler
from torch import Tensor

import collage_fx
from collage_fx.compilation import residual_binding
from collage_fx.errors import CollageWarning
from collage_fx.record import steps
from collage_fx.runtime.residuals import residual
from collage_fx.runtime.residuals.store import ResidualStore

LR, ROUNDS, SHAPE = 1e-4, 4, (4, 3)
BF16 = torch.bfloat16


def step(p: Tensor, m: Tensor, g: Tensor) -> None:
    m.mul_(0.9999).add_(g, alpha=LR)
    p.sub_(g, alpha=LR)
    p.sub_(m, alpha=LR)


def same(p: Tensor) -> Tensor:
    return p


def data(p: Tensor) -> Tensor:
    return p.data


def detached_later() -> Callable[[Tensor], Tensor]:
    """Return a function that gives the tensor itself to the first two calls."""
    calls = []

    def given(p: Tensor) -> Tensor:
        calls.append(p)
        return p if len(calls) <= 2 else p.data

    return given


Mode = Callable[[], AbstractContextManager[Any]]
KINDS: dict[str, tuple[Callable[[], Callable[[Tensor], Tensor]], Mode]] = {
    "a tensor": (lambda: same, torch.no_grad),
    "its data": (lambda: data, torch.no_grad),
    "its data later": (detached_later, torch.no_grad),
    "an inference tensor": (lambda: same, torch.inference_mode),
}


def values(kind: str, dtype: torch.dtype, call: Callable[..., Any]) -> list[Tensor]:
    """Return where two calls lead in each round, from other values each."""
    make, mode = KINDS[kind]
    given = make()
    generator = torch.Generator().manual_seed(0)

    def made(mean: float, size: float) -> Tensor:
        return (mean + size * torch.randn(SHAPE, generator=generator)).bfloat16().to(dtype)

    with mode():
        p, m, found = torch.zeros(SHAPE, dtype=dtype), torch.zeros(SHAPE, dtype=dtype), []
        for _ in range(ROUNDS):
            p.copy_(made(1, 0.25))
            for _ in range(2):
                argument = given(p)
                call(argument, m, made(0, 1))
            found.append(collage_fx.value(argument).clone())
    return found


def error(kind: str, **options: Any) -> tuple[float, list[str]]:
    """Return the largest error in units of LR, and the warnings."""
    torch.compiler.reset()
    with without_compiler(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CollageWarning)
        string = options.pop("string", False)
        call = torch.compile(step, backend="collage") if string else None
        ours = values(kind, BF16, call or collage_fx.compile(step, **options))
    exact = values(kind, torch.float64, step)
    pairs = zip(ours, exact, strict=True)
    found = max(float((a - b).abs().max()) for a, b in pairs) / LR
    return found, [str(w.message) for w in caught if issubclass(w.category, CollageWarning)]


@pytest.mark.parametrize("options", [{}, {"record": True}, {"string": True}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.quick("a tensor-{}", "*later-{}", "its data-*True*", "an inf*-{'record*")
def test_their_low_words_are_dropped_with_one_warning(kind: str, options: Any) -> None:
    found, said = error(kind, **options)
    assert found < 0.1
    assert [text for text in said if "was written from outside" in text and "of p " in text] == [
        text for text in said if "was cleared" in text
    ]
    assert sum("was cleared" in text for text in said) == 1


@pytest.mark.parametrize("kind", ["its data", "an inference tensor"])
def test_by_their_versions_they_would_be_another_value_s(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control."""
    for module in (residual_binding, steps):
        monkeypatch.setattr(module, "settle_at_end", residual.settle)
    monkeypatch.setattr(ResidualStore, "_renew", lambda store, residual: None)
    found, said = error(kind)
    assert found > 1 and not any("was cleared" in text for text in said)


def test_the_data_of_a_tensor_that_nobody_fills_keeps_its_low_word() -> None:
    with without_compiler():
        call, p = collage_fx.compile(step), torch.ones(SHAPE, dtype=BF16)
        m, g = torch.zeros_like(p), torch.ones_like(p)
        for k in range(6):
            call(p if k < 2 else p.data, m, g)
    way = 6 * LR + LR * LR * 21
    assert float((1 - collage_fx.value(p)).mean()) == pytest.approx(way, rel=0.01)
