"""Watches: monitors of an optimizer's steps, whoever compiles them."""

import functools
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Self

from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

WATCHES = WeakIdKeyDictionary()
"""Optimizer -> what is given it, a function that does its step, and the arguments of that."""


class Watch(ABC):
    """Observer of an optimizer's steps until it is removed, or left as a context manager."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)

    @abstractmethod
    def remove(self) -> None:
        """Look at no more steps."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __deepcopy__(self, memo: Any) -> Self:
        """Return itself, which a copy of the optimizer may have too: that is not looked at."""
        return self


def add_watch(optimizer: Optimizer, watch: Callable[..., Any]) -> None:
    """Have the compiled steps of an optimizer done by way of `watch`, from now on."""
    WATCHES[optimizer] = [*WATCHES.get(optimizer, ()), watch]


def remove_watch(optimizer: Optimizer, watch: Callable[..., Any]) -> None:
    """Do the steps of an optimizer without `watch` again, if it was added."""
    WATCHES[optimizer] = [one for one in WATCHES.get(optimizer, ()) if one != watch]


def watched(optimizer: Optimizer, run: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that does a step by way of all that looks at it."""
    for watch in WATCHES.get(optimizer, ()) if len(WATCHES) else ():
        run = functools.partial(_by_way_of, watch, optimizer, run)
    return run


def _by_way_of(
    watch: Callable[..., Any], optimizer: Optimizer, run: Any, *args: Any, **kwargs: Any
) -> Any:
    return watch(optimizer, run, args, kwargs)
