"""Recorded steps draw what eager PyTorch draws, and leave the generator where it does.

For record.at_once.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from recorded_steps import Each, start
from torch import Tensor
from torch._inductor import config as inductor_config

import collage_fx
from collage_fx.record import at_once

DRAWN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "uniform_": lambda s, p: s.uniform_(-1, 1),
    "normal_": lambda s, p: s.normal_(0.5, 2.0),
    "exponential_": lambda s, p: s.exponential_(),
    "cauchy_": lambda s, p: s.cauchy_(),
    "geometric_": lambda s, p: s.geometric_(0.3),
    "log_normal_": lambda s, p: s.log_normal_(),
    "random_": lambda s, p: s.random_(),
    "random_ from": lambda s, p: s.random_(3, 90),
    "bernoulli_": lambda s, p: s.bernoulli_(0.3),
    "bernoulli_ of a tensor": lambda s, p: s.bernoulli_((p / 2).clamp(0, 1)),
    "bernoulli": lambda s, p: s.copy_(torch.bernoulli((p / 2).clamp(0, 1))),
    "bernoulli out": lambda s, p: torch.bernoulli((p / 2).clamp(0, 1), out=s),
    "rows": lambda s, p: s[1:].uniform_(),
    "columns": lambda s, p: s.t()[1:].normal_(),
    "normal of numbers": lambda s, p: s.copy_(torch.normal(0.5, p.abs())),
    "rand_like": lambda s, p: s.copy_(torch.rand_like(p)),
    "randn_like": lambda s, p: s.copy_(torch.randn_like(p)),
    "dropout": lambda s, p: s.copy_(torch.nn.functional.dropout(p.sign(), 0.5)),
    "native_dropout": lambda s, p: s.copy_(torch.native_dropout(p.sign(), 0.5, True)[0]),
    "rrelu": lambda s, p: s.copy_(torch.nn.functional.rrelu(-p.sign(), training=True)),
    "multinomial": lambda s, p: s.copy_(torch.multinomial(p.abs(), 3, replacement=True)),
    "poisson": lambda s, p: s.copy_(torch.poisson(p.abs() * 4)),
}
"""Each writes a state with what is drawn; of states and parameters it reads whole bf16 numbers."""
WAYS: dict[str, dict[str, Any]] = {"recorded": {"record": True}, "at once": {"record": False}}


def draws(draw: Callable[[Tensor, Tensor], Tensor], **options: Any) -> tuple[list[Tensor], Tensor]:
    """Return the states after each step, of eager PyTorch without options, and where the generator
    is at the end."""
    (p,) = start(torch.bfloat16, (4, 3), count=1)
    found: list[Tensor] = []

    def update(p: Tensor, g: Tensor, state: Any) -> None:
        if not state:
            state["s"] = torch.zeros_like(p)
            state["m"] = torch.zeros_like(p)
        state["m"].mul_(0.999).add_(g, alpha=1e-3)  # with a low word
        state["s"].add_(state["m"] * 1e-3)  # so has what is written over
        draw(state["s"], p.detach())

    optimizer = Each([p], update)
    step = collage_fx.compile(optimizer, **options) if options else optimizer.step
    torch.manual_seed(7)
    for _ in range(3):
        p.grad = torch.full_like(p, 0.3)
        step()
        state = optimizer.state[p]["s"]
        found.append(collage_fx.value(state) if options else state.double().clone())
    return found, torch.get_rng_state()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", DRAWN)
def test_the_numbers_are_those_of_eager_pytorch(name: str, way: str) -> None:
    expected, place = draws(DRAWN[name])
    with torch.compiler.set_stance("force_eager"):  # Dynamo's graphs draw as Inductor does
        found, at = draws(DRAWN[name], **WAYS[way])
    assert torch.equal(at, place), "the generator is elsewhere"
    for one, wanted in zip(found, expected, strict=True):
        if name in ("rows", "columns"):  # of which the rest is a sum with its low word
            one, wanted = (x[1:] if name == "rows" else x[:, 1:] for x in (one, wanted))
        assert torch.equal(one, wanted)


def test_in_a_wider_dtype_other_numbers_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: drawn on whole values, in float64, as all else is done."""
    expected, place = draws(DRAWN["uniform_"])
    monkeypatch.setattr(at_once, "draws", lambda func: False)
    found, at = draws(DRAWN["uniform_"], record=True, storage="mcf2")
    assert not torch.equal(at, place) and not torch.equal(found[0], expected[0])


