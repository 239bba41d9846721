"""Copies that a step returns share no memory with what they are copies of.

For passes.codegen.emit.
"""

from collections.abc import Callable, Sequence
from itertools import combinations

import pytest
import torch
from graphs import BF16
from torch import Tensor

import collage_fx

# Two copies of parts of one tensor share memory in stock torch.compile too: docs/stock-defects.md.
KEPT: dict[str, Callable[[Tensor], Sequence[Tensor]]] = {
    "view and copy of view": lambda t: (t.view(-1), t.view(-1).clone()),
    "whole and copy of view": lambda t: (t, t.view(12).clone()),
    "whole and copy of item": lambda t: (t, t.unbind(0)[0].clone()),
    "items": lambda t: t.unbind(0),
    "list and copy of view": lambda t: [*(two := torch._foreach_neg([t, t])), two[0].clone()],
}


def memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@pytest.mark.filterwarnings("ignore:.*belong to no torch.optim.Optimizer")
@pytest.mark.parametrize("kept", KEPT.values(), ids=KEPT)
@pytest.mark.parametrize("of_a_state", [False, True], ids=["temporary", "state"])
@pytest.mark.quick("state-list*", "temporary-view*", "temporary-whole*", "state-items")
def test_a_copy_of_a_view_is_one(
    kept: Callable[[Tensor], Sequence[Tensor]], of_a_state: bool
) -> None:
    def step(p: Tensor, g: Tensor) -> Sequence[Tensor]:
        p.sub_(g, alpha=0.125)
        return kept(p if of_a_state else g * 2)

    p, g = torch.ones(3, 4, dtype=BF16), torch.ones(3, 4, dtype=BF16)
    eager = step(p.clone(), g)
    ours = collage_fx.compile(step, storage="mcf2")(p, g)
    for i, k in combinations(range(len(eager)), 2):
        if memory(eager[i]) != memory(eager[k]):
            assert memory(ours[i]) != memory(ours[k])
    assert all(torch.equal(a, b) for a, b in zip(ours, eager, strict=True))
