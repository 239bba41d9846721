"""Hooks that see which optimizers take steps that torch.compile compiles with our backend.

`fused=True`, sparse gradients and `.item()` make Dynamo run a step eagerly without a word, and a
backend that is not called cannot say so. So a hook of all steps, which Dynamo traces through, has
what collage_fx.compile makes do the steps of each optimizer; and a filter of Dynamo's log warns of
functions on which it gives up. Both come when torch.compile looks the backend up.
"""

import logging
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from itertools import takewhile
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from collage_fx.hooks.nested_compile import stance_is_eager
from collage_fx.hooks.step_substitution import can_substitute, leave, substitute
from collage_fx.hooks.traces import Traces, traced_code, tracer, warn_once, watch_traces
from collage_fx.optimizer.ownership import live_optimizers, params_of
from collage_fx.runtime.torch_private import (
    TRACING,
    callback_handler,
    dynamo_config,
    explain,
    get_eval_frame_callback,
    innermost_backend,
    require,
)

_LOG = logging.getLogger("torch._dynamo.convert_frame")


class _Watch:
    """Observations of the step being traced."""

    compile: Any = None
    """Compiles an optimizer whose step is to be compiled with it."""
    functions: Counter[str] = Counter()  # noqa: RUF012 - one watch per process
    """The functions that graphs of that backend are of, as Dynamo's log has them: how many."""
    met = WeakIdKeyDictionary()
    """The optimizers that were seen in a trace."""
    patch: Any = None
    """Dynamo configuration for compiling a step without gradients, restored afterwards."""


def install(backend: Any, compile: Callable[..., Any]) -> None:
    """Watch the optimizer steps that are compiled with this backend. Idempotent.

    Args:
        backend: what torch.compile gets.
        compile: called with an optimizer whose step is about to run, and the options; returns what
            is to do its steps, or None.
    """
    require(TRACING)
    _look_again()
    watch_traces()
    if Traces.backend is not None:
        return
    Traces.backend, _Watch.compile = backend, compile
    register_optimizer_step_pre_hook(_before)
    _LOG.addFilter(_read_log)


def _look_again() -> None:
    """Have Dynamo come back to a step that it meets first when no parameter has a gradient.

    It never looks again at a function of which it has traced nothing, which would run without
    compensation when there are gradients. torch.compiler.reset() forgets the callbacks.
    """
    if _compilation_begins not in callback_handler.start_callbacks:
        callback_handler.register_start_callback(_compilation_begins)
        callback_handler.register_end_callback(_compilation_ends)


@torch.compiler.disable  # a compiled backward pass calls it where Dynamo looks at every frame
def _compilation_begins(_: Any) -> None:
    optimizer = _stepping()
    if optimizer is not None and all(p.grad is None for p in params_of(optimizer)):
        _Watch.patch = dynamo_config.patch(allow_empty_graphs=True)
        _Watch.patch.__enter__()


@torch.compiler.disable
def _compilation_ends(_: Any) -> None:
    if _Watch.patch is not None:
        _Watch.patch.__exit__(None, None, None)
        _Watch.patch = None


def has_foreign_hooks(optimizer: Optimizer) -> bool:
    """Return True if a hook that is not ours looks at the optimizer before or after its step."""
    hooks = [
        *getattr(optimizer, "_optimizer_step_pre_hooks", {}).values(),
        *getattr(optimizer, "_optimizer_step_post_hooks", {}).values(),
        *torch_optimizer._global_optimizer_pre_hooks.values(),
        *torch_optimizer._global_optimizer_post_hooks.values(),
    ]
    return hooks not in ([], [_before])  # no generator: each step asks


def count_graph(*, recorded: bool) -> None:
    """Note a graph that the backend was given.

    Args:
        recorded: whether what is not compiled is recorded.
    """
    _look_again()
    code = traced_code()
    if code is not None and not recorded:
        function = f"{code.co_name!r} ({code.co_filename}:{code.co_firstlineno})"
        _Watch.functions[function] += 1
        silent = not _LOG.isEnabledFor(logging.WARNING)
        if silent and _Watch.functions[function] == dynamo_config.recompile_limit:
            _warn_of_limit(f"what needs another graph of {function} runs", "recompile_limit")


def _before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    try:
        _find_step(optimizer)
    except Exception as error:
        explain(error)
        raise


def _find_step(optimizer: Optimizer) -> None:
    """Compile the step of an optimizer, or leave it, as what runs at the moment has it."""
    if torch.compiler.is_compiling():
        if _is_for_backend():
            _compile_step(optimizer, traced=True)
    # Within a compiled function, but Dynamo may only run what it has, or is to do nothing.
    elif get_eval_frame_callback() is False or stance_is_eager() or _is_left_out(optimizer):
        _compile_step(optimizer, traced=False)
    else:
        leave(optimizer)


