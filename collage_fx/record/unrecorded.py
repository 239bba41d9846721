"""What the operations of a step cost that cannot be recorded, and are done when they are called."""

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from collage_fx.segments.trie import line_of_code, on_one_line

SHARE = 0.1
"""What part of a step's time an operation must take to be named."""


@dataclass(eq=False)
class Unrecorded:
    """Times them by the clock of the host, each in all its calls of a step."""

    seconds: defaultdict[Any, float] = field(default_factory=lambda: defaultdict(float))
    """Operation -> its time in the step that runs, or in the last one."""
    step_seconds: float = 0.0
    """How long the last step took, closures included."""
    places: dict[Any, str] = field(default_factory=dict)
    """Operation -> the line of code that called it first."""

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Time a step, and forget the one before."""
        self.seconds.clear()
        start = time.perf_counter()
        try:
            yield
        finally:
            self.step_seconds = time.perf_counter() - start

    def timed(self, func: Any, do: Callable[[], Any]) -> Any:
        """Do an operation, and return what it makes."""
        if func not in self.places:
            self.places[func] = on_one_line(line_of_code())
        start = time.perf_counter()
        try:
            return do()
        finally:
            self.seconds[func] += time.perf_counter() - start

    def notes(self) -> list[str]:
        """Name those that took more than a tenth of the last step, the dearest first."""
        least = SHARE * self.step_seconds
        dear = [(seconds, func) for func, seconds in self.seconds.items() if seconds > least]
        return [
            f"{func} cannot be recorded: it is done when it is called, on whole values, and took "
            f"{seconds / self.step_seconds:.0%} of the last step's time. It is called first at "
            f"{self.places[func]}"
            for seconds, func in sorted(dear, key=lambda one: -one[0])
        ]
