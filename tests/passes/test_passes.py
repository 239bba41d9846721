"""Rewrites of the steps of PyTorch's optimizers, and the cases in which passes must not act.

For passes.pipeline, passes.frontend.capture and passes.frontend.canonicalize.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphs import (
    BF16,
    FP16,
    OPTIMIZERS,
    capture,
    capture_optimizer,
    differing,
    mistyped,
    named,
    operations,
    random_bits,
    random_inputs,
    verdicts,
)
from torch import Tensor, optim
from torch.optim import Optimizer

from collage_fx.config import CollageConfig
from collage_fx.inspection.explanation import Explanation
from collage_fx.inspection.page.states import states_of
from collage_fx.optimizer.served import Served
from collage_fx.passes.ir import listing
from collage_fx.passes.ir.program import Arithmetic, Level
from collage_fx.passes.pipeline import PASSES

TWELVE = ((4, 3), (5,), (2, 3, 4), (1,), (7, 1), (16,), (3, 3), (2, 2), (9,), (1, 8), (6,), (4, 4))
MANY_TENSORS = [
    (optim.AdamW, {"foreach": True}),
    (optim.AdamW, {"foreach": False}),
    (optim.Adam, {"foreach": True, "weight_decay": 0.1}),
    (optim.SGD, {"lr": 0.1}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
]


@pytest.mark.parametrize("kind, options", MANY_TENSORS, ids=named)
@pytest.mark.quick("SGD-lr=0.1-m*")
def test_twelve_parameters_are_one_class(kind: type[Optimizer], options: dict[str, Any]) -> None:
    program = capture_optimizer(kind, shapes=TWELVE, **options).program()
    (only,) = program.classes
    assert len(only.members) == len(TWELVE)
    (rewritten,) = program.rewritten
    assert len(rewritten.members) == len(TWELVE)
    assert rewritten.joined == []
    assert len(program.residual_inputs) == len(TWELVE) * len(rewritten.storages)


def test_every_write_survives_and_every_residual_is_written() -> None:
    captured = capture_optimizer(optim.AdamW, shapes=TWELVE, foreach=True)
    program = captured.program()
    writes = operations(captured.functional).count("aten.copy_.default")
    residuals = len(program.residual_inputs)
    kernels = [n for n in program.result.graph.nodes if "multi_tensor" in str(n.target)]
    shared = sum(len(n.args[0]) for n in kernels)
    copied = operations(program.result).count("aten.copy_.default")
    assert len(kernels) == 2 and copied + shared == writes + residuals
    assert operations(program.result).count("collage.region.default") == 0


def test_dtypes_are_classes_of_their_own() -> None:
    params = [torch.nn.Parameter(torch.ones(3, dtype=d)) for d in (BF16, FP16, BF16)]
    for p in params:
        p.grad = torch.ones_like(p)
    step = optim.SGD(params, foreach=False).step
    program = capture(step).program()
    assert sorted(len(group.members) for group in program.classes) == [1, 2]


def test_settings_of_groups_are_classes_of_their_own() -> None:
    params = [torch.nn.Parameter(torch.ones(3, dtype=BF16)) for _ in range(3)]
    for p in params:
        p.grad = torch.ones_like(p)
    groups = [{"params": params[:2]}, {"params": params[2:], "lr": 0.5}]
    program = capture(optim.SGD(groups, lr=0.1).step).program()
    assert [len(group.members) for group in program.classes] == [2, 1]


@pytest.mark.parametrize("kind, options", OPTIMIZERS, ids=named)
@pytest.mark.quick("Adadelta-foreach=True", "NAdam-foreach=False")
def test_expanded_graph_is_the_reference_of_the_lowered_one(
    kind: type[Optimizer], options: dict[str, Any]
) -> None:
    """Run eagerly, both give the same bits: for ordinary values and for any bit pattern."""
    captured = capture_optimizer(kind, **options)
    settings: list[tuple[Level, Arithmetic]] = [("all", "eft"), ("auto", "wide")]
    for level, arithmetic in settings:
        rewritten = captured.rewritten(level, arithmetic)
        assert rewritten.expanded is not None and rewritten.lowered is not None
        for inputs in (random_inputs(rewritten.expanded), random_bits(rewritten.expanded)):
            pairs = zip(rewritten.expanded(*inputs), rewritten.lowered(*inputs), strict=True)
            found = [differing(a, b) for a, b in pairs]
            assert not any(found), (level, arithmetic, found)


@pytest.mark.parametrize("kind, options", OPTIMIZERS, ids=named)
@pytest.mark.quick("AdamW-foreach=False")
def test_results_have_the_dtypes_that_nodes_claim(
    kind: type[Optimizer], options: dict[str, Any]
) -> None:
    rewritten = capture_optimizer(kind, **options).rewritten("all")
    inputs = random_inputs(rewritten.expanded, size=2)
    assert mistyped(rewritten.expanded, inputs) == {}
    assert mistyped(rewritten.lowered, inputs) == {}


def test_a_conversion_is_kept_for_those_who_read_it_beside_the_path() -> None:
    """In fp16 it is what keeps 1e6 * p finite."""

    def step(p: Tensor, q: Tensor) -> None:
        wide = p.float()
        p.copy_(wide + wide * 1e6 * 1e-9)

    p, q = torch.ones(4, dtype=FP16), torch.zeros(4, dtype=FP16)
    rewritten = capture(step, p, q).rewritten()
    assert rewritten.expanded is not None
    hi, lo = rewritten.expanded(p, q)
    assert (hi.double() + lo.double()).tolist() == pytest.approx([1.001] * 4, abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("level", ["light", "plus", "auto", "all"])
@pytest.mark.quick("all-dtype1")
def test_nothing_is_rewritten_in_a_wide_dtype(dtype: torch.dtype, level: Level) -> None:
    program = capture_optimizer(optim.AdamW, dtype=dtype).program(level)
    assert program.result is None and not program.rewritten
    assert "expand" not in program.seconds
    assert {s.compensated for s in program.plan} == {False}
    assert {s.reason.partition(":")[0] for s in program.plan} <= {"float32", "float64"}


def test_only_the_low_precision_half_of_a_mixed_step_is_rewritten() -> None:
    """bf16 weights with fp32 momentum, the common remedy."""

    def step(p: Tensor, m: Tensor, g: Tensor) -> None:
        m.mul_(0.999).add_(g.float())
        p.sub_(0.1 * m)

    p, m, g = torch.ones(4, dtype=BF16), torch.ones(4), torch.ones(4, dtype=BF16)
    program = capture(step, p, m, g).program()
    assert {s.name: s.compensated for s in program.plan} == {"p": True, "m": False}
    (rewritten,) = program.rewritten
    assert len(rewritten.members) == 1 and len(program.residual_inputs) == 1


@pytest.mark.parametrize("level", ["auto", "plus", "light"])
def test_a_running_maximum_is_left_alone(level: Level) -> None:
    program = capture_optimizer(optim.AdamW, amsgrad=True).program(level)
    state = verdicts(program)["max_exp_avg_sq"]
    assert not state.compensated and state.residual_bytes == 0
    assert "nothing accumulates" in state.reason or level == "light"
    assert verdicts(program)["param"].compensated


def overwritten(p: Tensor, q: Tensor) -> None:
    p.copy_(2 * q)


@pytest.mark.parametrize("level", ["light", "auto", "all"])
def test_an_overwritten_state_is_left_alone(level: Level) -> None:
    ones = torch.ones(4, dtype=BF16)
    program = capture(overwritten, ones, ones.clone()).program(level)
    assert program.result is None
    (state,) = program.plan
    assert state.reason.startswith("overwritten")


def moving_together(p: Tensor, q: Tensor) -> None:
    p.add_(q)
    q.mul_(0.999)


def like_an_input(in1: Tensor, q: Tensor) -> None:
    in1.add_(q)


def like_a_residual(a: Tensor, a_lo: Tensor) -> None:
    a.add_(a_lo)
    a_lo.mul_(0.999)


@pytest.mark.parametrize("step", [moving_together, like_an_input, like_a_residual], ids=named)
@pytest.mark.parametrize("is_param", [False, True])
def test_names_of_states_do_not_clash(step: Callable[..., None], is_param: bool) -> None:
    p, q = (torch.ones(4, dtype=BF16, requires_grad=is_param) for _ in range(2))
    rewritten = capture(step, p, q).rewritten("all")
    for module in (rewritten.expanded, rewritten.lowered):
        assert module is not None
        names = [n.target for n in module.graph.find_nodes(op="placeholder")]
        assert len(set(names)) == len(names)


def test_an_update_through_a_matrix_product_is_refused_by_name() -> None:
    def step(p: Tensor, q: Tensor) -> None:
        p.copy_(p @ q)

    program = capture(step, torch.eye(3, dtype=BF16), torch.eye(3, dtype=BF16)).program("all")
    (state,) = program.plan
    assert program.result is None and state.refused
    assert "aten.mm.default" in state.reason


def test_overlapping_states_are_refused() -> None:
    def step(p: Tensor, q: Tensor) -> None:
        p.add_(q)

    base = torch.ones(8, dtype=BF16)
    program = capture(step, base[:4], base[2:6]).program("all")
    (state,) = program.plan
    assert program.result is None and state.refused and "overlaps" in state.reason


@pytest.mark.parametrize("dtype", [BF16, torch.complex64], ids=str)
def test_a_refused_state_is_called_so_wherever_its_verdict_is_shown(dtype: torch.dtype) -> None:
    """In the logs, in what `explain` prints, on the page and in reports."""

    def step(p: Tensor, q: Tensor) -> None:
        p.add_(q)

    base = torch.ones(8, dtype=dtype)
    program = capture(step, base[:4], base[2:6]).program("all")
    (state,) = program.plan
    explanation = Explanation("step", CollageConfig(), [state], [], [], [], [], [])
    served = Served(state.state_name, state.dtype, decision=state.decision)
    assert state.verdict == served.verdict == explanation.to_dict()["states"][0]["verdict"]
    assert state.verdict == "refused" and f"refused: {state.reason}" in listing.verdicts(program)
    assert states_of(explanation, []).rows[0].verdict == "refused"


def test_complex_states_are_refused_by_name() -> None:
    def step(p: Tensor, q: Tensor) -> None:
        p.add_(q)

    program = capture(step, torch.ones(3, dtype=torch.complex64), torch.ones(3)).program("all")
    (state,) = program.plan
    assert state.refused and "complex64" in state.reason


def test_passes_leave_the_source_graph_as_it_was() -> None:
    captured = capture_optimizer(optim.AdamW)
    before = str(captured.functional.graph)
    captured.program("all")
    assert str(captured.functional.graph) == before
    assert len({run.__name__ for run in PASSES}) == len(PASSES)
