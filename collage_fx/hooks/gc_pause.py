"""Full garbage collections, put off while a step is compiled.

One walks through all that torch has made since it was imported, some 0.2 s; tracing 30 parameters
makes enough objects to set one off, and 300 several. Collections of young objects go on.
"""

import gc
import threading

FIRST = 4
"""How many steps of an optimizer are taken so: those that make states and meet changed numbers."""
_NEVER = 1 << 30


class no_full_collection:
    """Put off full collections. Counted, since several threads may step at once."""

    _lock = threading.Lock()
    _users = 0
    _before = gc.get_threshold()

    def __enter__(self) -> None:
        with self._lock:
            if not no_full_collection._users:
                no_full_collection._before = gc.get_threshold()
                gc.set_threshold(*self._before[:2], _NEVER)
            no_full_collection._users += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            no_full_collection._users -= 1
            ours = gc.get_threshold()[2] == _NEVER  # and not what a closure has set since
            if not no_full_collection._users and ours:
                gc.set_threshold(*no_full_collection._before)
