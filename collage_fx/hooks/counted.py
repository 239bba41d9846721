"""Switches for the whole process that stay on as long as one thread needs them."""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager


class Counted:
    """A switch for the whole process: its first user turns it on, its last one off."""

    def __init__(self, on: Callable[[], None], off: Callable[[], None]) -> None:
        self.on = on
        self.off = off
        self.users = 0
        self.lock = threading.Lock()

    @contextmanager
    def used(self, by: int = 1) -> Iterator[None]:
        """Turn the switch on within this context."""
        self._count(by)
        try:
            yield
        finally:
            self._count(-by)

    def lifted(self) -> AbstractContextManager[None]:
        """Turn it off within this context for one that needs it, unless there are others."""
        return self.used(-1)

    def _count(self, by: int) -> None:
        with self.lock:
            before, self.users = self.users, self.users + by
            if not before:
                self.on()
            elif not self.users:
                self.off()
