"""Steps with a closure and without one, by turns. For step.compiled_step."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from optim_cases import INFOS
from torch import Tensor, nn
from torch._dynamo.utils import counters

import collage_fx

ALONE = ("LBFGS", "SparseAdam")
"""Optimizers that need a closure, or sparse gradients."""
NAMES = sorted({*INFOS} - {*ALONE})
TURNS = [bool(int(turn)) for turn in "111100110010110"]
"""Flags of the steps: True if one is given a closure, a new one each time."""
SETTLED = 8
"""Steps after which either kind has its graphs."""
START = torch.linspace(0.5, 1.5, 12, dtype=torch.bfloat16).view(4, 3)


class Run:
    """One parameter and its optimizer, and how often a closure was called in each step."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.weight = nn.Parameter(START.to(dtype, copy=True))
        # What is told from the dtype, Adafactor's eps, is given.
        eps: dict[str, Any] = {"eps": (2**-10, 1e-3)} if name == "Adafactor" else {}
        self.optimizer = getattr(torch.optim, name)([self.weight], lr=1e-2, **eps)
        self.calls: list[int] = []

    def closure(self) -> Callable[[], Tensor]:
        def loss() -> Tensor:
            self.calls[-1] += 1
            self.optimizer.zero_grad()
            result = self.weight.pow(2).sum()
            result.backward()
            return result

        return loss

    def take(self, step: Callable[..., Any], *, given: bool) -> Any:
        self.calls.append(0)
        if given:
            return step(self.closure())
        self.closure()()
        self.calls[-1] = 0
        return step()


@pytest.mark.parametrize("record", ["auto", True])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.quick("Adam-True", "SGD-auto")
def test_closures_by_turns(name: str, record: Any) -> None:
    """Each step is taken, calls its closure once, and settled ones compile nothing."""
    run, exact = Run(name, torch.bfloat16), Run(name, torch.float64)
    step = collage_fx.compile(run.optimizer, level="all", record=record)
    for i, given in enumerate(TURNS):
        before, compiled = collage_fx.value(run.weight).clone(), counters["stats"]["unique_graphs"]
        loss = run.take(step, given=given)
        exact.take(exact.optimizer.step, given=given)
        assert (loss is not None) == given
        assert not torch.equal(collage_fx.value(run.weight), before), f"step {i}"
        graphs = counters["stats"]["unique_graphs"]
        assert i < SETTLED or graphs == compiled, f"step {i} makes a new graph"
    assert run.calls == list(map(int, TURNS))
    moved = exact.weight - START.double()
    error = (collage_fx.value(run.weight) - exact.weight).abs().max()
    # Muon's Newton-Schulz iteration is in bf16.
    assert error < (0.2 if name == "Muon" else 0.05) * moved.abs().max()


def test_dynamo_guards_no_disabled_function() -> None:
    """The control: a closure that is disabled, and nothing more, is called when there is none."""
    run = Run("Adadelta", torch.bfloat16)
    step = torch.compile(run.optimizer.step, backend="eager")
    run.calls.append(0)
    step(torch.compiler.disable(run.closure()))
    with pytest.raises(TypeError, match="not callable"):
        step()


@pytest.mark.parametrize("record", ["auto", True])
def test_functions_with_arguments(record: Any) -> None:
    """A function that is given to a compiled one is called with what it is called with there."""
    p = torch.ones(10, dtype=torch.bfloat16)
    step = collage_fx.compile(_add, record=record)
    for factor in (1.0, 2.0, 3.0):
        step(p, lambda x, by=factor: torch.full_like(x, by))  # type: ignore[misc]
    step(p, None)
    assert collage_fx.value(p)[0] == pytest.approx(1 + 7 * 2**-11, abs=1e-5)


def _add(p: Tensor, gradient: Callable[[Tensor], Tensor] | None) -> None:
    update = 1.0 if gradient is None else gradient(p)
    p.add_(update, alpha=2**-11)
