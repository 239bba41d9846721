"""Progress lines on stderr for work that takes long: a first compilation may take minutes.

There are none of work that is done within seconds. COLLAGE_FX_PROGRESS=0 turns them off, and
`logging.getLogger("collage_fx.progress")` is where they go: at INFO, to a handler of its own unless
the user gives it one. They are whole lines, in a terminal as in the log of a job, of which each
comes after half as long again as the one before.
"""

import functools
import logging
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import distributed

T = TypeVar("T")
DELAY = 3.0
"""Seconds of work before the first line."""
EVERY = 5.0
"""Seconds between two lines, at least."""
LOGGER = logging.getLogger("collage_fx.progress")
LOGGER.propagate = False
LOGGER.setLevel(logging.INFO)


class _Stderr(logging.StreamHandler):
    """Stream that writes to what stderr is at the time, which tests and notebooks replace."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


_HANDLER = _Stderr()


class _Running(threading.local):
    work: "Work | None" = None
    """Work that this thread is doing."""


_RUNNING = _Running()


class Work:
    """A piece of work that is told of, by a thread of its own, as soon as it takes long.

    Only words are kept of it, and no tensors: the thread lives on for a moment when it is done.
    """

    def __init__(self, what: str, phase: str | None) -> None:
        self.what = what
        self.state = phase, 0.0, time.perf_counter()
        """Phase being done, the seconds before, and since when; None is done by others. In one
        tuple, as another thread reads it."""
        self.counts: Counter[str] = Counter()
        """Kind of phase -> how many there have been."""
        self.expected: Counter[str] = Counter()
        """Kind of phase -> how many there will have been, where that is known."""
        self.said = False
        self.over = threading.Event()

    @property
    def seconds(self) -> float:
        """The seconds that it has taken, but for what others did meanwhile."""
        phase, before, since = self.state
        return before if phase is None else before + time.perf_counter() - since

    def enter(self, phase: str | None) -> None:
        """Go over to another phase."""
        self.state = phase, self.seconds, time.perf_counter()

    def tell(self) -> None:
        """Print the present phase, now and then, until the work is over."""
        due = DELAY
        while not self.over.wait(max(due - self.seconds, DELAY / 10)):
            phase, seconds = self.state[0], self.seconds
            if seconds >= due and phase is not None:
                self.said = True
                self._say(phase)
                due = seconds + max(EVERY, seconds / 2)

    def end(self, *, failed: bool) -> None:
        """Stop; say so if something was said before."""
        self.over.set()
        if self.said:
            self._say("failed" if failed else "done")

    def _say(self, phase: str) -> None:
        LOGGER.info("collage_fx: %s: %s, %.0f s", self.what, phase, self.seconds)


def _wanted() -> bool:
    """Return True if lines are wanted: of several processes the first one writes them."""
    if os.environ.get("COLLAGE_FX_PROGRESS") == "0" or not LOGGER.isEnabledFor(logging.INFO):
        return False
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank() == 0
    return os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")) == "0"


@contextmanager
def work(what: Callable[[], str], phase: str | None) -> Iterator[None]:
    """Print what is being done, within this context, once it takes long, or other work of it does.

    Args:
        what: says what it is, in words.
        phase: what is done first; None for what is none of this work.
    """
    if _RUNNING.work is not None or not _wanted():
        with doing(phase):
            yield
        return
    current = _RUNNING.work = Work(what(), phase)
    if not LOGGER.handlers:
        LOGGER.addHandler(_HANDLER)
    threading.Thread(target=current.tell, name=LOGGER.name, daemon=True).start()
    failed = True
    try:
        yield
        failed = False
    finally:
        _RUNNING.work = None
        current.end(failed=failed)


@contextmanager
def doing(phase: str | None) -> Iterator[None]:
    """Set the phase of the work under way, within this context; None stops its clock."""
    if (current := _RUNNING.work) is None:
        yield
        return
    before = current.state[0]
    current.enter(phase)
    try:
        yield
    finally:
        current.enter(before)


def over(items: Sequence[T], kind: str, what: str) -> Iterator[T]:
    """Yield items, and say which is being done once all together take long."""
    with work(lambda: what, kind):
        for number, item in enumerate(items, 1):
            with doing(f"{kind} {number} of {len(items)}"):
                yield item


def expect(kind: str) -> None:
    """Expect one more phase of a kind."""
    if (current := _RUNNING.work) is not None:
        current.expected[kind] += 1


def counted(kind: str) -> str:
    """Return the kind of a phase with its number: `kernel 2 of 5`."""
    if (current := _RUNNING.work) is None:
        return kind
    current.counts[kind] += 1
    number, all_of_them = current.counts[kind], current.expected[kind]
    return f"{kind} {number}" + (f" of {all_of_them}" if all_of_them >= number else "")


def apart(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a user's function, in whose time the clock of the work stands still."""

    @functools.wraps(function, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        if _RUNNING.work is None:  # as in all steps but the first
            return function(*args, **kwargs)
        with doing(None):
            return function(*args, **kwargs)

    return call
