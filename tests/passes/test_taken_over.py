"""Parameters that take over the values of other states, and values that are stored in several.

For passes.analysis.plan.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

import collage_fx
from collage_fx.errors import CollageWarning

LR = 1e-4


class Step(Optimizer):
    """Updates each parameter from a state z, which begins as a copy of it."""

    def __init__(self, params: list[Tensor], update: Callable[[Tensor, Tensor, Any], None]) -> None:
        super().__init__(params, {})
        self.update = update
        for p in params:
            self.state[p]["z"] = p.detach().clone()

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            self.update(p, p.grad, self.state[p]["z"])


def taken(p: Tensor, g: Tensor, z: Tensor) -> None:
    z.sub_(g, alpha=LR)
    p.copy_(z)


def recomputed(p: Tensor, g: Tensor, z: Tensor) -> None:
    z.sub_(g, alpha=LR)
    p.copy_(0.25 * z + 0.75 * z)


def followed(p: Tensor, g: Tensor, z: Tensor) -> None:
    z.sub_(g, alpha=LR)
    p.lerp_(z, 0.9)


def decided(p: Tensor, g: Tensor, z: Tensor) -> None:
    z.sub_(g, alpha=LR)
    p.copy_(z.sign())


def moved(update: Any, dtype: torch.dtype, compile: Callable[[Optimizer], Any]) -> Any:
    """Return how far a parameter and its z have moved, and the step."""
    torch.compiler.reset()
    p = torch.ones(4, dtype=dtype, requires_grad=True)
    p.grad = torch.ones_like(p)
    optimizer = Step([p], update)
    step = compile(optimizer)
    for _ in range(10):
        step()
    return *(1 - float(collage_fx.value(t)[0]) for t in (p, optimizer.state[p]["z"])), step


@pytest.mark.parametrize("update", [taken, recomputed, followed])
def test_level_light_keeps_what_a_parameter_is_computed_from(update: Any) -> None:
    exact = moved(update, torch.float64, lambda optimizer: optimizer.step)
    plain = moved(update, torch.bfloat16, lambda optimizer: optimizer.step)
    ours = moved(
        update, torch.bfloat16, lambda o: collage_fx.compile(o, level="light", storage="mcf2")
    )
    assert ours[:2] == pytest.approx(exact[:2], rel=0.01)
    assert plain[1] == 0
    states = collage_fx.report(ours[2]).states
    assert len(states) == 2 and all(s.compensated for s in states)
    assert all(s.graph == 10 for s in states) or update is recomputed


def test_the_backend_string_at_level_light_keeps_it_too() -> None:
    exact = moved(taken, torch.float64, lambda optimizer: optimizer.step)
    options = {"level": "light"}
    ours = moved(
        taken,
        torch.bfloat16,
        lambda o: torch.compile(o.step, backend="collage", options=options),
    )
    assert ours[:2] == pytest.approx(exact[:2], rel=0.01)


def test_a_parameter_that_takes_over_a_state_stays_in_the_graph_at_every_level() -> None:
    for level in ("auto", "plus", "all"):
        distance, _, step = moved(
            taken,
            torch.bfloat16,
            lambda o, level=level: collage_fx.compile(o, level=level, storage="mcf2"),
        )
        assert distance == pytest.approx(10 * LR, rel=0.01)
        assert all(s.graph == 10 and s.compensated for s in collage_fx.report(step).states)


def test_a_warning_says_what_level_light_loses() -> None:
    options = {"level": "light", "seed": 7}  # one session does not say a thing twice
    for function in (
        collage_fx.compile(decided, level="light", storage="mcf2"),
        torch.compile(decided, backend="collage", options=options),
    ):
        p, g, z = (torch.ones(4).bfloat16() for _ in range(3))
        p.requires_grad_()
        with torch.no_grad(), pytest.warns(CollageWarning, match=r"z lose updates.*level='auto'"):
            for _ in range(3):
                function(p, g, z)


KEEPS = {"mcf2": 2.0**-17, "mcf3": 2.0**-23, "remainder16": 2.0**-23, "ulp8": 2.0**-16}
"""Storage -> the largest relative error of its states after one step."""


def mixed(
    mcf2: list[Tensor],
    mcf3: list[Tensor],
    remainder16: list[Tensor],
    ulp8: list[Tensor],
    plain: list[Tensor],
    g: list[Tensor],
) -> None:
    """Store the average of all states, moved by a gradient, in each of them."""
    for *states, grad in zip(mcf2, mcf3, remainder16, ulp8, plain, g, strict=True):
        new = sum(x * 0.25 for x in states[:4]) - grad * 1e-3
        for x in states:
            x.copy_(new)


@pytest.mark.parametrize("members", [1, 9])
@pytest.mark.quick("1")
def test_one_value_is_split_once_for_each_storage(members: int) -> None:
    generator = torch.Generator().manual_seed(0)
    begin = [(torch.rand(500, generator=generator) + 0.5).bfloat16() for _ in range(6 * members)]

    def columns(dtype: torch.dtype) -> list[list[Tensor]]:
        return [[t.to(dtype) for t in begin[i * members : (i + 1) * members]] for i in range(6)]

    storage = {f"{name}*": name for name in KEEPS} | {"*": "mcf2"}
    step = collage_fx.compile(mixed, storage=storage)
    ours, exact = columns(torch.bfloat16), columns(torch.float64)
    for k in range(20):
        step(*ours)
        mixed(*exact)
        for (_, keeps), mine, theirs in zip(KEEPS.items(), ours, exact, strict=False):
            for x, y in zip(mine, theirs, strict=True):
                error = float((collage_fx.value(x) / y - 1).abs().max())
                assert error < (2.0**-13 if k else 1.01 * keeps)
                assert k or error > keeps / 4


def test_one_value_in_two_storages_of_fp8() -> None:
    def step(two: Tensor, three: Tensor, g: Tensor) -> None:
        new = (0.5 * two.float() + 0.5 * three.float() - 0.01 * g.float()).to(two.dtype)
        two.copy_(new)
        three.copy_(new)

    x = torch.rand(500, generator=torch.Generator().manual_seed(0)) + 1
    ours = [x.to(torch.float8_e4m3fn) for _ in range(2)] + [x]
    exact = [t.double() for t in ours]
    collage_fx.compile(step, storage={"two": "mcf2", "three": "mcf3"})(*ours)
    new = 0.5 * exact[0] + 0.5 * exact[1] - 0.01 * exact[2]
    for state, bits in zip(ours[:2], (9, 14), strict=True):
        error = float((collage_fx.value(state) / new - 1).abs().max())
        assert 2.0 ** -(bits + 3) < error < 2.0**-bits


def test_light_names_what_a_function_loses() -> None:
    """No tensor of it is known to be a parameter, and a slow decay may be a second moment's."""
    step = collage_fx.compile(lambda p: p.mul_(1 - 1e-3), level="light", storage="mcf2")
    with pytest.warns(CollageWarning, match="level light compensates parameters.*p lose"):
        for _ in range(3):
            step(torch.ones(4).bfloat16())
