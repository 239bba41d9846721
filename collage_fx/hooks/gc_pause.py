"""Full garbage collections, put off while a step is compiled.

One walks through all that torch has made since it was imported, some 0.2 s; tracing 30 parameters
makes enough objects to set one off, and 300 several. Collections of young objects go on.
"""

import gc

from collage_fx.hooks.counted import Counted

FIRST = 4
"""How many steps of an optimizer are taken so: those that make states and meet changed numbers."""
_NEVER = 1 << 30


class _Thresholds:
    before = gc.get_threshold()
    """Those that were set when collections were put off."""


def _put_off() -> None:
    _Thresholds.before = gc.get_threshold()
    gc.set_threshold(*_Thresholds.before[:2], _NEVER)


def _go_on() -> None:
    if gc.get_threshold()[2] == _NEVER:  # and not what a closure has set since
        gc.set_threshold(*_Thresholds.before)


no_full_collection = Counted(_put_off, _go_on).used
"""Put off full collections, within."""
