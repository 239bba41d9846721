"""torch.compile within a step: what an optimizer compiles itself gets the step's own backend."""

import dataclasses
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch._C import _len_torch_dispatch_stack, _len_torch_function_stack
from torch._C._dynamo.guards import GlobalStateGuard
from torch._dynamo.callback import callback_handler
from torch.compiler import set_stance

from collage_fx.hooks.counted import Counted

_current = threading.local()
_inductor = torch._TorchCompileInductorWrapper.__call__


def _compile(self: Any, gm: Any, inputs: Any, **kwargs: Any) -> Any:
    """Compile a graph for Inductor, or with the backend of the step that is running."""
    session = getattr(_current, "session", None)
    return _inductor(self, gm, inputs, **kwargs) if session is None else session(gm, inputs)


_stances: list[Any] = []
"""What sets the stance back, as long as a step of any thread is not to be compiled."""


def _compile_nothing() -> None:
    _stances.append(set_stance("force_eager"))


def _compile_again() -> None:
    _stances.pop().__exit__(None, None, None)


# The stance is one for all threads.
_FORCED = Counted(_compile_nothing, _compile_again)


def _since_reset() -> Any:
    """Return an object that is another one after each torch.compiler.reset().

    That forgets what is called when Dynamo begins to compile.
    """
    for known in callback_handler.start_callbacks:
        if hasattr(known, _EPOCH):
            return known

    @torch.compiler.disable  # a compiled backward pass calls it where Dynamo looks at every frame
    def epoch(_: Any) -> None:
        return None

    setattr(epoch, _EPOCH, True)
    callback_handler.register_start_callback(epoch)
    return epoch


_EPOCH = "_collage_epoch"


class GlobalState:
    """What PyTorch's operations depend on beside their operands, as Dynamo guards it."""

    def __init__(self, *, until_reset: bool = False) -> None:
        """Note it.

        Args:
            until_reset: whether it changes with the next torch.compiler.reset().
        """
        self.epoch = _since_reset() if until_reset else None
        self.guard = GlobalStateGuard()
        self.stance = _stance()
        self.modes = _modes()

    def same(self) -> bool:
        """Tell whether it is as it was, and operations are neither watched nor replaced."""
        same = bool(self.guard.check()) and self.stance == _stance()
        return same and not any(_modes())

    def same_within_modes(self) -> bool:
        """Tell whether it is as it was, operations being watched as they were."""
        forgotten = self.epoch is not None and self.epoch is not _since_reset()
        same = bool(self.guard.check()) and _for_graphs(self.stance) == _for_graphs(_stance())
        return same and self.modes == _modes() and not forgotten


def _modes() -> tuple[int, int]:
    """Return how many modes watch operations, and calls of functions of torch's."""
    return _len_torch_dispatch_stack(), _len_torch_function_stack()


def _for_graphs(stance: Any) -> Any:
    """Return a stance but for what is to become of a step for which there is no graph yet."""
    of_recompiling = stance.stance in ("eager_on_recompile", "fail_on_recompile")
    return dataclasses.replace(stance, stance="default") if of_recompiling else stance


def stance_is_eager() -> bool:
    """Tell whether the user has asked for nothing to be compiled: set_stance("force_eager")."""
    return _stance().stance == "force_eager" and not _FORCED.users


def _stance() -> Any:
    """Return what torch.compiler.set_stance has set."""
    return torch._dynamo.eval_frame._stance


@contextmanager
def step_of(session: Any, *, compiled: bool) -> Iterator[None]:
    """Within a step: compile with session, or nothing at all, what the step compiles itself."""
    torch._TorchCompileInductorWrapper.__call__ = _compile  # type: ignore[method-assign, assignment]
    with _set(session, forced=not compiled), nullcontext() if compiled else _FORCED.used():
        yield


@contextmanager
def outside() -> Iterator[None]:
    """Within a closure that a step calls: compile as if there were no step."""
    forced = getattr(_current, "forced", False)
    with _set(None, forced=False), _FORCED.lifted() if forced else nullcontext():
        yield


@contextmanager
def _set(session: Any, *, forced: bool) -> Iterator[None]:
    before = dict(vars(_current))
    vars(_current).update(session=session, forced=forced)
    try:
        yield
    finally:
        vars(_current).clear()
        vars(_current).update(before)