@pytest.mark.parametrize("std", [1e-4, torch.full((4, 3), 1e-4, dtype=torch.bfloat16)])
def test_a_mean_keeps_its_low_word(std: Any) -> None:
    """A random walk with a drift that bf16 would round away, against the same in float64."""
    results = []
    for options in ({"record": True}, {}):
        (p,) = start(torch.bfloat16, (4, 3), count=1)

        def update(p: Tensor, g: Tensor, state: Any) -> None:
            p.copy_(torch.normal(p - 1e-4 * g, std))

        optimizer = Each([p], update)
        step = collage_fx.compile(optimizer, **options) if options else optimizer.step
        exact, drawn = p.detach().double(), torch.Generator().manual_seed(7)
        torch.manual_seed(7)
        for _ in range(20):
            p.grad = torch.full_like(p, 0.3)
            step()
            zero = torch.zeros_like(p.detach())
            exact += torch.normal(zero, std, generator=drawn).double() - 1e-4 * p.grad.double()
        assert torch.equal(torch.get_rng_state(), drawn.get_state())
        whole = collage_fx.value(p) if options else p.detach().double()
        results.append(float((whole - exact).abs().max()))
    assert results[0] < 2e-5 and results[1] > 1e-3, results


def test_all_that_takes_a_generator_is_known_to_draw() -> None:
    """By its tag: what has none would be drawn in a wider dtype."""
    every = [s for s in torch._C._jit_get_all_schemas() if s.name.startswith("aten::")]
    takes = [s for s in every if any("Generator" in str(a.type) for a in s.arguments)]
    packets = {s.name.removeprefix("aten::") for s in takes}
    untagged = {
        name
        for name in packets
        if hasattr(torch.ops.aten, name)
        for overload in [getattr(torch.ops.aten, name)]
        if not any(at_once.draws(getattr(overload, o)) for o in overload.overloads())
    }
    assert untagged <= {
        "_no_grad_normal_",
        "_no_grad_uniform_",
        "initial_seed",
        "manual_seed",
        "seed",
    }
    assert len(packets) > 20


def test_traced_graphs_draw_in_the_order_of_the_step() -> None:
    """Draws that look at values of several regions are in eager order if Inductor's are."""

    def step(params: list[Tensor], grads: list[Tensor]) -> None:
        for p, g in zip(params, grads, strict=True):
            p.sub_(g + torch.rand_like(g), alpha=1e-2)
            p.add_(torch.rand_like(p), alpha=1e-2)

    params = [torch.ones(4, 3).bfloat16(), torch.ones(4, 3).bfloat16()]
    grads = [torch.ones_like(p) for p in params]
    with inductor_config.patch(fallback_random=True):
        torch.manual_seed(7)
        collage_fx.compile(step)(params, grads)
    generator = torch.Generator().manual_seed(7)
    for p in params:
        first, second = (
            torch.rand(4, 3, generator=generator, dtype=torch.bfloat16) for _ in range(2)
        )
        wanted = 1 - 1e-2 * (1 + first.double()) + 1e-2 * second.double()
        assert float((collage_fx.value(p) - wanted).abs().max()) < 1e-4
        # The control: by each other's numbers.
        assert float((collage_fx.value(p) - wanted.flip(0)).abs().max()) > 1e-3
