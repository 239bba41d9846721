"""Graphs that slices would lose something of are done on joined values; oracle: float64.

For passes.rewrite.join.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from recorded_steps import LR, Each, from_state
from support.interpreter import without_compiler
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

import collage_fx

STEPS = 12
Update = Callable[[Tensor, Tensor, dict[str, Any]], None]


def largest_of_rows(p: Tensor, g: Tensor, state: dict[str, Any]) -> None:
    """Update by an average that goes through a reduction, which no slice has."""
    if not state:
        state["m"] = torch.zeros_like(p)
    m = state["m"]
    m.copy_(m.mul(0.99).add(g.abs(), alpha=0.01).amax(1, keepdim=True).expand_as(m))
    p.sub_(LR * g / (m + 1))


def old_value(p: Tensor, g: Tensor, state: dict[str, Any]) -> None:
    """Keep the parameter of the step before, and add half of how far it has come since."""
    if not state:
        state["old"] = p.clone()
    moved = p - state["old"]
    state["old"].copy_(p)
    p.sub_(LR * g).add_(moved, alpha=0.5)


UPDATES = [largest_of_rows, old_value, from_state]


def run(update: Update, dtype: torch.dtype, wrap: Callable[[Optimizer], Any]) -> tuple[Any, Any]:
    """Return the parameters and states after some steps, in float64, and the step."""
    generator = torch.Generator().manual_seed(0)
    draw = [torch.randn(6, 4, generator=generator) for _ in range(2)]
    params = [(1 + 0.1 * x).bfloat16().to(dtype).requires_grad_() for x in draw]
    optimizer = Each(params, update)
    step = wrap(optimizer)
    for _ in range(STEPS):
        for p, x in zip(params, draw, strict=True):
            noise = torch.randn(6, 4, generator=generator)
            p.grad = (x + 0.1 * noise).bfloat16().to(dtype)
        step()
    found = [params, [optimizer.state[p] for p in params]]
    return tree_map_only(Tensor, collage_fx.value, found), step


def error(found: Any, exact: Any) -> float:
    """Return the largest distance of all parameters and states."""
    pairs = zip(*(tree_leaves(x) for x in (found, exact)), strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


@pytest.mark.parametrize("storage", ["mcf2", "mcf3", "remainder16"])
@pytest.mark.parametrize("arithmetic", ["eft", "wide"])
@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.quick("largest_of_rows-wide-mcf3", "old_value-eft-remainder16", "from_state-eft-mcf3")
def test_nothing_is_lost_and_the_step_stays_with_dynamo(
    update: Update, arithmetic: Any, storage: str
) -> None:
    exact, _ = run(update, torch.float64, lambda o: o.step)
    plain, _ = run(update, torch.bfloat16, lambda o: o.step)

    def compiled(optimizer: Optimizer) -> Any:
        options = {} if arithmetic == "eft" else {"arithmetic": arithmetic}
        return collage_fx.compile(optimizer, storage=storage, **options)

    with without_compiler():
        found, step = run(update, torch.bfloat16, compiled)
    bound = {"mcf2": 1e-4, "mcf3": 1e-6, "remainder16": 1e-6}[storage]
    assert error(found, exact) < bound < 1e-3 < error(plain, exact)
    rows = collage_fx.report(step).states
    assert all(row.graph == STEPS - 1 and row.compensated for row in rows)


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.quick("old_value")
def test_left_out_by_its_name_the_step_is_recorded(update: Update) -> None:
    with without_compiler():
        _, step = run(
            update,
            torch.bfloat16,
            lambda o: collage_fx.compile(o, without=("join",), storage="mcf2"),
        )
    assert all(row.joined == STEPS for row in collage_fx.report(step).states)


def test_a_result_that_others_go_on_with_keeps_its_low_word_in_a_recorded_step() -> None:
    def replaced(p: Tensor, g: Tensor, state: dict[str, Any]) -> None:
        largest_of_rows(p, g, state)
        state["m"] = state["m"] * 0.5 + 0.5 * state["m"].amin()

    exact, _ = run(replaced, torch.float64, lambda o: o.step)
    with without_compiler():
        found, step = run(replaced, torch.bfloat16, lambda o: collage_fx.compile(o, storage="mcf2"))
    assert error(found, exact) < 1e-4
    assert all(row.joined for row in collage_fx.report(step).states)


def test_a_number_that_is_replaced_keeps_its_low_word_in_a_recorded_step() -> None:
    def averaged(p: Tensor, g: Tensor, state: dict[str, Any]) -> None:
        """Keep an average of 0-d, which is made anew at each step."""
        if not state:
            state.update(m=torch.zeros_like(p), size=torch.ones((), dtype=p.dtype))
        largest_of_rows(p, g, state)
        state["size"] = 0.999 * state["size"] + 0.001 * state["m"].mean()

    exact, _ = run(averaged, torch.float64, lambda o: o.step)
    plain, _ = run(averaged, torch.bfloat16, lambda o: o.step)
    with without_compiler():
        options = {"storage": "mcf2", "record": True}
        found, step = run(averaged, torch.bfloat16, lambda o: collage_fx.compile(o, **options))
    assert error(found, exact) < 1e-4 < 1e-3 < error(plain, exact)
    assert all(row.joined for row in collage_fx.report(step).states)


def test_random_numbers_are_drawn_as_in_eager_pytorch() -> None:
    def noisy(p: Tensor, g: Tensor, state: dict[str, Any]) -> None:
        largest_of_rows(p, g, state)
        p.sub_(LR * torch.rand_like(p))

    torch.manual_seed(1)
    exact, _ = run(noisy, torch.bfloat16, lambda o: o.step)
    torch.manual_seed(1)
    with without_compiler():
        found, step = run(noisy, torch.bfloat16, lambda o: collage_fx.compile(o, storage="mcf2"))
    assert all(row.joined for row in collage_fx.report(step).states)
    assert error(found[1], exact[1]) < 1e-2


def test_a_state_that_is_only_read_enters_with_its_residual() -> None:
    def from_start(p: Tensor, g: Tensor, state: dict[str, Any]) -> None:
        """Compute the parameter anew from where the first step left it, between two bf16."""
        if not state:
            p.sub_(LR * g)
            state["start"], state["sum"] = p.clone(), torch.zeros_like(p)
        state["sum"].add_(g)
        p.copy_(state["start"] - LR * state["sum"])

    exact, _ = run(from_start, torch.float64, lambda o: o.step)
    plain, _ = run(from_start, torch.bfloat16, lambda o: o.step)
    with without_compiler():
        found, step = run(
            from_start, torch.bfloat16, lambda o: collage_fx.compile(o, storage="mcf2")
        )
    assert error(found[0], exact[0]) < 5e-5 < 1e-3 < error(plain[0], exact[0])
    rows = collage_fx.report(step).states
    assert all(row.graph > STEPS / 2 for row in rows if row.name.startswith("p")), step
