"""States that `functools` keeps, as the results of functions with a cache. For hooks.traces."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from interpreter import without_compiler
from recorded_steps import Each
from torch import Tensor, nn

import collage_fx
from collage_fx.hooks import traces

RATE, DECAY = 1e-3, 5e-3
STEPS = 30
_HELD: dict[Tensor, Tensor] = {}


def _begun(p: Tensor) -> Tensor:
    return torch.full_like(p, 0.0625)


@functools.cache
def kept(p: Tensor) -> Tensor:
    return _begun(p)


@functools.lru_cache(8)
def kept_in_dict(p: Tensor) -> dict[str, Tensor]:
    return {"m": _begun(p)}


@functools.cache
def make_once(p: Tensor) -> None:
    _HELD[p] = _begun(p)


@functools.cache
def rates(decay: float) -> tuple[float, float]:
    return 1 - decay, decay


class Holder:
    """Object of which a method has a cache."""

    @functools.cache  # noqa: B019 - the cache is what is tested
    def kept(self, p: Tensor) -> Tensor:
        return _begun(p)


HOLDER = Holder()


def of_function(p: Tensor, state: Any) -> Tensor:
    return kept(p)


def of_dict(p: Tensor, state: Any) -> Tensor:
    return kept_in_dict(p)["m"]


def of_method(p: Tensor, state: Any) -> Tensor:
    return HOLDER.kept(p)


def of_side_effect(p: Tensor, state: Any) -> Tensor:
    make_once(p)
    return _HELD[p]


def of_state(p: Tensor, state: Any) -> Tensor:
    """Return an average that the optimizer keeps."""
    if not state:
        state["m"] = _begun(p)
    found: Tensor = state["m"]
    return found


def way(average: Callable[[Tensor, Any], Tensor], dtype: torch.dtype) -> tuple[float, Any]:
    """Return how far a parameter moves by its gradient over the root of an average, and the step.

    In float64 PyTorch does it.
    """

    def update(p: Tensor, g: Tensor, state: Any) -> None:
        m, (rest, share) = average(p, state), rates(DECAY)
        m.mul_(rest).addcmul_(g, g, value=share)
        p.sub_(g / m.sqrt(), alpha=RATE)

    torch.compiler.reset()
    p = nn.Parameter(torch.ones(2, 3, dtype=dtype))
    optimizer = Each([p], update)
    step = optimizer.step if dtype is torch.float64 else collage_fx.compile(optimizer)
    with without_compiler():
        for _ in range(STEPS):
            p.grad = torch.full_like(p, 0.125)
            step()
    return 1 - float(collage_fx.value(p)[0, 0]), step


@pytest.mark.filterwarnings("ignore:.*belong to no torch.optim.Optimizer")
@pytest.mark.filterwarnings("ignore:.*functools.lru_cache")
@pytest.mark.parametrize("average", [of_function, of_dict, of_method, of_side_effect])
@pytest.mark.quick("of_function", "of_side_effect")
def test_a_cache_keeps_states_from_step_to_step(
    average: Callable[[Tensor, Any], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    exact, _ = way(average, torch.float64)
    found, step = way(average, torch.bfloat16)
    assert found == pytest.approx(exact, rel=2e-3)
    assert any("a cache of functools" in note for note in collage_fx.report(step).notes)
    # The control: Dynamo's own, which makes the average anew in each step.
    monkeypatch.setattr(traces, "_is_number", lambda _: True)
    assert way(average, torch.bfloat16)[0] != pytest.approx(exact, rel=1e-2)


@pytest.mark.filterwarnings("ignore:.*functools.lru_cache")
def test_numbers_of_a_cache_are_traced() -> None:
    exact, _ = way(of_state, torch.float64)
    found, step = way(of_state, torch.bfloat16)
    assert found == pytest.approx(exact, rel=2e-3)
    assert not any("cache" in note for note in collage_fx.report(step).notes)
