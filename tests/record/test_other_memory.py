"""Memory that is in no place where states are looked for: states in holders, and scratch memory."""

import functools
from collections import UserDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from recorded_steps import Each, off, start, train
from torch import Tensor

import collage_fx
from collage_fx.record.known_states import OtherMemory

DECAY = 1e-3
"""At which an average in bf16 stands still."""
_GLOBAL: dict[Any, Any] = {}


class Slots:
    """An object without a __dict__."""

    __slots__ = ("m",)


def _in_object(holder: Any) -> tuple[Callable[[], Tensor], Callable[[Tensor], None]]:
    return lambda: holder.m, lambda value: setattr(holder, "m", value)


def _in_dict(holder: Any) -> tuple[Callable[[], Tensor], Callable[[Tensor], None]]:
    return lambda: holder["m"], lambda value: holder.__setitem__("m", value)


def holder_of(kind: str, p: Tensor) -> tuple[Callable[[], Tensor], Callable[[Tensor], None]]:
    """Return how to read, and replace, a state that is kept in a kind of holder."""
    if kind == "module":
        module = torch.nn.Module()
        module.register_buffer("m", None)
        return _in_object(module)
    if kind == "parameter":
        return _in_object(p)
    if kind == "closure":
        kept: dict[str, Any] = {}
        return _in_dict(kept)
    if kind == "partial":
        cell = functools.partial(dict)
        return lambda: cell.keywords["m"], lambda value: cell.keywords.__setitem__("m", value)
    if kind == "global":
        return _in_dict(_GLOBAL)
    made: Any = {"object": SimpleNamespace, "slots": Slots, "user dict": UserDict}[kind]()
    return _in_dict(made) if kind == "user dict" else _in_object(made)


KINDS = ["object", "slots", "user dict", "module", "closure", "partial", "global", "parameter"]
WAYS = ["replaced", "data", "view"]
STEPS = 40


def averaged(kind: str, way: str, dtype: torch.dtype) -> tuple[float, float, Any]:
    """Return an average of forty steps, what its parameter moved by, and the step."""
    p = torch.nn.Parameter(torch.ones(2, 3, dtype=dtype))
    get, put = holder_of(kind, p)

    def update(p: Tensor, g: Tensor, state: Any) -> None:
        if not state:
            state["steps"] = 0
            put(torch.ones_like(p))
        state["steps"] += 1
        m = get()
        if way == "replaced":
            put(m * (1 - DECAY) + DECAY * g * g)
        elif way == "data":
            m.data.mul_(1 - DECAY).addcmul_(g, g, value=DECAY)
        elif way == "view":
            m.view(-1).mul_(1 - DECAY).addcmul_(g.view(-1), g.view(-1), value=DECAY)
        else:
            m.mul_(1 - DECAY).addcmul_(g, g, value=DECAY)
        p.sub_(g / get().sqrt(), alpha=1e-3)

    optimizer = Each([p], update)
    plain = dtype == torch.float64
    step = optimizer.step if plain else collage_fx.compile(optimizer, record=True)
    for _ in range(STEPS):
        p.grad = torch.full_like(p, 0.125)
        step()
    values = (collage_fx.value(t).double()[0, 0] for t in (get(), p))
    return (*map(float, values), step)  # type: ignore[return-value]


@pytest.mark.filterwarnings("ignore:.*belong to no torch.optim.Optimizer")
@pytest.mark.parametrize(
    ("kind", "way"),
    [*((kind, "in place") for kind in KINDS), *(("object", way) for way in WAYS)],
)
def test_a_state_in_any_holder_is_compensated(kind: str, way: str) -> None:
    exact, found = averaged(kind, way, torch.float64), averaged(kind, way, torch.bfloat16)
    assert exact[0] == pytest.approx(found[0], abs=2e-4)
    assert 1 - exact[1] == pytest.approx(1 - found[1], rel=0.01)
    names = [state.name for state in collage_fx.report(found[2]).states]
    assert len(names) == 2
    assert "keeps" in names[1] or "test_other_memory.py" in names[1]


