"""States that lie in one memory, in that of a buffer, or in less than they have elements.

For segments.low_words and compilation.graph_inputs.
"""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from narrow_steps import Written
from recorded_steps import LR, off, start, train
from torch import Tensor

import collage_fx
from collage_fx.compilation import aot
from collage_fx.errors import CollageWarning
from collage_fx.segments.low_words import LowWords


def halves_of_one_result(p: Tensor, g: Tensor, state: Any) -> None:
    z, y = (state["z"], state["y"]) if state else (p.detach(), p.detach())
    both = torch.stack([z - LR * g, y - 2 * LR * g])
    assert float(g.sum()) > 0
    state["z"], state["y"] = both[0], both[1]
    p.copy_(0.5 * state["z"] + 0.5 * state["y"])


def data_of_one_result(p: Tensor, g: Tensor, state: Any) -> None:
    both = torch.stack([p.detach() - LR * g, state.get("y", p.detach()) - LR * g])
    state["y"] = both[0]
    p.data = both[1]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"record": True}, {"record": True, "storage": "remainder16"}])
@pytest.mark.parametrize("update", [halves_of_one_result, data_of_one_result])
@pytest.mark.quick("halves_of_one_result-options0")
def test_states_that_are_parts_of_one_result(
    update: Callable[..., None], options: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: taken up one after another, all but the first lose their low words."""
    exact, _ = train(update, torch.float64)
    begin, _ = train(update, torch.float64, steps=0)
    found, _ = train(update, **options)
    assert off(found, exact, begin) < 0.03
    together = LowWords.adopt
    monkeypatch.setattr(LowWords, "adopt", lambda self, found: [together(self, [o]) for o in found])
    one_by_one, _ = train(update, **options)
    assert off(one_by_one, exact, begin) > 0.2


@torch.no_grad()
def by_the_buffer(self: Any, params: Any, grads: Any, states: Any) -> None:
    """Update the buffer of which all parameters are views."""
    self.flat.sub_(torch.cat([g.flatten() for g in grads]) * LR)


Way = Callable[[Any], Callable[[], Any]]


def flat_steps(dtype: torch.dtype, way: Way) -> Tensor:
    torch.compiler.reset()
    flat = torch.cat([p.detach().flatten() for p in start(dtype)])
    params = [torch.nn.Parameter(v) for v in flat.split(12)]
    optimizer: Any = Written(params, by_the_buffer)
    optimizer.flat = flat
    step = way(optimizer)
    for _ in range(8):
        for p in params:
            p.grad = torch.ones_like(p)
        step()
    return torch.cat([collage_fx.value(p).detach().double() for p in params])


@pytest.mark.parametrize(
    "way",
    [collage_fx.compile, lambda optimizer: torch.compile(optimizer.step, backend="collage")],
    ids=["compile", "string"],
)
@pytest.mark.quick("string")
def test_a_buffer_of_which_parameters_are_views(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step counts. Control: the buffer's own low word is not that of the parameters."""
    begin = torch.cat([p.detach().double().flatten() for p in start(torch.float64)])
    exact = flat_steps(torch.float64, lambda optimizer: optimizer.step)
    with warnings.catch_warnings():
        warnings.simplefilter("error", CollageWarning)
        found = flat_steps(torch.bfloat16, way)
    assert off(found, exact, begin) < 0.02
    monkeypatch.setattr(aot.Inputs, "share_memory_of_states", lambda self: False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert off(flat_steps(torch.bfloat16, way), exact, begin) > 0.1


@pytest.mark.parametrize("options", [{}, {"record": True}, {"record": True, "storage": "mcf3"}])
@pytest.mark.quick("options0")
def test_a_state_that_is_expanded_is_left_alone(options: Any) -> None:
    """As PyTorch has it, several elements are one in memory: it is named, and steps are taken."""

    def update(p: Tensor, g: Tensor, state: Any) -> None:
        x = state.get("x", torch.zeros_like(p))
        state["x"] = (x[:1] * 0.9 + g.mean(0, keepdim=True) * 0.1).expand_as(p)
        p.sub_(LR * state["x"])

    exact, _ = train(update, torch.float64)
    begin, _ = train(update, torch.float64, steps=0)
    with pytest.warns(CollageWarning, match="x of .* overlap"):
        found, _ = train(update, **options)
    assert off(found, exact, begin) < 0.05


@pytest.mark.parametrize("words", [(), ("not finite",)])
def test_an_assertion_is_recorded_with_a_message_or_without(words: tuple[str, ...]) -> None:
    def update(p: Tensor, g: Tensor, state: Any) -> None:
        torch._assert_async((p < 2).all(), *words)
        p.add_(1)

    with pytest.raises(RuntimeError, match="not"):
        train(update, record=True, steps=4)
