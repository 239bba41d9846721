"""Hooks by which a torch.compile within a step gets the step's own backend, and runs apart."""

import dataclasses
import itertools
import threading
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol, runtime_checkable

import torch
from torch.compiler import set_stance

from collage_fx.hooks.counted import Counted
from collage_fx.runtime.torch_private import (
    CatchErrorsWrapper,
    ConvertFrameReturn,
    GlobalStateGuard,
    _callback_from_stance,
    _get_current_dispatch_mode,
    _len_torch_dispatch_stack,
    _len_torch_function_stack,
    call_func_at_runtime_with_args,
    callback_handler,
    eval_frame,
    innermost_backend,
    runtime_wrappers,
    traces,
)


class _Current(threading.local):
    """The step that a thread runs."""

    session: Any = None
    """Session of the step that is running."""
    forced: bool = False
    """True if nothing is to be compiled in it."""


_current = _Current()
# Before torch 2.13 all that is compiled of a function counts towards one limit.
_set_region = getattr(eval_frame, "set_eval_frame_isolate_recompiles_id", lambda region: None)
_ONE_BY_ONE = "torch._dynamo.backends.debugging"
"""Module of the backends that do the operations of a graph one by one: they are recorded."""


class _Backend:
    """The backend of a step in place of the one that the step asks for, within it.

    Dynamo keeps what it has compiled by function and backend. What it compiled outside of steps
    reads memory that may have no data yet while a step is recorded, and what it compiled in
    another step has that one's options.
    """

    def __init__(self, session: Any, asked_for: Any, region: int) -> None:
        self.session = weakref.ref(session)
        self.asked_for = asked_for
        self.region = region
        """Id under which Dynamo keeps, and counts, what it compiles for the session."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Backend):
            return False
        return self.session == other.session and bool(self.asked_for == other.asked_for)

    def __hash__(self) -> int:
        return hash(_Backend)

    def __call__(self, gm: Any, inputs: Any) -> Any:
        session = self.session()
        assert session is not None, "its step is running"
        return session(gm, inputs)


class _Known:
    """Dynamo callback that compiles nothing, but what is known of a backend runs."""

    def __init__(self, backend: Any) -> None:
        self._torchdynamo_orig_backend = backend  # where Dynamo looks for it

    def __call__(self, *_: Any, **__: Any) -> ConvertFrameReturn:
        return ConvertFrameReturn(apply_to_code=False)


@dataclasses.dataclass
class _Nested:
    """The compilation of what the steps of a session compile themselves."""

    region: int
    callbacks: Any = dataclasses.field(default_factory=weakref.WeakKeyDictionary)
    """Dynamo's callback outside of steps -> the one that compiles for the session's backend."""


_NESTED: Any = weakref.WeakKeyDictionary()
_regions = getattr(eval_frame, "_next_isolate_recompiles_id", itertools.count())


def _of_step(callback: Any, session: Any) -> Any:
    """Return a callback that compiles frames for the backend of a step that is running."""
    if not isinstance(callback, CatchErrorsWrapper):
        return callback
    if session not in _NESTED:
        _NESTED[session] = _Nested(next(_regions))
    nested = _NESTED[session]
    if callback not in nested.callbacks:
        asked_for: Any = innermost_backend(callback)
        compiler = getattr(asked_for, "compiler_fn", asked_for)
        frames: Any = callback._torchdynamo_orig_backend
        by_us = isinstance(compiler, type(session) | _Backend)
        known = by_us or getattr(frames, "_export", False)
        if known or getattr(compiler, "__module__", None) == _ONE_BY_ONE:
            return callback
        backend = _Backend(session, asked_for, nested.region)
        converter = frames._clone_with_backend(backend)
        nested.callbacks[callback] = CatchErrorsWrapper(converter, callback.hooks)
    return nested.callbacks[callback]


def _callback(callback: Any) -> Any:
    """Return the callback that compiles frames by torch.compiler.set_stance; see _of_step."""
    session = _current.session
    if session is None:
        return _callback_from_stance(callback)
    ours = _of_step(callback, session)
    chosen: Any = _callback_from_stance(ours)
    if chosen is False:  # it takes what any backend compiled
        compiles = isinstance(ours, CatchErrorsWrapper)
        chosen = _Known(innermost_backend(ours)) if compiles else None
    elif chosen is not ours:
        chosen = _of_step(chosen, session)
    if isinstance(backend := innermost_backend(chosen), _Backend):
        _set_region(backend.region)
    return chosen


def _run_compiled(*args: Any, **kwargs: Any) -> Any:
    """Run what AOTAutograd has compiled: it calls kernels with the addresses of tensors."""
    mode = _get_current_dispatch_mode()
    with mode.apart() if isinstance(mode, RunsApart) else nullcontext():
        return call_func_at_runtime_with_args(*args, **kwargs)


@runtime_checkable
class RunsApart(Protocol):
    """Dispatch mode that hands out memory which may have no data yet."""

    def apart(self) -> AbstractContextManager[Any]:
        """Return a context in which all memory has its data, and operations are done when called.

        What is compiled runs in it: not only kernels write there, but operations of PyTorch too.
        """


def _install() -> None:
    eval_frame._callback_from_stance = _callback
    runtime_wrappers.call_func_at_runtime_with_args = _run_compiled


def _restore() -> None:
    if eval_frame._callback_from_stance is _callback:
        eval_frame._callback_from_stance = _callback_from_stance
    if runtime_wrappers.call_func_at_runtime_with_args is _run_compiled:
        runtime_wrappers.call_func_at_runtime_with_args = call_func_at_runtime_with_args


_INSTALLED = Counted(_install, _restore)
_stances: list[Any] = []
"""Contexts that set the stance back, as long as a step of any thread is not to be compiled."""


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
    """PyTorch's global state, on which results of operations depend too, as Dynamo guards it."""

    def __init__(self, *, until_reset: bool = False) -> None:
        """Note the global state of now.

        Args:
            until_reset: whether it changes with the next torch.compiler.reset().
        """
        self.epoch = _since_reset() if until_reset else None
        self.guard = GlobalStateGuard()
        self.stance = _stance()
        self.modes = _modes()

    def same(self) -> bool:
        """Return True if it is as it was, and operations are neither watched nor replaced."""
        same = bool(self.guard.check()) and self.stance == _stance()
        return same and not any(_modes())

    def same_within_modes(self) -> bool:
        """Return True if it is as it was, operations being watched as they were."""
        forgotten = self.epoch is not None and self.epoch is not _since_reset()
        same = bool(self.guard.check()) and _for_graphs(self.stance) == _for_graphs(_stance())
        return same and self.modes == _modes() and not forgotten


