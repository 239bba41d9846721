"""A run goes on from a checkpoint bit for bit if its steps put new tensors in place of states.

For optimizer.checkpoints.state_dicts.
"""

import copy
from typing import Any

import pytest
import torch
from recorded_steps import Each
from torch import Tensor

import collage_fx

STEPS, SAVED = 9, 4


def replaced(p: Tensor, g: Tensor, state: Any) -> None:
    if not state:
        state["m"], state["v"] = torch.zeros_like(p), torch.full_like(p, 1.0)
    state["m"] = 0.9 * state["m"] + 0.1 * g
    state["v"] = state["v"] + 0.001 * (g * g - state["v"])
    p.data = p.data - 1e-3 * state["m"] / state["v"].sqrt()


def read_on_the_way(p: Tensor, g: Tensor, state: Any) -> None:
    replaced(p, g, state)
    state["norm"] = g.norm()
    assert float(state["norm"]) > 0
    p.sub_(1e-3 * state["m"])


class Run:
    """A parameter, its optimizer and its compiled step."""

    def __init__(self, update: Any, options: dict[str, Any]) -> None:
        begin = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
        self.p = torch.nn.Parameter(begin.bfloat16())
        self.optimizer = Each([self.p], update)
        self.step = collage_fx.compile(self.optimizer, **options)

    def go(self, steps: range) -> None:
        """Take these steps of a run."""
        for k in steps:
            g = torch.randn(4, 3, generator=torch.Generator().manual_seed(1 + k))
            self.p.grad = g.bfloat16()
            self.step()

    def found(self) -> list[Tensor]:
        """Return high words and values of the parameter and its states."""
        tensors = [self.p.detach(), *self.optimizer.state[self.p].values()]
        return [x for t in tensors for x in (t, collage_fx.value(t))]


def resumed(update: Any, options: dict[str, Any], *, without: bool = False) -> bool:
    """Return True if a run that begins with a checkpoint ends as the one that made it."""
    unbroken, second = Run(update, options), Run(update, options)
    unbroken.go(range(SAVED))
    saved = copy.deepcopy(unbroken.optimizer.state_dict())
    weights = unbroken.p.detach().clone()
    unbroken.go(range(SAVED, STEPS))
    with torch.no_grad():
        second.p.copy_(weights)
    if without:
        for key in [k for k in saved if k not in ("state", "param_groups")]:
            del saved[key]
        for state in saved["state"].values():
            for key in [k for k in state if "collage" in str(k)]:
                del state[key]
    second.optimizer.load_state_dict(saved)
    second.go(range(SAVED, STEPS))
    pairs = zip(unbroken.found(), second.found(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("update", [replaced, read_on_the_way])
@pytest.mark.parametrize("options", [{}, {"record": True}, {"arithmetic": "wide"}], ids=str)
@pytest.mark.quick("{'record': True}-read_on_the_way")
def test_a_resumed_run_is_bit_equal(update: Any, options: dict[str, Any]) -> None:
    assert resumed(update, options)


@pytest.mark.filterwarnings("ignore::collage_fx.errors.CollageWarning")
def test_it_would_not_be_without_residuals() -> None:
    assert not resumed(replaced, {}, without=True)
