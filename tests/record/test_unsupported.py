"""What a user sees of an operation that has no rule, or whose rule fails."""

from typing import Any

import pytest
import torch
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
    return collage_fx.compile(decay, level="all", **options)


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
    collage_fx.compile(lambda p, g: p.add_(g), level="all")(p, g)
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
    report = collage_fx.explain(decay, *operands(), level="all")
    assert "for want of a rule: aten.tanh.default" in str(report)
    expected = torch.tanh(torch.tensor(0.5) + g[0].float())
    assert float(collage_fx.value(p)[0]) == pytest.approx(float(expected), rel=2.0**-16)


def test_error_has_nothing_to_say_where_every_operation_has_a_rule() -> None:
    p, g = operands()
    torch.compiler.reset()
    collage_fx.compile(lambda p, g: p.mul_(0.9).add_(g), level="all", on_unsupported="error")(p, g)
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