def _modes() -> tuple[int, int]:
    """Return the numbers of modes that watch operations, and calls of torch functions."""
    return _len_torch_dispatch_stack(), _len_torch_function_stack()


def _for_graphs(stance: Any) -> Any:
    """Return a stance but for what is to become of a step for which there is no graph yet."""
    of_recompiling = stance.stance in ("eager_on_recompile", "fail_on_recompile")
    return dataclasses.replace(stance, stance="default") if of_recompiling else stance


def stance_is_eager() -> bool:
    """Return True if the user has asked for nothing to be compiled: set_stance("force_eager")."""
    return _stance().stance == "force_eager" and not _FORCED.users


def _stance() -> Any:
    """Return the stance that torch.compiler.set_stance has set."""
    return eval_frame._stance


@torch.compiler.disable  # what Dynamo traces of a step may be called outside of it
def within_step() -> bool:
    """Return True if this thread runs a step, and not a closure that the step calls."""
    return _current.session is not None


@contextmanager
def step_of(session: Any, *, compiled: bool) -> Iterator[None]:
    """Compile with session, or not at all, what a step compiles itself, within this context."""
    with (
        _INSTALLED.used() if traces() else nullcontext(),
        _set(session, forced=not compiled),
        nullcontext() if compiled else _FORCED.used(),
    ):
        yield


@contextmanager
def outside() -> Iterator[None]:
    """Compile as if there were no step, within a closure that a step calls."""
    with _set(None, forced=False), _FORCED.lifted() if _current.forced else nullcontext():
        yield


@contextmanager
def _set(session: Any, *, forced: bool) -> Iterator[None]:
    before = _current.session, _current.forced
    _current.session, _current.forced = session, forced
    try:
        yield
    finally:
        _current.session, _current.forced = before
