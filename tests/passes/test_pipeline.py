"""The runner of the passes: what it shows of each, what may be left out, what it checks.

For passes.pipeline and passes.ir.listing.
"""

from collections.abc import Callable

import pytest
import torch
from graphs import Captured, capture_optimizer
from tensors import bf16, with_grads

import collage_fx
from collage_fx.errors import LegalityError, OptionError
from collage_fx.passes import pipeline
from collage_fx.passes.ir.listing import UNCHANGED
from collage_fx.passes.ir.program import Program, Settings, graph_of
from collage_fx.passes.ir.verify import verify

NAMES = [run.__name__ for run in pipeline.PASSES]


@pytest.fixture(scope="module")
def captured() -> Captured:
    return capture_optimizer(torch.optim.SGD, momentum=0.5, foreach=False)


def test_each_pass_leaves_a_snapshot_and_a_time(captured: Captured) -> None:
    program = Program(captured.functional, Settings(), captured._describe)
    pipeline.run_passes(program, snapshots=True)
    assert list(program.snapshots) == list(program.seconds) == NAMES
    assert "x' = 0.5*x + B" in program.snapshots["recurrence"]
    assert "x' = 0.5*x + B" not in program.snapshots["slice_"]
    assert "ops.collage." in program.snapshots["expand"]
    assert "ops.collage." not in program.snapshots["escape"] + program.snapshots["plan"]
    assert "collage.round" in program.snapshots["lower"]
    same = {n for n in NAMES if program.snapshots[n] == UNCHANGED}
    # It has none, moves nothing, and nothing leaves or is lost.
    assert same == {"reductions", "moves", "escape", "join"}


def test_no_snapshot_is_made_unasked(captured: Captured) -> None:
    program = captured.of(Settings())
    assert not program.snapshots and all(s >= 0 for s in program.seconds.values())


def test_a_pass_is_left_out_by_its_name(captured: Captured) -> None:
    assert list(captured.of(Settings(without=("escape",))).seconds) == [
        n for n in NAMES if n != "escape"
    ]
    names = "'denominator', 'deduplicate', 'escape', 'join', 'moves', 'numbers', 'reductions'"
    with pytest.raises(OptionError, match=f"only {names}, 'repeat', 'share' can"):
        collage_fx.CollageConfig(without=("capture",))


@pytest.mark.slow
def test_explain_shows_them_and_leaves_them_out() -> None:
    optimizer = torch.optim.AdamW(with_grads([bf16(3) for _ in range(9)]), foreach=False)
    shown = collage_fx.explain(optimizer, storage="mcf2")
    apart = collage_fx.explain(
        optimizer, without=("denominator", "deduplicate", "escape"), storage="mcf2"
    )
    assert list(shown.snapshots[-1]) == list(shown.seconds[-1]) == NAMES
    assert "escape" not in apart.snapshots[-1]
    # Of nine parameters that are alike one is in the graph, or all are.
    assert [len(e.before[-1].graph.find_nodes(op="placeholder")) > 20 for e in (shown, apart)] == [
        False,
        True,
    ]
    # One denominator has one reciprocal; a / (b * s) + c / s, which PyTorch computes, has two.
    found = [one.to_dict()["operations_before"]["reciprocal"] for one in (shown, apart)]
    assert found == [1, 2 * 9]


def forget_a_state(program: Program) -> None:
    program.carried.pop()


def forget_an_overwriting(program: Program) -> None:
    graph = graph_of(program.canonical).graph
    copy = next(n for n in graph.nodes if n.target is torch.ops.aten.copy_.default)
    copy.replace_all_uses_with(copy.args[1])
    graph.erase_node(copy)


def forget_a_recurrence(program: Program) -> None:
    program.classes[0].recurrences.pop()


def read_what_is_written(program: Program) -> None:
    program.reads[program.carried[0].index] = "p"


@pytest.mark.parametrize(
    ("after", "spoil"),
    [
        ("capture", forget_a_state),
        ("canonicalize", forget_an_overwriting),
        ("recurrence", forget_a_recurrence),
        ("escape", read_what_is_written),
    ],
)
def test_what_a_pass_breaks_is_found(
    captured: Captured, after: str, spoil: Callable[[Program], None]
) -> None:
    program = Program(captured.functional, Settings(), captured._describe)
    for run in pipeline.PASSES[: NAMES.index(after) + 1]:
        run(program)
    verify(program, after)
    spoil(program)
    with pytest.raises(LegalityError, match="please report"):
        verify(program, after)
