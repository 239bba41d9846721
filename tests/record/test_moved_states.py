"""States that take the memory of others. For record.known_states."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from interpreter import without_compiler
from recorded_steps import LR, off, start, train
from torch import Tensor
from torch.optim import Optimizer

import collage_fx
from collage_fx.record import steps


def taking_turns(p: Any, g: Tensor, state: Any) -> None:
    """Compute the parameter in a buffer, which becomes its memory, and its memory the buffer."""
    buffer = state.get("buffer", torch.zeros_like(p))
    torch.sub(p, g, alpha=LR, out=buffer)
    state["buffer"], p.data = p.data, buffer


def exchanging(p: Any, g: Tensor, state: Any) -> None:
    """Do so with a buffer that stays one tensor, and is looked at."""
    buffer = state.setdefault("buffer", torch.zeros_like(p).detach())
    torch.sub(p, g, alpha=LR, out=buffer)
    if bool(g.isfinite().all()):
        buffer.data, p.data = p.data, buffer.data


def exchanging_copies(p: Any, g: Tensor, state: Any) -> None:
    """Exchange two copies of the parameter, each of which is updated."""
    copy = state.setdefault("copy", p.detach().clone())
    copy.sub_(g, alpha=LR)
    p.sub_(g, alpha=LR)
    copy.data, p.data = p.data, copy.data


def in_turn(p: Any, g: Tensor, state: Any) -> None:
    """Have three pieces of memory take turns."""
    for name in "ab":
        state.setdefault(name, torch.zeros_like(p).detach())
    torch.sub(p, g, alpha=LR, out=state["a"])
    p.data, state["a"], state["b"] = state["a"], state["b"], p.data


def keeping(p: Any, g: Tensor, state: Any) -> None:
    """Keep the memory of before, and read it in the next step."""
    before = state.get("before", p.detach().clone())
    new = before * 0.5 + p * 0.5 - LR * g
    state["before"], p.data = p.data, new


def taking_by_set(p: Any, g: Tensor, state: Any) -> None:
    """Give the parameter other memory by `set_`."""
    buffer, before = state.get("buffer", torch.zeros_like(p)), p.data
    torch.sub(p, g, alpha=LR, out=buffer)
    p.set_(buffer)
    state["buffer"] = before


MOVES = [taking_turns, exchanging, exchanging_copies, in_turn, keeping, taking_by_set]


def error(update: Callable[..., None], **options: Any) -> float:
    """Return the error as a share of the way."""
    torch.compiler.reset()
    exact, _ = train(update, torch.float64)
    found, _ = train(update, **options)
    begin = torch.cat([p.detach().double().flatten() for p in start(torch.bfloat16)])
    return off(found, exact, begin)


@pytest.mark.filterwarnings("error::collage_fx.CollageWarning")
@pytest.mark.parametrize("update", MOVES)
@pytest.mark.parametrize("options", [{"record": True}, {}, {"storage": "mcf2"}])
@pytest.mark.quick("options0-taking_turns", "options0-exchanging")
def test_low_words_stay_with_the_memory(
    update: Callable[..., None], options: dict[str, Any]
) -> None:
    assert error(update, **options) < 0.01


@pytest.mark.filterwarnings("ignore::collage_fx.CollageWarning")
@pytest.mark.parametrize("update", [taking_turns, exchanging, exchanging_copies, in_turn])
def test_they_would_be_lost_otherwise(
    update: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "leave_memory", lambda *_: False)
    monkeypatch.setattr(steps, "take_over", lambda *_: False)
    assert error(update, record=True) > 0.5


class Mixed(Optimizer):
    """Gives some parameters other memory, and writes others in place; counts its steps."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            self.state[p]["k"] = self.state[p].get("k", 0) + 1
            if p.dim() == 2:
                p.data = p.data - 0.02 * p.grad
            else:
                p.sub_(0.02 * p.grad)


@pytest.mark.filterwarnings("ignore:.*nothing needed compensation")
@pytest.mark.parametrize("options", [{}, {"record": True}, {"record": False}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_was_read_before_memory_was_replaced_is_as_it_was(
    dtype: torch.dtype, options: dict[str, Any]
) -> None:
    """States are looked for once more before anything is done: a step that makes some."""
    found = []
    for compiled in (False, True):
        params = [torch.ones(s, dtype=dtype).requires_grad_() for s in ((8, 6), (8,))]
        optimizer = Mixed(params, {})
        if compiled:
            collage_fx.compile_(optimizer, **options)
        with without_compiler():
            for _ in range(3):
                for p in params:
                    p.grad = torch.ones_like(p)
                optimizer.step()
        found.append([p.detach() for p in params])
    assert all(map(torch.equal, *found))


def leaning(p: Any, g: Tensor, state: Any) -> None:
    """Read the memory from before an update once that is another."""
    before = p.detach()
    p.data = p.data - LR * g
    p.data = p.data + 0.5 * (p.data - before)


@pytest.mark.parametrize("options", [{}, {"record": True}, {"record": False}], ids=str)
def test_memory_that_a_parameter_has_left_keeps_its_low_words(options: dict[str, Any]) -> None:
    begin = torch.cat([p.detach().double().flatten() for p in start(torch.bfloat16)])
    exact, _ = train(leaning, torch.float64, params=start(torch.float64))
    plain, _ = train(leaning, params=start(torch.bfloat16), plain=True)
    found, _ = train(leaning, params=start(torch.bfloat16), **options)
    assert off(found, exact, begin) < 0.01 < 0.5 < off(plain, exact, begin)
