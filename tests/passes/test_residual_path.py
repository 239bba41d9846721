"""Each state's residual reaches its new value: what lo adds to x is a*lo in x' = a*x + B.

For passes.rewrite.residual_inputs and passes.rewrite.expand.
"""

from typing import Any

import pytest
import torch
from graphs import OPTIMIZERS, capture_optimizer, named, random_inputs
from torch import Tensor, optim
from torch.optim import Optimizer

from collage_fx.passes.ir.program import Rewritten

U2 = 2.0**-16


def change_by_residual(r: Rewritten, which: int, inputs: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The new value of a compensated state, and what it owes to the state's own residual."""
    assert r.expanded is not None
    part, place = r.members[0], list(r.storages).index(which)
    without = list(inputs)
    without[len(part.inputs) + place] = torch.zeros_like(inputs[len(part.inputs) + place])
    hi_at, lo_at = part.outputs.index(part.states[which][2]), len(part.outputs) + place
    new, old = (
        results[hi_at].double() + results[lo_at].double()
        for results in (r.expanded(*inputs), r.expanded(*without))
    )
    return new, new - old


CONSTANT = [(kind, options) for kind, options in OPTIMIZERS if kind is not optim.ASGD]
"""ASGD has tensors for factors of both its states."""


@pytest.mark.parametrize("kind, options", CONSTANT, ids=named)
@pytest.mark.quick("NAdam-foreach=True", "SGD-foreach=True*")
def test_residuals_pass_through_the_step(kind: type[Optimizer], options: dict[str, Any]) -> None:
    r = capture_optimizer(kind, **options).rewritten("all")
    inputs = random_inputs(r.expanded)
    # x' = a*x + B(x) has the residual in B(x) too, where the step widened x itself.
    linear = [
        i
        for i in r.storages
        if r.recurrences[i].kind == "linear" and "B(x)" not in r.recurrences[i].text
    ]
    assert linear
    for which in linear:
        a, place = float(r.recurrences[which].a), list(r.storages).index(which)
        new, change = change_by_residual(r, which, inputs)
        expected = a * inputs[len(r.members[0].inputs) + place].double()
        error = (change - expected).abs() / new.abs().clamp(min=0.5)
        worst = float(error[new.isfinite()].max()) / U2
        # Two results with an error of 5 u^2 each.
        assert worst < 10, f"{r.members[0].states[which][0].name}: {worst:.1f} u^2"
