"""Which steps are seen, from their code, to treat each parameter by itself and all alike."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import steps_of_users
import torch

from collage_fx.loops import treats_parameters_alike

ALIKE = [f for name, f in vars(steps_of_users).items() if name.startswith("alike_")]
UNKNOWN = [f for name, f in vars(steps_of_users).items() if name.startswith("unknown_")]


@pytest.mark.parametrize("step", ALIKE, ids=lambda f: f.__name__)
def test_a_loop_over_parameters(step: Callable[..., Any]) -> None:
    assert treats_parameters_alike(step)


@pytest.mark.parametrize("step", UNKNOWN, ids=lambda f: f.__name__)
def test_what_may_depend_on_other_parameters(step: Callable[..., Any]) -> None:
    assert not treats_parameters_alike(step)


def test_what_has_no_code() -> None:
    """Closures, built-in functions, code that is not in a file."""
    scale = 2.0

    def step(self: Any) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad * scale)

    scope: dict[str, Any] = {}
    exec("def step(self):\n for g in self.param_groups:\n  for p in g['params']: p.neg_()", scope)
    assert not any(map(treats_parameters_alike, (step, math.sqrt, scope["step"], torch.optim.SGD)))
