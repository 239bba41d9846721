"""Python step counts, one for each parameter: members are alike as long as they are equal.

For passes.dedup.equal_counts.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from narrow_steps import Written, each
from tensors import bf16
from torch import Tensor

import collage_fx
from collage_fx.compilation import aot
from collage_fx.passes.dedup.deduplicate import Narrow, narrow
from collage_fx.passes.dedup.equal_counts import unify_equal_counts


@each
def counted_apart(self: Any, p: Tensor, g: Tensor, s: Any) -> None:
    """Momentum as it was written before there were tensors for counts, with a warmup."""
    s["k"] += 1
    s["m"].mul_(0.9).add_(g, alpha=0.1)
    p.add_(s["m"], alpha=-0.01 / (1 - 0.9 ** max(s["k"], 3)))


def after_steps(late: Sequence[int]) -> tuple[list[Tensor], list[int], list[int]]:
    """Take six steps; before the last two, let some of the counts be further than the others.

    Returns:
        The parameters and their low words; the counts; how many members each graph of Dynamo's
        had beside the first of its class, as it was compiled.
    """
    torch.compiler.reset()
    torch.manual_seed(0)
    params = [bf16(4, 3).requires_grad_() for _ in range(10)]
    optimizer = Written(params, counted_apart)
    for p in params:
        optimizer.state[p]["k"] = 0
    left_out: list[int] = []

    def spy(*args: Any, **kwargs: Any) -> Narrow | None:
        found = narrow(*args, **kwargs)
        left_out.append(sum(len(g.inputs) - 1 for g in found.groups) if found else 0)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(aot, "narrow", spy)
        step = collage_fx.compile(optimizer)
        for i in range(6):
            if i == 4:
                for k in late:
                    optimizer.state[params[k]]["k"] += 5
            for p in params:
                p.grad = torch.randn_like(p)
            step()
    residuals = [r for p in params for r in collage_fx.residuals(p)]
    values = [x.detach() for x in (*params, *residuals)]
    return values, [optimizer.state[p]["k"] for p in params], left_out


@pytest.mark.parametrize("late", [(), (3,)], ids=["together", "apart"])
@pytest.mark.quick("together")
def test_equal_counts_are_one(late: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """The bits of the step in which each member has its own; compiled anew when they come apart."""
    found, counts, left_out = after_steps(late)
    monkeypatch.setattr(aot, "unify_equal_counts", lambda *_: None)
    expected, _, each_alone = after_steps(late)
    assert all(map(torch.equal, found, expected))
    assert counts == [11 if k in late else 6 for k in range(10)]
    # Counts begin as constants. With one that is apart nine are alike.
    assert left_out == [9, 9, *([8] if late else [])]
    assert each_alone == [9, 0]


@pytest.mark.slow
def test_a_count_that_is_apart_makes_a_difference() -> None:
    """Or the test above would not see whether one count was taken for another."""
    (together, *_), (apart, *_) = after_steps(()), after_steps((3,))
    assert [k for k in range(10) if not torch.equal(together[k], apart[k])] == [3]


def test_sizes_are_left_alone() -> None:
    """A graph for as many elements as there were steps would be compiled anew in the next step."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        unify_equal_counts(gm, 2)
        graphs.append(gm)
        return gm.forward

    @torch.compile(backend=backend, dynamic=True)
    def add(x: Tensor, a: int, b: int) -> Tensor:
        return x.add(a).mul(b).sub(x.shape[0])

    for n, count in ((5, 5), (5, 6), (7, 7)):
        assert torch.equal(add(torch.ones(n), count, count), (torch.ones(n) + count) * count - n)
    inputs = [p for p in graphs[0].graph.find_nodes(op="placeholder") if p.type is not Tensor]
    read = [p for p in inputs if p.users and isinstance(p.meta["example_value"], torch.SymInt)]
    assert len(graphs) == 1 and len(read) == 2, "one for both counts, one for the size"