def _is_left_out(optimizer: Optimizer) -> bool:
    """Return True if Dynamo is to leave out this step alone, not as part of another function.

    PyTorch makes LBFGS and SparseAdam so, when torch.compile is first called.
    """
    if getattr(type(optimizer).step, "__code__", None) is not _DISABLED:
        return False
    codes = (frame.f_code for frame, _ in traceback.walk_stack(sys._getframe()))
    within = takewhile(lambda code: code.co_name != "compile_wrapper", codes)
    return sum(code is _DISABLED for code in within) == 1


_DISABLED = torch.compiler.disable(lambda: None).__code__
"""Code object of the function that runs what Dynamo leaves out."""


# Dynamo calls functions with this mark while it traces, and puts their result into the graph.
@torch.compiler.assume_constant_result
def _is_for_backend() -> bool:
    """Return True if Dynamo traces for our backend, and may cut what it traces."""
    _look_again()
    traced = tracer()
    ours = getattr(traced.output.compiler_fn, "compiler_fn", None) is Traces.backend
    return ours and not traced.one_graph


@torch.compiler.disable  # so that the step, which is called next, is what it has become here
def _compile_step(optimizer: Optimizer, *, traced: bool) -> None:
    """Have the steps of an optimizer done by what collage_fx.compile makes.

    Args:
        optimizer: whose step is about to run.
        traced: whether it is known to be for our backend.
    """
    compiler = _running_compiler()
    if compiler is not None and can_substitute(optimizer):
        substitute(optimizer, _Watch.compile, getattr(compiler, "kwargs", {}))
    elif traced:
        warn_once(
            "not-torch-compile",
            f"the step of {type(optimizer).__name__} runs without compensation, as something other "
            "than torch.compile runs it; use collage_fx.compile",
            optimizer,
        )
    else:
        leave(optimizer)


def _running_compiler() -> Any:
    """Return torch.compile's callback for the running function, if it has our backend."""
    for frame, _ in traceback.walk_stack(sys._getframe()):
        if frame.f_code.co_name == "compile_wrapper" and "callback" in frame.f_locals:
            compiler = innermost_backend(frame.f_locals["callback"])
            return compiler if getattr(compiler, "compiler_fn", None) is Traces.backend else None
    return None


def _read_log(record: logging.LogRecord) -> bool:
    """Warn where Dynamo gives up on a function of which it has made graphs for the backend."""
    if str(record.msg).startswith("torch._dynamo hit config."):
        limit, _, function = (str(arg) for arg in (*record.args, "", "", "")[:3])  # type: ignore[misc]
        if function in _Watch.functions:
            _warn_of_limit(f"a compiled function, {function}, runs", limit)
    return True


def _stepping() -> Optimizer | None:
    """Return the optimizer whose step is running, if one is."""
    owners = (frame.f_locals.get("self") for frame, _ in traceback.walk_stack(sys._getframe()))
    return next((one for one in owners if issubclass(type(one), Optimizer)), None)


def _warn_of_limit(what: str, limit: str) -> None:
    value = getattr(dynamo_config, limit, "unknown")
    warn_once(
        "recompile-limit",
        f"{what} without compensation: torch.compile gave up after torch._dynamo.config.{limit} = "
        f"{value} graphs of it; raise it, or use collage_fx.compile, which does",
    )


def traced_optimizer() -> Optimizer | None:
    """Return the optimizer whose step, or in whose user, Dynamo traces now; None if not just one.

    It is looked for in the local variables of the function that is compiled.
    """
    if (translator := tracer()) is None:
        return None
    values = list(translator.f_locals.values())
    values += [one for value in values if isinstance(value, list | tuple) for one in value]
    found = {id(value): value for value in values if issubclass(type(value), Optimizer)}
    return next(iter(found.values())) if len(found) == 1 else None


def optimizers() -> list[Optimizer]:
    """Return every optimizer of this process, that which Dynamo traces now last."""
    if (traced := traced_optimizer()) is not None:
        # gc.freeze hides an optimizer from who looks for it, but not what is being compiled.
        _Watch.met.pop(traced, None)
        _Watch.met[traced] = True
    met = list(_Watch.met)
    return [*(one for one in live_optimizers() if all(one is not known for known in met)), *met]


def traced_function() -> str:
    """Return the name of the function that Dynamo traces now; empty if it traces none."""
    code = traced_code()
    return code.co_name if code is not None else ""
