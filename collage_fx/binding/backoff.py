"""Backoff for binding a step, which takes longer than running it."""

import sys
from collections.abc import Callable
from typing import TypeVar

from collage_fx.binding.launches import Unrepeatable
from collage_fx.compilation.session import Session
from collage_fx.runtime import logs
from collage_fx.runtime.kernels.triton_launch import is_capturing

T = TypeVar("T")


class Backoff:
    """Counter of the steps until one is bound again: twice as many after each vain attempt."""

    def __init__(self, session: Session, bound: str, *, never: bool) -> None:
        """Begin to count.

        Args:
            session: whose step it is; it notes an error in compiling the comparison.
            bound: words that the log has for a step that is bound.
            never: whether no step is bound at all.
        """
        self.session, self.bound = session, bound
        self.left = sys.maxsize if never else 0
        self.before = 0

    def is_due(self) -> bool:
        """Count one step; tell whether it is worth while to bind it."""
        due = not self.left
        self.left -= not due
        return due

    def bind(self, make: Callable[[], T]) -> T | None:
        """Return what `make` makes of a step that was done; None if it cannot be repeated."""
        if is_capturing():  # nothing can be allocated outside of the memory of the graph
            return None
        self.before = self.left = 2 * self.before + 1
        try:
            made = make()
        except Unrepeatable:
            self.left = sys.maxsize
        except Exception as error:
            self.left = sys.maxsize
            self.session.notes.add(
                f"each step is looked at in Python: {type(error).__name__} was raised in compiling "
                "what would do so"
            )
        else:
            logs.LOG.info("%s: %s", self.session.subject, self.bound)
            return made
        return None

    def held(self) -> None:
        """Note a step that was repeated."""
        self.before = 0
