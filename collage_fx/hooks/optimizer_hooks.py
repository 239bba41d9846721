"""See which optimizers take steps that torch.compile was asked to compile with our backend.

`fused=True`, sparse gradients and `.item()` make Dynamo run a step eagerly without a word, and a
backend that is not called cannot say so. So a hook of all steps, which Dynamo traces through, has
what collage_fx.compile makes do the steps of each optimizer; and a filter of Dynamo's log warns of
functions on which it gives up. Both come when torch.compile looks the backend up.
"""

import logging
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import takewhile
from types import CodeType
from typing import Any

import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._dynamo import config as dynamo_config
from torch._dynamo.callback import callback_handler
from torch._dynamo.eval_frame import innermost_backend
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.source import OptimizerSource, is_from_optimizer_source
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.variables import builder
from torch._dynamo.variables.optimizer import OptimizerVariable
from torch._dynamo.variables.tensor import TensorVariable
from torch._guards import ChainedSource, Source
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from collage_fx.hooks.nested_compile import stance_is_eager
from collage_fx.hooks.step_substitution import can_substitute, leave, substitute
from collage_fx.optimizer.ownership import live_optimizers, params_of
from collage_fx.runtime.errors import CollageWarning

_BUILDER: Any = builder
_make_dupe_guard = _BUILDER.make_dupe_guard
_EFFECTS: Any = SideEffects
_store = _EFFECTS.store_attr
_TENSOR: Any = TensorVariable
_has = _TENSOR.call_obj_hasattr
_LOG = logging.getLogger("torch._dynamo.convert_frame")
_OTHER_NAME = (
    "the step asks a tensor for its attribute {0}, or assigns it, by the result of an operation in "
    "place, of which torch.compile knows no attributes. Use the tensor itself, or keep what "
    "belongs to it in self.state"
)


class _Watch:
    """What has been seen of the step being traced."""

    backend: Any = None
    """The backend whose steps are watched."""
    compile: Any = None
    """Compiles an optimizer whose step is to be compiled with it."""
    warned: set[str] = set()  # noqa: RUF012 - one watch per process
    warned_of = WeakIdKeyDictionary()
    """What was said of each optimizer."""
    functions: Counter[str] = Counter()  # noqa: RUF012
    """The functions that graphs of that backend are of, as Dynamo's log has them: how many."""
    met = WeakIdKeyDictionary()
    """The optimizers that were seen in a trace."""
    patch: Any = None
    """What Dynamo's configuration is changed by while it compiles a step without gradients."""


def install(backend: Any, compile: Callable[..., Any]) -> None:
    """Watch the optimizer steps that are compiled with this backend. Idempotent.

    Args:
        backend: what torch.compile gets.
        compile: called with an optimizer whose step is about to run, and the options; returns what
            is to do its steps, or None.
    """
    _look_again()
    watch_traces()
    if _Watch.backend is not None:
        return
    _Watch.backend, _Watch.compile = backend, compile
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
    """Tell whether a hook that is not ours looks at the optimizer before or after its step."""
    hooks = [
        *getattr(optimizer, "_optimizer_step_pre_hooks", {}).values(),
        *getattr(optimizer, "_optimizer_step_post_hooks", {}).values(),
        *torch_optimizer._global_optimizer_pre_hooks.values(),
        *torch_optimizer._global_optimizer_post_hooks.values(),
    ]
    return any(hook is not _before for hook in hooks)


def count_graph(*, supervised: bool) -> None:
    """Note that the backend was given a graph.

    Args:
        supervised: whether what is not compiled is recorded.
    """
    _look_again()
    code = traced_code()
    if code is not None and not supervised:
        function = f"{code.co_name!r} ({code.co_filename}:{code.co_firstlineno})"
        _Watch.functions[function] += 1
        silent = not _LOG.isEnabledFor(logging.WARNING)
        if silent and _Watch.functions[function] == dynamo_config.recompile_limit:
            _warn_of_limit(f"what needs another graph of {function} runs", "recompile_limit")


def _before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        if _is_for_backend():
            _compile_step(optimizer, traced=True)
    # Within a compiled function, but Dynamo may only run what it has, or is to do nothing.
    elif get_eval_frame_callback() is False or stance_is_eager() or _is_left_out(optimizer):
        _compile_step(optimizer, traced=False)
    else:
        leave(optimizer)


def _is_left_out(optimizer: Optimizer) -> bool:
    """Tell whether Dynamo is to leave out this step alone, and not a function that it is a part of.

    PyTorch makes LBFGS and SparseAdam so, when torch.compile is first called.
    """
    if getattr(type(optimizer).step, "__code__", None) is not _DISABLED:
        return False
    codes = (frame.f_code for frame, _ in traceback.walk_stack(sys._getframe()))
    within = takewhile(lambda code: code.co_name != "compile_wrapper", codes)
    return sum(code is _DISABLED for code in within) == 1


_DISABLED = torch.compiler.disable(lambda: None).__code__
"""What runs a function that Dynamo leaves out."""


# Dynamo calls functions with this mark while it traces, and puts their result into the graph.
@torch._dynamo.assume_constant_result
def _is_for_backend() -> bool:
    """Tell whether Dynamo traces for our backend, and may cut what it traces."""
    _look_again()
    tracer = _tracer()
    ours = getattr(tracer.output.compiler_fn, "compiler_fn", None) is _Watch.backend
    return ours and not tracer.one_graph


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
            f"the step of {type(optimizer).__name__} runs without compensation, as something other "
            "than torch.compile runs it; use collage_fx.compile",
            optimizer,
        )
    else:
        leave(optimizer)


