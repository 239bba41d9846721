"""Operations that have no rule, or whose rule fails, as a user sees them.

For passes.rules.builder and record.service.
"""

from typing import Any

import pytest
import torch
from recorded_steps import LR, Each, start, train
from torch import Tensor

import collage_fx
from collage_fx.errors import CollageError, OptionError, RuleError, UnsupportedError
from collage_fx.passes.rules import RULES

aten = torch.ops.aten


def decay(p: Tensor, g: Tensor) -> None:
    p.add_(g)
    p.tanh_()


def operands() -> tuple[Tensor, Tensor]:
    return torch.full((8,), 0.5, dtype=torch.bfloat16), torch.full((8,), 1e-3).bfloat16()


def compiled(**options: Any) -> Any:
    torch.compiler.reset()
    return collage_fx.compile(decay, level="all", storage="mcf2", **options)


def failing(step: Any, p: Tensor, g: Tensor, error: type[CollageError]) -> str:
    """The error that the call raises; the state and its residual are as they were."""
    before = p.clone(), [r.clone() for r in collage_fx.residuals(p)]
    with pytest.raises(error) as raised:
        step(p, g)
    assert torch.equal(p, before[0])
    for now, then in zip(collage_fx.residuals(p), before[1], strict=True):
        assert torch.equal(now, then)
    return str(raised.value)


def test_error_names_operation_state_line_and_the_way_out() -> None:
    p, g = operands()
    collage_fx.compile(lambda p, g: p.add_(g), level="all", storage="mcf2")(p, g)
    assert collage_fx.residuals(p)[0].any()
    text = failing(compiled(on_unsupported="error"), p, g, UnsupportedError)
    for part in (
        "aten.tanh.default has no rule",
        "node tanh",
        "on the path of p",
        "test_unsupported.py",
        "in decay: p.tanh_()",
        "on_unsupported='join'",
        "arithmetic='wide'",
    ):
        assert part in text, text


def test_join_is_the_default_and_is_in_the_plan() -> None:
    p, g = operands()
    compiled()(p, g)
    report = collage_fx.explain(decay, *operands(), level="all", storage="mcf2")
    assert "for want of a rule: aten.tanh.default" in str(report)
    expected = torch.tanh(torch.tensor(0.5) + g[0].float())
    assert float(collage_fx.value(p)[0]) == pytest.approx(float(expected), rel=2.0**-16)


def test_error_has_nothing_to_say_where_every_operation_has_a_rule() -> None:
    p, g = operands()
    torch.compiler.reset()
    collage_fx.compile(
        lambda p, g: p.mul_(0.9).add_(g), level="all", on_unsupported="error", storage="mcf2"
    )(p, g)
    assert collage_fx.residuals(p)[0].any()


def test_wide_needs_no_rules() -> None:
    compiled(on_unsupported="error", arithmetic="wide")(*operands())


def test_a_rule_that_fails_says_so_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise KeyError("a defect")

    monkeypatch.setitem(RULES, aten.add.Tensor, broken)
    text = failing(compiled(), *operands(), RuleError)
    for part in (
        "the rule of aten.add.Tensor failed with KeyError: 'a defect'",
        "path of p",
        "p.add_(g)",
    ):
        assert part in text, text


def test_option_is_checked() -> None:
    with pytest.raises(OptionError, match="on_unsupported='skip' is not one of 'join', 'error'"):
        compiled(on_unsupported="skip")


@pytest.mark.parametrize("options", [{"record": True}, {}], ids=str)
def test_a_step_that_swaps_tensors_is_refused_and_what_it_did_before_is_done(options: Any) -> None:
    swaps = True

    def each(p: Tensor, g: Tensor, state: Any) -> None:
        p.sub_(g, alpha=LR)
        if swaps:
            torch.utils.swap_tensors(p, torch.nn.Parameter(p.detach() * 2))

    (p,) = start(torch.bfloat16, count=1)
    begin, optimizer = p.detach().double(), Each([p], each)
    with torch.compiler.set_stance("force_eager"):
        step = collage_fx.compile(optimizer, **options)
        for k in range(1, 3):
            p.grad = torch.ones_like(p)
            if swaps:
                with pytest.raises(UnsupportedError, match=r"swap_tensors.*p\.copy_\(new\)"):
                    step()
            else:
                step()
            swaps = False
            way = begin - collage_fx.value(p).detach()
            assert float(way.mean()) == pytest.approx(k * LR, rel=0.02)


def test_other_errors_of_a_step_are_its_own() -> None:
    """The control."""

    def each(p: Tensor, g: Tensor, state: Any) -> None:
        raise RuntimeError("of no use")

    with pytest.raises(RuntimeError, match="of no use"), torch.compiler.set_stance("force_eager"):
        train(each, record=True, steps=1)
