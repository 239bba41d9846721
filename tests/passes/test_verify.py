"""The specification between passes: each way to break a program is noticed by name.

For passes.ir.verify, passes.ir.program and passes.ir.graph_memory.
"""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphs import BF16, capture_optimizer
from torch.fx import Graph, GraphModule, Node
from torch.optim import SGD

from collage_fx.errors import LegalityError
from collage_fx.passes.ir.graph_memory import mutations
from collage_fx.passes.ir.program import Program, Settings
from collage_fx.passes.ir.verify import verify
from collage_fx.runtime.ops import collage

aten, prims = torch.ops.aten, torch.ops.prims

SHAPES = ((4, 3), (5,))


def program() -> Program:
    """Return a program whose writes are operations of their own."""
    return capture_optimizer(SGD, lr=0.1, shapes=SHAPES).of(Settings(multi_tensor=False))


def result_graph(p: Program) -> Graph:
    assert p.result is not None
    return p.result.graph


def lowered_graph(p: Program) -> Graph:
    lowered = p.rewritten[0].lowered
    assert lowered is not None
    return lowered.graph


def canonical_graph(p: Program) -> Graph:
    assert p.canonical is not None
    return p.canonical.graph


def copies(p: Program) -> list[Node]:
    return list(result_graph(p).find_nodes(op="call_function", target=aten.copy_.default))


def drop_residual_write(p: Program) -> None:
    result_graph(p).erase_node(copies(p)[-1])


def double_a_write(p: Program) -> None:
    first = copies(p)[0]
    with result_graph(p).inserting_after(first):
        result_graph(p).call_function(aten.copy_.default, first.args)


def misdirect_a_write(p: Program) -> None:
    first, last = copies(p)[0], copies(p)[-1]
    last.args = (first.args[0], last.args[1])


def drop_residual_output(p: Program) -> None:
    output = lowered_graph(p).output_node()
    output.args = (output.args[0][:-1],)  # type: ignore[index]


def add_an_input(p: Program) -> None:
    with lowered_graph(p).inserting_before(next(iter(lowered_graph(p).nodes))):
        lowered_graph(p).placeholder("surplus")


def _before_output(p: Program, target: object, *args: object, dtype: torch.dtype) -> Node:
    with lowered_graph(p).inserting_before(lowered_graph(p).output_node()):
        node = lowered_graph(p).call_function(target, args)  # type: ignore[arg-type]
    node.meta["dtype"] = dtype
    return node


def _first_sum(p: Program) -> Node:
    return lowered_graph(p).find_nodes(op="call_function", target=aten.add.Tensor)[0]


def compute_in_bf16(p: Program) -> None:
    _before_output(p, aten.neg.default, _first_sum(p), dtype=BF16)


def read_an_input_without_widening_it(p: Program) -> None:
    narrow = lowered_graph(p).find_nodes(op="placeholder")[0]
    _before_output(p, aten.add.Tensor, narrow, narrow, dtype=torch.float32)


def use_a_narrowed_value(p: Program) -> None:
    narrow = lowered_graph(p).output_node().args[0][0]  # type: ignore[index]
    widen = prims.convert_element_type.default
    _before_output(p, widen, narrow, torch.float32, dtype=torch.float32)


def leave_an_operation_unlowered(p: Program) -> None:
    x = _first_sum(p)
    _before_output(p, collage.neg.default, x, x, dtype=torch.float32)


def lose_an_expanded_input(p: Program) -> None:
    graph = Graph()
    graph.output(())
    p.rewritten[0].expanded = GraphModule(torch.nn.Module(), graph)


def forget_a_verdict(p: Program) -> None:
    p.plan.pop()


def give_no_reason(p: Program) -> None:
    p.plan[0].decision = dataclasses.replace(p.plan[0].decision, cause="")


def promise_without_rewriting(p: Program) -> None:
    p.rewritten[0].members.pop()


def widen_a_state(p: Program) -> None:
    _first_new_value(canonical_graph(p)).meta["val"] = torch.empty(SHAPES[0])


def _first_new_value(graph: Graph) -> Any:
    return next(iter(mutations(graph).values()))


def _return(p: Program, *results: int) -> None:
    """Let the source return the first new values, and the canonical graph these of its own."""
    p.source = GraphModule(p.source, copy.deepcopy(p.source.graph))
    for graph, chosen in ((p.source.graph, range(len(results))), (canonical_graph(p), results)):
        new = list(mutations(graph).values())
        graph.output_node().args = (tuple(new[i] for i in chosen),)


def lose_a_result(p: Program) -> None:
    _return(p, 0, 1)
    verify(p, "reductions")
    canonical_graph(p).output_node().args = ((),)


def widen_a_result(p: Program) -> None:
    _return(p, 0)
    _first_new_value(p.source.graph).meta["val"] = torch.empty(SHAPES[0])


def share_the_memory_of_a_result(p: Program) -> None:
    _return(p, 0, 0)


def share_a_node(p: Program) -> None:
    first, second = p.classes[0].members
    second.nodes.append(first.nodes[0])


def share_a_state(p: Program) -> None:
    first, second = p.classes[0].members
    second.states[0] = first.states[0]


def mix_a_class(p: Program) -> None:
    p.classes[0].members[0].outputs.pop()


BROKEN: list[tuple[Callable[[Program], None], str, str]] = [
    (drop_residual_write, "emit", "a write was lost or doubled"),
    (double_a_write, "emit", "a write was lost or doubled"),
    (misdirect_a_write, "emit", "a write was lost or doubled"),
    (drop_residual_output, "lower", "other outputs"),
    (add_an_input, "lower", "other inputs"),
    (compute_in_bf16, "lower", "computes in 16 bits"),
    (read_an_input_without_widening_it, "lower", "16 bits|widened"),
    (use_a_narrowed_value, "lower", "is narrowed and then used"),
    (leave_an_operation_unlowered, "lower", "was not lowered"),
    (lose_an_expanded_input, "expand", "other inputs"),
    (widen_a_state, "canonicalize", "has another dtype"),
    (lose_a_result, "reductions", "a result was lost"),
    (widen_a_result, "reductions", "has another dtype"),
    (share_the_memory_of_a_result, "reductions", "shares the memory of another"),
    (forget_a_verdict, "plan", "has no verdict"),
    (give_no_reason, "plan", "has no reason"),
    (promise_without_rewriting, "plan", "is not what is rewritten"),
    (share_a_node, "slice_", "share a node"),
    (share_a_state, "slice_", "share a carried state"),
    (mix_a_class, "slice_", "differ in inputs, outputs or states"),
]


@pytest.mark.parametrize("damage, after, message", BROKEN, ids=lambda v: getattr(v, "__name__", ""))
def test_a_broken_program_is_refused(
    damage: Callable[[Program], None], after: str, message: str
) -> None:
    p = program()
    verify(p, after)
    damage(p)
    with pytest.raises(LegalityError, match=message):
        verify(p, after)


def test_run_passes_verifies_after_each_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr("collage_fx.passes.pipeline.verify", lambda p, after: seen.append(after))
    p = program()
    assert seen == list(p.seconds)
    assert seen[0] == "capture" and seen[-1] == "emit"


def test_programs_of_one_capture_are_independent() -> None:
    p, q = program(), program()
    drop_residual_write(p)
    compute_in_bf16(p)
    verify(q, "emit")
    verify(q, "lower")
    assert dataclasses.replace(q.settings) == p.settings