def _running_compiler() -> Any:
    """Return what torch.compile calls for the function that is running, if it is our backend."""
    for frame, _ in traceback.walk_stack(sys._getframe()):
        if frame.f_code.co_name == "compile_wrapper" and "callback" in frame.f_locals:
            compiler = innermost_backend(frame.f_locals["callback"])
            return compiler if getattr(compiler, "compiler_fn", None) is _Watch.backend else None
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
        f"{what} without compensation: torch.compile gave up after torch._dynamo.config.{limit} = "
        f"{value} graphs of it; raise it, or use collage_fx.compile, which does"
    )


def warn_once(message: str, optimizer: Optimizer | None = None) -> None:
    """Warn unless the same was said before, of that optimizer if it is known which."""
    said = _Watch.warned if optimizer is None else _Watch.warned_of.setdefault(optimizer, set())
    if message not in said:
        said.add(message)
        warnings.warn(f"collage_fx: {message}", CollageWarning, stacklevel=2)


def watch_traces() -> None:
    """Have Dynamo miss nothing of the optimizers in what it traces for our backend. Idempotent."""
    _BUILDER.make_dupe_guard = _guard_of_two_names
    _EFFECTS.store_attr = _store_attr
    _TENSOR.call_obj_hasattr = _has_attr


def _traced_for() -> Any:
    """Return our backend, or the session of a step, if Dynamo traces for it now."""
    backend = getattr(_tracer().output.compiler_fn, "compiler_fn", None)
    return backend if backend is _Watch.backend or hasattr(backend, "refuse_each") else None


def _store_attr(effects: SideEffects, item: Any, name: str, *args: Any, **kwargs: Any) -> None:
    """Note an assignment to an attribute; refuse one that Dynamo does not write back.

    That is one to an attribute of an optimizer, of which it keeps no track, and one to an attribute
    of a tensor by the result of an operation in place. See docs/stock-defects.md.
    """
    _store(effects, item, name, *args, **kwargs)
    if _is_result_in_place(item):
        _refuse(_OTHER_NAME.format(name))
    elif isinstance(item, OptimizerVariable) and item.value not in effects:
        _refuse(
            f"the step assigns self.{name}, which torch.compile does to no optimizer: the "
            "assignment would be lost. Keep what changes in self.state or in self.param_groups, or "
            "in a list or dict",
            item.value,
        )


def _has_attr(item: Any, tx: Any, name: str) -> Any:
    """Tell whether a traced tensor has an attribute; refuse to, where Dynamo does not know."""
    found = _has(item, tx, name)
    if not found.value and _is_result_in_place(item):
        _refuse(_OTHER_NAME.format(name))
    return found


def _is_result_in_place(item: Any) -> bool:
    """Tell whether a Dynamo variable is the result of an in-place operation.

    Dynamo knows the attributes of the tensor by the variable that the operation was given.
    """
    if not isinstance(item, TensorVariable) or item.source is not None:
        return False
    node = item.proxy.node
    value = node.meta.get("example_value")
    others = (other for other in node.graph.nodes if other is not node)
    return any(other.meta.get("example_value") is value for other in others)


def _refuse(message: str, optimizer: Optimizer | None = None) -> None:
    """Have the step that is traced for us recorded; where that cannot be, warn of what is lost."""
    if (backend := _traced_for()) is not None:
        if backend is not _Watch.backend:
            backend.refuse(message)
        warn_once(f"{message}; collage_fx.compile records such a step", optimizer)


def _guard_of_two_names(source: Source, first: Source | None) -> Any:
    """Return what makes the guard that two names are still of one object, or install it.

    Dynamo leaves that out where one of them is a place in an optimizer, or where one is local and
    one global. Of a method that updates one parameter, `self.state[p]` is the state of the first
    one in every call then. Only what optimizers list is taken to stay where it is. See
    docs/stock-defects.md.
    """
    guard, backend = _make_dupe_guard(source, first), _traced_for()
    if backend is None or first is None or first == source:
        return guard
    names = sorted((first, source), key=_is_listed, reverse=True)
    stock = guard is not None and not any(map(is_from_optimizer_source, names))
    if stock or all(map(_is_listed, names)):
        return guard
    place, other = names
    same = partial(GuardBuilder.DUPLICATE_INPUT, source_b=_as_of_no_optimizer(place))
    install_guard(_as_of_no_optimizer(other).make_guard(same))
    if backend is not _Watch.backend:
        backend.refuse_each(other, place)
    return None


def _is_listed(source: Any) -> bool:
    """Tell whether a place is in the parameter groups or the states of an optimizer.

    A gradient is not: it is another tensor in each step.
    """
    while isinstance(source, ChainedSource) and getattr(source, "member", "") != "grad":
        if isinstance(source.base, OptimizerSource):
            return getattr(source, "member", "") in ("param_groups", "state")
        source = source.base
    return False


def _as_of_no_optimizer(source: Any) -> Source:
    """Return the same place, at which Dynamo does not leave out guards."""
    if isinstance(source, OptimizerSource):
        return source.base
    if isinstance(source, ChainedSource):
        return replace(source, base=_as_of_no_optimizer(source.base))
    found: Source = source
    return found


def traced_optimizer() -> Optimizer | None:
    """Return the optimizer whose step, or in whose user, Dynamo traces now; None if not just one.

    It is looked for in the local variables of the function that is compiled.
    """
    if (tracer := _tracer()) is None:
        return None
    values = list(tracer.f_locals.values())
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


def traced_code() -> CodeType | None:
    """Return the code of the function that Dynamo traces now, if it traces one."""
    tracer = _tracer()
    return tracer.f_code if tracer is not None else None


def _tracer() -> Any:
    """Return what Dynamo traces with now, None if it traces nothing."""
    try:
        return InstructionTranslator.current_tx()
    except AttributeError:  # None in 2.11
        return None
