"""Numbers of the host beside the kernels of a graph: each call returns new ones.

For compilation.partition.
"""

from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

import collage_fx
from collage_fx.compilation import partition


class Halved(Optimizer):
    """A state without dimensions is made by a graph, and halved in the steps that follow."""

    def __init__(self, p: Parameter) -> None:
        super().__init__([p], {})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        (p,) = self.param_groups[0]["params"]
        state = self.state[p]
        if "d" not in state:
            state["d"] = torch.ones(())
        else:
            state["d"].mul_(0.5)
        p.sub_(p.grad * state["d"], alpha=0.01)


def found(compiled: Any) -> list[float]:
    torch.compiler.reset()
    p = Parameter(torch.ones(8, dtype=torch.bfloat16))
    optimizer = Halved(p)
    compiled(optimizer)
    numbers = []
    for k in range(9):
        if k in (3, 6):
            optimizer.state.clear()
        p.grad = torch.ones_like(p)
        optimizer.step()
        numbers.append(float(optimizer.state[p]["d"]))
    return numbers


def test_a_state_that_a_graph_makes_is_new_each_time(monkeypatch: Any) -> None:
    eager, of_numbers = partition._eager, list[Any]()

    def noted(gm: Any) -> Any:
        of_numbers.append(gm)
        return eager(gm)

    monkeypatch.setattr(partition, "_eager", noted)
    assert found(collage_fx.compile_) == found(lambda _: None)
    assert of_numbers, "the control: eager PyTorch makes it"
