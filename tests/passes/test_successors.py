"""A graph stores in a state the result that is computed of it and looks like it.

For passes.dedup.replaced_states.
"""

from collections.abc import Callable
from typing import Any

import torch
from expecttest import assert_expected_inline
from torch import Tensor
from torch.fx import GraphModule

from collage_fx.passes.dedup.replaced_states import stored_in_place


def traced(step: Callable[..., Any], *shapes: tuple[int, ...], dtype: Any = None) -> GraphModule:
    """Return Dynamo's graph of a step over tensors of these shapes, in bf16."""
    found: list[GraphModule] = []

    def backend(gm: GraphModule, _: Any) -> Any:
        found.append(gm)
        return gm.forward

    given = [torch.ones(s, dtype=dtype or torch.bfloat16) for s in shapes]
    torch.compile(step, backend=backend, fullgraph=True)(*given)
    return found[0]


def pairs(step: Callable[..., Any], states: str = "mv", **options: Any) -> dict[int, str]:
    """Return the results that are put in the place of states, of a step over m, v and g."""
    gm = traced(step, *[(4, 3)] * 3, **options)
    names = [str(n.target).strip("L_l") for n in gm.graph.find_nodes(op="placeholder")]
    own = {j for j, name in enumerate(names) if name in states}
    found = stored_in_place(gm, own, {j for j, name in enumerate(names) if name in "gp"})[1]
    return {k: names[j] for k, j in found.items()}


def adam(m: Tensor, v: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    return 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g


def test_a_graph_before_and_after() -> None:
    gm = traced(adam, (4, 3), (4, 3), (4, 3))
    rewritten, found = stored_in_place(gm, {0, 2}, {1})  # m, g, v, by their first use
    assert found == {0: 0, 1: 2}
    assert len(gm.graph.output_node().args[0]) == 2  # it stays as it is
    lines = [" ".join(str(n.format_node()).split()) for n in rewritten.graph.nodes]
    last = "\n".join(line.split(" = ", 1)[-1] for line in lines[-3:])
    assert_expected_inline(
        last,
        """\
call_method[target=copy_](args = (%l_m_, %add), kwargs = {})
call_method[target=copy_](args = (%l_v_, %add_1), kwargs = {})
return ()""",
    )
    m, v, g = torch.rand(3, 4, 3).bfloat16()
    wanted = adam(m, v, g)
    assert rewritten(m, g, v) == ()
    assert torch.equal(m, wanted[0]) and torch.equal(v, wanted[1])


def test_a_result_of_two_states_takes_the_place_of_the_nearer_one() -> None:
    def belief(m: Tensor, v: Tensor, g: Tensor) -> tuple[Tensor, ...]:
        m = torch.lerp(m, g, 0.1)
        return 0.001 * (g - m) ** 2 + 0.999 * v, m

    assert pairs(belief) == {0: "v", 1: "m"}
    assert pairs(lambda m, v, g: (m * v, 0.9 * v + g)) == {0: "m", 1: "v"}


def test_a_result_of_no_state_takes_a_place_that_is_left() -> None:
    def before(m: Tensor, v: Tensor, g: Tensor) -> tuple[Tensor, ...]:
        return g.clone(), 0.9 * m + (g - v)

    assert pairs(before) == {0: "v", 1: "m"}
    assert pairs(lambda m, v, g: (g * 2, 0.9 * m + g, 0.9 * v + g)) == {1: "m", 2: "v"}


def test_a_tensor_that_is_kept_elsewhere_may_be_a_state() -> None:
    """The result may take its place."""
    assert pairs(lambda m, v, g: (0.999 * v + m,), states="m") == {}
    assert pairs(lambda m, v, g: (0.9 * m + g, 0.999 * v), states="m") == {0: "m"}


def test_lists_are_followed_by_their_tensors() -> None:
    def each(m: Tensor, v: Tensor, g: Tensor) -> list[Tensor]:
        made = torch._foreach_mul([m, v], 0.9)
        torch._foreach_add_(made, [g, g * g])
        return list(made)

    assert pairs(each) == {0: "m", 1: "v"}


def test_results_that_may_be_something_else() -> None:
    """Of another shape or dtype, or of a state that is written or returned."""
    assert pairs(lambda m, v, g: (m.float() * 0.9 + g, v.sum(0))) == {}
    assert pairs(lambda m, v, g: (m.t(), v + g)) == {1: "v"}
    assert pairs(lambda m, v, g: (m.mul_(0.9) + g, v + g)) == {1: "v"}
    assert pairs(lambda m, v, g: (m * 0.9, g), states="") == {}
    assert pairs(adam, dtype=torch.float32) == {}


def test_one_result_in_two_places_is_one_result() -> None:
    def twice(m: Tensor, v: Tensor, g: Tensor) -> tuple[Tensor, ...]:
        m = m * 0.9 + g
        return m, m.view(-1), v + g

    assert pairs(twice) == {2: "v"}
