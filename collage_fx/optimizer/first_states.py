"""The states that a first step makes, and what makes them."""

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from torch.optim import SGD, Optimizer

from collage_fx.optimizer.ownership import groups_of, state_count, stateless


def init_of_torch(optimizer: Optimizer) -> Callable[..., Any] | None:
    """Return the method by which a class of torch.optim makes its states before a step.

    Dynamo calls it once, in place of tracing it. None for an `_init_group` of others, which may do
    more: see docs/stock-defects.md.
    """
    init: Any = getattr(optimizer, "_init_group", None)
    return init if getattr(init, "__module__", "").startswith("torch.optim.") else None


def makes_states(optimizer: Optimizer) -> bool:
    """Tell whether a step is the first and will make states itself, as far as can be foreseen.

    Of torch.optim's classes only SGD's momentum is left for the step to make, since Dynamo calls
    `_init_group` before. Of others the code tells: it names `state`.
    """
    if state_count(optimizer) or not stateless(optimizer):
        return False
    if init_of_torch(optimizer) is not None:
        return isinstance(optimizer, SGD) and any(g["momentum"] for g in groups_of(optimizer))
    methods = (type(optimizer).step, getattr(type(optimizer), "_init_group", None))
    codes = (getattr(inspect.unwrap(m), "__code__", None) for m in methods if m is not None)
    return any("state" in getattr(code, "co_names", ()) for code in codes)


def init_states(optimizer: Optimizer, groups: Iterable[dict[str, Any]]) -> None:
    """Make the states of one of torch.optim's classes that a step would begin by making."""
    for group in groups:
        if any(p.grad is not None and not optimizer.state.get(p) for p in group["params"]):
            init = optimizer._init_group  # type: ignore[attr-defined]
            lists = len(inspect.signature(init).parameters) - 1
            init(group, *([] for _ in range(lists)))
