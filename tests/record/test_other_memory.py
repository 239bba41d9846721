"""Memory that no search for states finds. For record.known_states and segments.low_words."""

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
from collage_fx.segments.low_words import LowWords

DECAY = 1e-3
"""Decay at which an average in bf16 stands still."""
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
@pytest.mark.quick("object-in place", "object-data", "closure-*", "parameter-*")
def test_a_state_in_any_holder_is_compensated(kind: str, way: str) -> None:
    exact, found = averaged(kind, way, torch.float64), averaged(kind, way, torch.bfloat16)
    assert exact[0] == pytest.approx(found[0], abs=2e-4)
    assert 1 - exact[1] == pytest.approx(1 - found[1], rel=0.01)
    names = [state.name for state in collage_fx.report(found[2]).states]
    assert len(names) == 2
    assert "keeps" in names[1] or "test_other_memory.py" in names[1]


def test_it_would_stand_still_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OtherMemory, "take_up", lambda *_: False)
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


def in_gradient_from_fp32(p: Tensor, g: Tensor, state: Any) -> None:
    """Do so with a value in fp32 that is looked at before."""
    x = p - 1e-3 * g.float()
    if bool(x.isfinite().all()):
        g.copy_(x)
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


SCRATCH = [in_gradient, in_gradient_after_decay, in_gradient_from_fp32, in_global, as_gradient]


@pytest.mark.parametrize("update", SCRATCH, ids=[f.__name__ for f in SCRATCH])
@pytest.mark.quick("in_gradient_from_fp32", "in_global")
def test_scratch_memory_keeps_what_is_computed_there(update: Callable[..., None]) -> None:
    for options in ({}, {"arithmetic": "wide", "storage": "remainder16"}):
        off_by, step = error(update, record=True, **options)
        assert off_by < 0.01
        assert not any("elsewhere" in state.name for state in collage_fx.report(step).states)


def test_it_would_be_rounded_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OtherMemory, "keep_low_words", lambda *_, **__: None)
    assert error(in_gradient, record=True)[0] > 0.5


def test_it_would_be_rounded_if_results_in_fp32_did_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(LowWords, "is_result", lambda *_: False)
    assert error(in_gradient_from_fp32, record=True)[0] > 0.5


def test_a_decay_in_the_gradient_is_compiled_as_before() -> None:
    """Nobody reads it later: the segment goes through the passes, and its verdicts are known."""

    def update(p: Tensor, g: Tensor, state: Any) -> None:
        g.add_(p, alpha=1e-2)
        p.sub_(g, alpha=1e-3)

    _, step = error(update, record=True)
    assert {state.engine for state in collage_fx.report(step).states[:2]} == {"graph + joined"}


def refilled(way: str) -> Callable[[Tensor, float], None]:
    """Return how somebody gives memory another value between two steps."""
    if way == "counted":
        return lambda t, x: t.fill_(x)
    if way == "data":
        return lambda t, x: t.data.fill_(x)
    return lambda t, x: (
        t.detach()
        .view(torch.int16)
        .numpy()
        .__setitem__(slice(None), int(torch.tensor(x, dtype=torch.bfloat16).view(torch.int16)))
    )


@pytest.mark.filterwarnings("ignore:.*belong to no torch.optim.Optimizer")
@pytest.mark.parametrize("way", ["counted", "data", "numpy"])
@pytest.mark.parametrize("made", ["before", "in the step"])
def test_memory_that_others_fill_keeps_no_low_word(made: str, way: str) -> None:
    """Of a value that it has no more: with the sign of another, remainder16 would give NaN."""
    p = start(torch.bfloat16, count=1)[0]
    holder = SimpleNamespace(m=torch.zeros_like(p).detach() if made == "before" else None)
    fill = refilled(way)

    def update(p: Tensor, g: Tensor, state: Any) -> None:
        if holder.m is None:
            holder.m = torch.zeros_like(p)
        holder.m.mul_(0.9).add_(p, alpha=1 / 3)
        p.sub_(holder.m, alpha=1e-3)

    step = collage_fx.compile(Each([p], update), record=True, storage="remainder16")
    for k in range(6):
        if holder.m is not None:
            fill(holder.m, 0.0 if k % 2 else 0.1)
        before, p.grad = collage_fx.value(p).clone(), torch.ones_like(p)
        step()
        filled = (
            0.0 if k % 2 or (made != "before" and k == 0) else float(torch.tensor(0.1).bfloat16())
        )
        exact = before - 1e-3 * (0.9 * filled + before / 3)
        assert torch.allclose(collage_fx.value(p), exact, rtol=1e-6)


def test_a_closure_fills_a_gradient_that_was_scratch() -> None:
    """As SAM's does, of which the second gradient has no low word of the first."""

    def trained(dtype: torch.dtype) -> Tensor:
        p = start(dtype, count=1)[0]

        class Sharp(Each):
            def step(self, closure: Any) -> None:  # type: ignore[override]
                with torch.enable_grad():
                    closure()
                p.grad.add_(p.detach(), alpha=0.1)
                p.grad.mul_(0.05 / float(p.grad.norm()))
                old = p.detach().clone()
                p.data.add_(p.grad)
                with torch.enable_grad():
                    closure()
                p.data.copy_(old)
                p.data.sub_(p.grad, alpha=0.1)

        optimizer = Sharp([p], in_gradient)
        plain = dtype == torch.float64
        step = (
            optimizer.step
            if plain
            else collage_fx.compile(optimizer, record=True, storage="remainder16")
        )

        def closure() -> None:
            optimizer.zero_grad(set_to_none=False)
            (p * 2**-12).sum().backward()

        for _ in range(8):
            step(closure)
        return collage_fx.value(p).double()

    assert torch.allclose(trained(torch.bfloat16), trained(torch.float64), atol=1e-6)


def test_scratch_memory_that_is_written_as_bits_has_no_low_word() -> None:
    s = torch.empty(4, 3, dtype=torch.bfloat16)

    def update(p: Tensor, g: Tensor, state: Any) -> None:
        s.copy_(p).mul_(1 / 3)
        if float(s.sum()) > 0:
            s.view(torch.int16).zero_()
        p.sub_(s)

    params = start(torch.bfloat16, count=1)
    before = params[0].detach().clone()
    found, _ = train(update, params=params, record=True, steps=3)
    assert torch.equal(found, before.double().flatten())
