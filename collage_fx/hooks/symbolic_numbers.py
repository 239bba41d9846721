"""Choice of the Python numbers that are inputs of a step's graphs; the others are constants."""

import dataclasses
import math
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from collage_fx.hooks.counted import Counted
from collage_fx.optimizer.checkpoints.history import history_of
from collage_fx.optimizer.ownership import groups_of
from collage_fx.runtime.torch_private import auto_dynamic
from collage_fx.runtime.torch_private import variable_builder as builder

_BUILDER: Any = builder
_pow = math.pow
_process_automatic_dynamic = _BUILDER.process_automatic_dynamic
_OF_GROUP = re.compile(
    r"L\['\w+'\](\[0\])?\.param_groups\[(?P<group>\d+)\]\['(?P<key>\w+)'\](\[(?P<index>\d+)\])?"
)
_AT = ": "
"""Separator between a function and Dynamo's name for a number there, in a `History`."""
_SCHEDULED = (
    ("initial_lr", re.compile(r"\['lr'\]$")),
    ("max_momentum", re.compile(r"(\['momentum'\]|\['betas'\]\[0\])$")),
)
"""A key that torch.optim.lr_scheduler puts into parameter groups, and the numbers that it changes
then."""


class GroupNumber(NamedTuple):
    """Place of a number of a parameter group."""

    group: int
    key: str
    at: int | None = None
    """Position in a tuple or a list, as of `betas`."""

    @classmethod
    def named(cls, name: str) -> "GroupNumber | None":
        """Return the place that Dynamo has a name for; None if it is none of a group."""
        found = _OF_GROUP.fullmatch(name)
        if found is None:
            return None
        at = int(found["index"]) if found["index"] else None
        return cls(int(found["group"]), found["key"], at)

    @property
    def name(self) -> str:
        """Dynamo's name for it in a method of the optimizer."""
        at = "" if self.at is None else f"[{self.at}]"
        return f"L['self'].param_groups[{self.group}]['{self.key}']{at}"

    def of(self, groups: Sequence[Mapping[str, Any]]) -> Any:
        """Return the value there; None if there is none."""
        found = groups[self.group].get(self.key) if self.group < len(groups) else None
        if self.at is None:
            return found
        return found[self.at] if isinstance(found, list | tuple) and self.at < len(found) else None


class _Traced(threading.local):
    optimizer: Optimizer | None = None
    """Optimizer whose step runs in this thread."""


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
    place = f"{tx.f_code.co_qualname}{_AT}{name}"
    if _varies(optimizer, place, value):
        history_of(optimizer).numbers[place] = None
        return dataclasses.replace(entry, scalar=auto_dynamic)
    history_of(optimizer).numbers.setdefault(place, value)
    return entry


def _varies(optimizer: Optimizer, place: str, value: float) -> bool:
    """Return True if a number of this place is an input of a graph that is traced now."""
    history, groups, name = history_of(optimizer), groups_of(optimizer), place.partition(_AT)[2]
    if any(n.search(name) and any(key in group for group in groups) for key, n in _SCHEDULED):
        first = None
    else:  # what it was in a first step that was not traced, if there was one
        found = _in_groups(history.began or [], name)
        first = value if found is None else found
    return bool(history.numbers.get(place, first) != value)


def numbers_if_traced(
    optimizer: Optimizer, of_another: Mapping[str, float | None]
) -> dict[str, float | None] | None:
    """Return what would be known of an optimizer's numbers if its step were traced now.

    None if that would make constants of other numbers, or other constants, than another's step.

    Args:
        optimizer: whose step it would be.
        of_another: `History.numbers` of an optimizer whose step was traced.
    """
    found: dict[str, float | None] = {}
    for place, constant in of_another.items():
        value = _in_groups(groups_of(optimizer), place.partition(_AT)[2])
        if type(value) not in (int, float):
            return None
        found[place] = None if _varies(optimizer, place, value) else value
        if repr(found[place]) != repr(constant):  # also of another type: 1 is not 1.0
            return None
    return found


def _in_groups(groups: list[dict[str, Any]], name: str) -> Any:
    """Return the value of this name in parameter groups; None if none has it."""
    place = GroupNumber.named(name)
    return None if place is None else place.of(groups)


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