def test_it_would_stand_still_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OtherMemory, "take_up", lambda *_: None)
    monkeypatch.setattr(OtherMemory, "adopt", lambda _: None)
    assert averaged("object", "in place", torch.bfloat16)[0] == 1


def test_its_residual_is_the_users_to_save() -> None:
    with pytest.warns(collage_fx.CollageWarning, match=r"belong to no .* or keep the tensors in"):
        averaged("object", "in place", torch.bfloat16)


BUFFER: dict[Any, Tensor] = {}


def in_gradient(p: Tensor, g: Tensor, state: Any) -> None:
    """Compute the parameter in the memory of its gradient."""
    torch.add(p, g, alpha=-1e-3, out=g)
    if bool(g.isfinite().all()):
        p.copy_(g)


def in_gradient_after_decay(p: Tensor, g: Tensor, state: Any) -> None:
    """Do so where the same segment writes the parameter too."""
    p.mul_(1 - 1e-5)
    g.mul_(-1e-3).add_(p)
    if bool(g.isfinite().all()):
        p.copy_(g)


def in_global(p: Tensor, g: Tensor, state: Any) -> None:
    """Compute the parameter in a buffer that is kept from step to step."""
    x = BUFFER.setdefault(p.dtype, torch.empty_like(p))
    torch.add(p, g, alpha=-1e-3, out=x)
    if bool(x.isfinite().all()):
        p.copy_(x)


def as_gradient(p: Tensor, g: Tensor, state: Any) -> None:
    """Give the parameter the memory of its gradient."""
    torch.add(p, g, alpha=-1e-3, out=g)
    if bool(g.isfinite().all()):
        p.data = g


def error(update: Callable[..., None], steps: int = 20, **options: Any) -> tuple[float, Any]:
    """Return the error as a share of the way, and the step."""
    BUFFER.clear()
    exact, _ = train(update, torch.float64, steps=steps)
    found, step = train(update, steps=steps, **options)
    begin = torch.cat([p.detach().double().flatten() for p in start(torch.bfloat16)])
    return off(found, exact, begin), step


SCRATCH = [in_gradient, in_gradient_after_decay, in_global, as_gradient]


@pytest.mark.parametrize("update", SCRATCH, ids=[f.__name__ for f in SCRATCH])
def test_scratch_memory_keeps_what_is_computed_there(update: Callable[..., None]) -> None:
    for options in ({}, {"arithmetic": "wide", "storage": "remainder16"}):
        off_by, step = error(update, record=True, **options)
        assert off_by < 0.01
        assert not any("elsewhere" in state.name for state in collage_fx.report(step).states)


def test_it_would_be_rounded_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OtherMemory, "keep_low_words", lambda *_, **__: None)
    assert error(in_gradient, record=True)[0] > 0.5


def test_a_decay_in_the_gradient_is_compiled_as_before() -> None:
    """Nobody reads it later: the segment goes through the passes, and its verdicts are known."""

    def update(p: Tensor, g: Tensor, state: Any) -> None:
        g.add_(p, alpha=1e-2)
        p.sub_(g, alpha=1e-3)

    _, step = error(update, record=True)
    assert {state.engine for state in collage_fx.report(step).states[:2]} == {"graph + joined"}


def test_memory_that_others_fill_is_no_state() -> None:
    """A buffer of gradients that a step scales: no warning, an error here, when it is filled."""
    p = start(torch.bfloat16, count=1)[0]
    main = torch.zeros_like(p).detach()

    def update(p: Tensor, g: Tensor, state: Any) -> None:
        main.mul_(0.999).add_(g, alpha=1e-6)
        p.sub_(main)

    step = collage_fx.compile(Each([p], update), record=True)
    for k in range(6):
        filled = torch.full_like(p, 1e-3 * (k + 1)).detach()
        main.copy_(filled)
        p.grad = torch.ones_like(p)
        step()
        exact = 0.999 * float(filled[0, 0]) + 1e-6  # and no low word of another value
        assert float(collage_fx.value(main)[0, 0]) == pytest.approx(exact, rel=1e-4)
