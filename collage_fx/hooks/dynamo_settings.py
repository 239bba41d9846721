"""Settings while a step runs or is compiled: Dynamo's limits and errors, garbage collections.

A part of a step that torch.compile fails on is recorded and interpreted. Full garbage collections
are put off in the first steps: one walks through all that torch has made since it was
imported, some 0.2 s; tracing 30 parameters makes enough objects to set one off, and 300 several.
Collections of young objects go on.
"""

import gc
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import ClassVar, NoReturn

from collage_fx.hooks.counted import Counted
from collage_fx.runtime.cpp_compiler import REMEDY, compiler_fault, words_of
from collage_fx.runtime.errors import RoundingsLost, Warn
from collage_fx.runtime.torch_private import (
    AsPythonConstantNotImplementedError,
    TensorifyScalarRestartAnalysis,
    dynamo_config,
)
from collage_fx.runtime.torch_versions import TESTED

_LOGGER = logging.getLogger("torch._dynamo.convert_frame")


RECOMPILE_LIMIT = 256
"""The number of graphs that Dynamo may keep for one function.

What is behind a graph break all optimizers of a class share, and one step may make more graphs than
the default of 8 before it is recorded (`step.recompile_guard`).
"""


def many_graphs() -> AbstractContextManager[None]:
    """Return a context within which Dynamo keeps as many graphs of a function."""
    return dynamo_config.patch(recompile_limit=RECOMPILE_LIMIT)


def trace_without_numbers() -> NoReturn:
    """Have Dynamo trace again what it is tracing, and end graphs at `tensor.item()`."""
    dynamo_config.capture_scalar_outputs = _Kept.settings["capture_scalar_outputs"]
    raise TensorifyScalarRestartAnalysis("a number that is read back enters no arithmetic")


class _Kept:
    """The user's settings, kept while steps run: in torch 2.11 one setting for all threads.

    Of two patches that overlap the one that ends last would leave what the other had set.
    """

    settings: ClassVar = dict.fromkeys(("suppress_errors", "capture_scalar_outputs"), False)

    @classmethod
    def keep(cls) -> None:
        cls.settings = {name: getattr(dynamo_config, name) for name in cls.settings}

    @classmethod
    def restore(cls) -> None:
        for name, value in cls.settings.items():
            setattr(dynamo_config, name, value)


_KEPT = Counted(_Kept.keep, _Kept.restore)


class Failures(logging.Filter):
    """Fallback to Python for what Dynamo fails to compile, with one warning for its log."""

    def __init__(self, warn: Warn) -> None:
        super().__init__()
        self.warn = warn
        self.count = 0
        self.no_compiler = False
        """Set once a failure has shown that no compiler works, or none that rounds as it must."""

    @contextmanager
    def caught(self, *, reads_numbers: bool = False) -> Iterator[None]:
        """Leave a function to Python, within this context, on which Dynamo itself fails.

        Nothing of that function has run by then. An error of the user's comes up again there.

        Args:
            reads_numbers: whether `tensor.item()` is a symbol in graphs, and ends none.
        """
        allowed = not dynamo_config.fail_on_recompile_limit_hit  # which excludes the other
        _LOGGER.addFilter(self)
        try:
            with _KEPT.used(), dynamo_config.patch(suppress_errors=allowed):
                dynamo_config.capture_scalar_outputs |= reads_numbers
                yield
        finally:
            _LOGGER.removeFilter(self)

    @contextmanager
    def raised(self) -> Iterator[None]:
        """Raise errors as the user has set it, within a closure that a step calls."""
        _LOGGER.removeFilter(self)
        try:
            with dynamo_config.patch(_Kept.settings):
                yield
        finally:
            _LOGGER.addFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        """Return True if a record is to be logged: not that of an error, of which we warn."""
        if record.levelno < logging.WARNING or not record.exc_info or record.exc_info[1] is None:
            return True
        self.note(record.exc_info[1])
        return False

    def note(self, error: BaseException) -> None:
        """Count an error of torch.compile and warn of it."""
        self.count += 1
        # From 2.14 on Dynamo raises where a tensor's text is read back, and ends no graph there.
        if self.no_compiler or isinstance(error.__context__, AsPythonConstantNotImplementedError):
            return
        while inner := getattr(error, "inner_exception", None):
            error = inner
        if fault := compiler_fault():
            self.no_compiler = True
            self.warn(
                "no-compiler",
                f"no C++ compiler works ({fault}): the steps are interpreted, more slowly and as "
                f"precisely. {REMEDY}",
            )
            return
        if isinstance(error, RoundingsLost):
            self.no_compiler = True
            self.warn(
                "roundings-lost",
                f"{error}, so that the residuals would be zero: the steps are interpreted, more "
                f"slowly and as precisely. Torch {', '.join(TESTED)} were tested",
            )
            return
        self.warn(
            "compile-failed",
            f"torch.compile fails on a part of the step, with {type(error).__name__}: "
            f"{words_of(error)}. That part is done operation by operation, more slowly and as "
            "precisely",
        )


FIRST = 4
"""First steps of an optimizer without full collections; most graphs are compiled in these."""
_NEVER = 1 << 30


class _Thresholds:
    before = gc.get_threshold()
    """The thresholds that the process had before."""


def _put_off() -> None:
    _Thresholds.before = gc.get_threshold()
    gc.set_threshold(*_Thresholds.before[:2], _NEVER)


def _go_on() -> None:
    if gc.get_threshold()[2] == _NEVER:  # and not what a closure has set since
        gc.set_threshold(*_Thresholds.before)


no_full_collection = Counted(_put_off, _go_on).used
"""Context manager that puts off full garbage collections."""
