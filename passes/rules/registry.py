"""The registry of rules."""

from collections.abc import Callable
from typing import Any

from collage_fx.passes.rules.builder import Builder, Call, Expanded

Rule = Callable[[Builder, Call, Expanded, int], Expanded]
"""(builder, operation, expansion on the path, its position in args) -> expansion.

The same expansion may stand at other positions too. Where an operation takes a list of tensors the
position is that of the list."""

RULES: dict[Any, Rule] = {}


def rule(*targets: Any) -> Callable[[Rule], Rule]:
    """Register a rule for these operations; raises ValueError if one of them has a rule."""

    def register(function: Rule) -> Rule:
        for target in targets:
            if target in RULES:
                raise ValueError(f"{target} has a rule already: {RULES[target].__name__}")
            RULES[target] = function
        return function

    return register
