"""Which Python numbers are inputs of a step's graphs, and which constants."""

import dataclasses
import math
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._dynamo.pgo import auto_dynamic
from torch._dynamo.variables import builder
from torch.optim import Optimizer

from collage_fx.hooks.counted import Counted
from collage_fx.optimizer.checkpoints.history import History, history_of

_BUILDER: Any = builder
_pow = math.pow
_process_automatic_dynamic = _BUILDER.process_automatic_dynamic
_OF_GROUP = re.compile(
    r"L\['\w+'\](\[0\])?\.param_groups\[(?P<group>\d+)\]\['(?P<key>\w+)'\](\[(?P<index>\d+)\])?"
)
_SCHEDULED = (
    ("initial_lr", re.compile(r"\['lr'\]$")),
    ("max_momentum", re.compile(r"(\['momentum'\]|\['betas'\]\[0\])$")),
)
"""A key that torch.optim.lr_scheduler puts into parameter groups, and the numbers that it changes
then."""


class _Traced(threading.local):
    optimizer: Optimizer | None = None
    """Whose step runs in this thread."""


_TRACED = _Traced()


def _traceable_pow(x: float, y: float, /) -> float:
    """math.pow, which Dynamo evaluates for each step count that a bias correction raises to."""
    if not torch.compiler.is_compiling() or isinstance(x, torch.Tensor):  # which it makes a float
        return _pow(x, y)
    return 1.0 * x**y


def _decide(tx: Any, name: str, entry: Any, **kwargs: Any) -> Any:
    """Make a number in the step of an optimizer an input of the graph if it has changed, or will.

    Dynamo's own memory is of all optimizers of a class in this process, and of none before. What
    a resumed run compiles would not be what the unbroken one has.
    """
    optimizer, value = _TRACED.optimizer, entry.scalar
    if optimizer is None or type(value) not in (int, float):
        return _process_automatic_dynamic(tx, name, entry, **kwargs)
    history = history_of(optimizer)
    place = f"{tx.f_code.co_qualname}: {name}"
    first = None if _scheduled(optimizer, name) else _began_with(history, name, value)
    if history.numbers.setdefault(place, first) != value:
        history.numbers[place] = None
        return dataclasses.replace(entry, scalar=auto_dynamic)
    return entry


def _scheduled(optimizer: Optimizer, name: str) -> bool:
    groups = optimizer.param_groups
    return any(
        number.search(name) and any(key in group for group in groups) for key, number in _SCHEDULED
    )


def _began_with(history: History, name: str, value: float) -> Any:
    """Return what a number was in a first step that was not traced; value if there was none."""
    at = _OF_GROUP.fullmatch(name)
    if history.began is None or at is None or int(at["group"]) >= len(history.began):
        return value
    found = history.began[int(at["group"])].get(at["key"], value)
    index = at["index"]
    return found[int(index)] if index and isinstance(found, list | tuple) else found


def _replace() -> None:
    math.pow = _traceable_pow  # type: ignore[assignment]
    _BUILDER.process_automatic_dynamic = _decide


def _restore() -> None:
    math.pow = _pow
    _BUILDER.process_automatic_dynamic = _process_automatic_dynamic


_REPLACED = Counted(_replace, _restore).used


@contextmanager
def symbolic_numbers(optimizer: Optimizer | None) -> Iterator[None]:
    """Let Dynamo keep symbolic, within, the numbers that change from step to step.

    Those are a step count that math.pow is given, as where the operator `**` is, and what changes
    of the optimizer whose step runs, if it is one's: rates, mostly.
    """
    before, _TRACED.optimizer = _TRACED.optimizer, optimizer
    try:
        with _REPLACED():
            yield
    finally:
        _TRACED.optimizer = before
