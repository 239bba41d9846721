"""Dispatch modes by which a recorder sees the operations of a step."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

from collage_fx.runtime.torch_private import (
    TorchDispatchMode,
    _get_current_dispatch_mode,
    _pop_mode_temporarily,
)


class Dispatches(Protocol):
    """A recorder: is given each operation, and returns what the step gets for it."""

    def flush_outside(self) -> None:
        """Do what was noted, called from where the mode may be on."""

    def paused(self) -> AbstractContextManager[None]:
        """Let operations pass, within, as in a compiled graph."""

    def dispatch(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Do or note an operation, and return what it makes."""


class RecordingMode(TorchDispatchMode):
    """A recorder where Dynamo is not asked, without a guard against it around each dispatch."""

    supports_higher_order_operators = True

    def __init__(self, recorder: Dispatches) -> None:
        super().__init__()
        self.recorder = recorder

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let Dynamo compile under this mode."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return self.recorder.dispatch(func, types, args, kwargs)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Do what was noted, and have operations done as they are called within this context."""
        self.recorder.flush_outside()
        with self.recorder.paused(), off_stack(self.recorder):
            yield


def off_stack(recorder: Dispatches) -> AbstractContextManager[Any]:
    """Have a recorder called for no operation within, as for each kernel of a compiled graph."""
    top = _get_current_dispatch_mode()
    ours = isinstance(top, RecordingMode) and top.recorder is recorder
    return _pop_mode_temporarily() if ours else nullcontext()


class BesideDynamo(RecordingMode):
    """A recorder under which Dynamo is on: it must not trace what an operation is noted by."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return True

    __torch_dispatch__ = (
        RecordingMode.__torch_dispatch__
    )  # what the base class puts the guard around
