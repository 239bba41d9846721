"""Warnings of an optimizer that takes plain steps while its compiled one is never called."""

from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from collage_fx.runtime.errors import WarningName, warn

_HOOKS = "_optimizer_step_post_hooks"
_KEY = "collage_fx"
_CALLED = WeakIdKeyDictionary()
"""Optimizers whose compiled step was called."""
_SAID = WeakIdKeyDictionary()
"""Optimizer -> what was said of it."""
_MONITORED = "collage_fx.monitor"


def watch(optimizers: list[Optimizer]) -> None:
    """Warn of the first plain step of these optimizers, unless a compiled one comes before.

    The hook knows nothing of the compiled step, which may well be gone: that is the usual mistake.
    """
    for optimizer in optimizers:
        if optimizer not in _CALLED and hasattr(optimizer, _HOOKS):
            getattr(optimizer, _HOOKS)[_KEY] = _compiled_in_vain


def watch_monitored(optimizer: Optimizer, *, seen: bool) -> None:
    """Warn of the first step of an optimizer that a monitor does not see, until it has seen one."""
    hooks = getattr(optimizer, _HOOKS, {})
    if seen:
        hooks.pop(_MONITORED, None)
    else:
        hooks[_MONITORED] = _not_measured


def was_called(optimizer: Optimizer) -> bool:
    """Return True if a step that was compiled for an optimizer has been called."""
    return optimizer in _CALLED


def has_compiled(optimizer: Optimizer) -> bool:
    """Return True if a step was compiled for an optimizer, called or not."""
    waiting = getattr(optimizer, _HOOKS, {}).get(_KEY) is _compiled_in_vain
    return waiting or was_called(optimizer)


def watch_copy(hooks: Any) -> Any:
    """Add to the hooks of a copy, whose original has residuals, one that warns; return them."""
    hooks[_KEY] = _not_compiled
    return hooks


def called(optimizers: list[Optimizer]) -> None:
    """Watch these optimizers no longer: their compiled step is being called."""
    for optimizer in optimizers:
        _CALLED[optimizer] = True
        getattr(optimizer, _HOOKS, {}).pop(_KEY, None)


def _compiled_in_vain(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    _warn_once(
        optimizer,
        "never-called",
        f"{type(optimizer).__name__}.step was called, without compensation, and the step that "
        "collage_fx.compile made for it never was: call that, or put it in its place by "
        "collage_fx.compile_(optimizer)",
    )


def _not_compiled(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    _warn_once(
        optimizer,
        "copy-not-compiled",
        f"a copy of {type(optimizer).__name__} took a step without compensation: it has "
        "the residuals of its original, and not the step that was compiled; compile the copy too, "
        "as in collage_fx.compile_(optimizer)",
    )


def _not_measured(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    said = _warn_once(
        optimizer,
        "monitor-blind",
        f"the monitor does not see the steps of {type(optimizer).__name__}, which are taken by a "
        "method that was bound before it was made, as in step = optimizer.step: bind it after "
        "collage_fx.monitor(optimizer), or call optimizer.step()",
    )
    if said:
        watch_monitored(optimizer, seen=True)


def _warn_once(optimizer: Optimizer, name: WarningName, message: str) -> bool:
    """Warn of a step that does something; tell whether it was such a step."""
    if torch.compiler.is_compiling():  # Dynamo traces the hook, and the step with it
        return False
    # Checkpoints are primed by a step with a rate of zero, which makes the states.
    idle = all(float(group.get("lr", 1)) == 0 for group in optimizer.param_groups)
    said = _SAID.setdefault(optimizer, set())
    if not idle and message not in said:
        said.add(message)
        warn(name, message, stacklevel=4)
    return not idle
