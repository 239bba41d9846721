# ruff: noqa: F401
"""Private names of torch that collage_fx uses, each with its place and its purpose.

All versions of torch that were tested have all of them: `make test-torch VERSION=` tries one.

No other module imports one. A name is looked for when a module asks for it; one that this torch has
not is no error then, so that importing collage_fx never fails for it: `require` raises before the
first step. Public names and operators of ATen need no entry.
"""

import functools
import importlib
import itertools
import traceback
from typing import TYPE_CHECKING, Any, NamedTuple

from collage_fx.runtime.errors import TorchVersionError
from collage_fx.runtime.torch_versions import TESTED, untested_warning

if TYPE_CHECKING:  # what the names are, for type checkers
    from torch._C import (
        _len_torch_dispatch_stack,
        _len_torch_function_stack,
        _set_grad_enabled,
    )
    from torch._C._dynamo import guards as c_guards
    from torch._C._dynamo.eval_frame import get_eval_frame_callback
    from torch._C._dynamo.guards import GlobalStateGuard, TensorGuards
    from torch._dynamo import config as dynamo_config
    from torch._dynamo import eval_frame
    from torch._dynamo.callback import callback_handler
    from torch._dynamo.convert_frame import CatchErrorsWrapper, compile_lock
    from torch._dynamo.eval_frame import _callback_from_stance, innermost_backend
    from torch._dynamo.exc import SkipFrame, TensorifyScalarRestartAnalysis, TorchDynamoException
    from torch._dynamo.guards import GuardBuilder
    from torch._dynamo.pgo import auto_dynamic
    from torch._dynamo.side_effects import SideEffects
    from torch._dynamo.source import (
        FloatTensorSource,
        LocalSource,
        OptimizerSource,
    )
    from torch._dynamo.symbolic_convert import InstructionTranslator, TensorifyState
    from torch._dynamo.types import ConvertFrameReturn
    from torch._dynamo.variables import (
        builder as variable_builder,
    )
    from torch._dynamo.variables.base import AsPythonConstantNotImplementedError
    from torch._dynamo.variables.functions import WrapperUserFunctionVariable
    from torch._dynamo.variables.optimizer import ArgMappingException, OptimizerVariable
    from torch._dynamo.variables.tensor import TensorVariable
    from torch._functorch import config as functorch_config
    from torch._functorch._aot_autograd.descriptors import (
        PlainAOTInput,
        SubclassGetAttrAOTInput,
        SyntheticBaseAOTInput,
        ViewBaseAOTInput,
    )
    from torch._functorch.aot_autograd import aot_module_simplified
    from torch._guards import (
        CompileContext,
        TracingContext,
        tracing,
    )
    from torch._inductor import config as inductor_config
    from torch._inductor import inductor_prims
    from torch._inductor.codecache import PyCodeCache
    from torch._inductor.codegen.triton import TritonOverrides
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.graph import GraphLowering
    from torch._inductor.ir import Pointwise, TensorBox
    from torch._inductor.lowering import (
        lowerings,
        make_pointwise,
        register_lowering,
    )
    from torch._inductor.ops_handler import DefaultHandler
    from torch._inductor.virtualized import OpsValue, V
    from torch._inductor.virtualized import ops as inductor_ops
    from torch._logging._internal import (
        getArtifactLogger,
        register_artifact,
        register_log,
        trace_structured,
    )
    from torch._subclasses import FakeTensorMode
    from torch.optim.optimizer import _use_grad_for_differentiable
    from torch.utils._python_dispatch import (
        TorchDispatchMode,
        _disable_current_modes,
        _get_current_dispatch_mode,
        _pop_mode_temporarily,
    )

    DTENSOR_SPEC_MATCH: Any
    call_func_at_runtime_with_args: Any
    call_obj_hasattr: Any
    call_wrapped: Any
    get_python_args: Any
    make_dupe_guard: Any
    map_sources_and_install_guards: Any
    new_with_weak_ptr: Any
    runtime_wrappers: Any
    store_attr: Any
    track_mutable: Any


class Private(NamedTuple):
    """A private name of torch."""

    where: str
    """The module that has it, and its name there, which may be that of an attribute: `a.b:C.d`."""
    purpose: str
    required: bool
    """True if the first step raises where the name is missing."""


TRACING = "steps traced by Dynamo (collage_fx.compile records them instead)"
"""The purpose of names without which every step is recorded."""
_TABLE: tuple[tuple[str, bool, dict[str, str]], ...] = (
    (
        "Dynamo's settings, and whether a step is being compiled",
        True,
        {
            "torch._dynamo": "config as dynamo_config, eval_frame",
            "torch._dynamo.convert_frame": "compile_lock",
            "torch._dynamo.eval_frame": "_stance",
            "torch._C": "_len_torch_dispatch_stack",
        },
    ),
    (
        TRACING,
        False,
        {
            "torch._C": "_len_torch_function_stack",
            "torch._C._dynamo": "guards as c_guards",
            "torch._C._dynamo.eval_frame": "get_eval_frame_callback",
            "torch._C._dynamo.guards": "GlobalStateGuard, TensorGuards",
            "torch._dynamo.callback": "callback_handler",
            "torch._dynamo.convert_frame": "CatchErrorsWrapper",
            "torch._dynamo.eval_frame": "innermost_backend, _callback_from_stance",
            "torch._dynamo.exc": (
                "SkipFrame, TensorifyScalarRestartAnalysis, TorchDynamoException"
            ),
            "torch._dynamo.guards": (
                "GuardBuilder, GuardBuilder.DTENSOR_SPEC_MATCH as DTENSOR_SPEC_MATCH"
            ),
            "torch._dynamo.pgo": "auto_dynamic",
            "torch._dynamo.side_effects": (
                "SideEffects, SideEffects.store_attr as store_attr, SideEffects.track_mutable as "
                "track_mutable"
            ),
            "torch._dynamo.source": "OptimizerSource",
            "torch._dynamo.symbolic_convert": "InstructionTranslator",
            "torch._dynamo.types": "ConvertFrameReturn",
            "torch._dynamo.variables": (
                "builder as variable_builder, builder.make_dupe_guard as make_dupe_guard"
            ),
            "torch._dynamo.variables.base": "AsPythonConstantNotImplementedError",
            "torch._dynamo.variables.functions": (
                "WrapperUserFunctionVariable, WrapperUserFunctionVariable.call_function as "
                "call_wrapped"
            ),
            "torch._dynamo.variables.optimizer": (
                "ArgMappingException, OptimizerVariable, OptimizerVariable.get_python_args as "
                "get_python_args, OptimizerVariable.map_sources_and_install_guards as "
                "map_sources_and_install_guards"
            ),
            "torch._dynamo.variables.tensor": (
                "TensorVariable, TensorVariable.call_obj_hasattr as call_obj_hasattr"
            ),
        },
    ),
    (
        "numbers of a step as inputs of its graphs",
        True,
        {
            "torch._dynamo.source": "FloatTensorSource, LocalSource",
            "torch._dynamo.symbolic_convert": "TensorifyState",
        },
    ),
    (
        "compiling a graph with the inputs that a trace knows",
        True,
        {
            "torch._functorch": "config as functorch_config",
            "torch._functorch.aot_autograd": "aot_module_simplified",
            "torch._functorch._aot_autograd.descriptors": (
                "PlainAOTInput, SubclassGetAttrAOTInput, SyntheticBaseAOTInput, ViewBaseAOTInput"
            ),
            "torch._guards": "TracingContext, tracing",
            "torch._inductor": "config as inductor_config, inductor_prims",
            "torch._inductor.compile_fx": "compile_fx, compile_fx_inner",
            "torch._inductor.decomposition": "select_decomp_table",
            "torch._subclasses": "FakeTensorMode",
        },
    ),
    (
        "how Inductor lowers what rounds",
        True,
        {
            "torch._inductor.ir": "Pointwise, TensorBox",
            "torch._inductor.lowering": "lowerings, make_pointwise, register_lowering",
            "torch._inductor.virtualized": "ops as inductor_ops",
        },
    ),
    (
        "printing Triton kernels, on a GPU",
        False,
        {
            "torch._inductor.codecache": "PyCodeCache",
            "torch._inductor.codegen.triton": "TritonOverrides",
            "torch._inductor.graph": "GraphLowering",
            "torch._inductor.ops_handler": "DefaultHandler",
            "torch._inductor.virtualized": "OpsValue, V",
        },
    ),
    (
        "recording the operations of a step",
        True,
        {
            "torch.utils._python_dispatch": (
                "TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode, "
                "_pop_mode_temporarily"
            ),
            "torch.optim.optimizer": "_use_grad_for_differentiable",
            "torch._functorch._aot_autograd": "runtime_wrappers",
            "torch._functorch._aot_autograd.runtime_wrappers": "call_func_at_runtime_with_args",
        },
    ),
    (
        "where tensors lie",
        True,
        {
            "torch": "UntypedStorage._new_with_weak_ptr as new_with_weak_ptr",
        },
    ),
    (
        "classes of parameters in graphs that turn gradients on or off",
        False,
        {"torch._C": "_set_grad_enabled"},
    ),
    (
        "names for TORCH_LOGS, and traces for tlparse",
        False,
        {
            "torch._guards": "CompileContext",
            "torch._logging._internal": (
                "getArtifactLogger, register_artifact, register_log, trace_structured"
            ),
        },
    ),
)
"""(purpose, required, module -> names); `name as alias` where collage_fx has another name."""


_CALLING = {"collage_fx.step.compiled_step", "collage_fx.runtime.progress"}
"""The modules that call what a user has written: an error that is raised there is of the call."""


def _named() -> dict[str, Private]:
    found = {}
    for purpose, required, modules in _TABLE:
        for module, names in modules.items():
            for entry in names.split(", "):
                name, _, ours = entry.partition(" as ")
                found[ours or name] = Private(f"{module}:{name}", purpose, required)
    return found


NAMES = _named()
"""Our name -> what it stands for."""


class _Missing(type):
    """The class of what stands for a name that this torch has not: to use it is an error."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise _error([cls.__name__])

    __getitem__ = __iter__ = __len__ = __call__

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


def find(name: str) -> Any:
    """Return the object of one of `NAMES`, or a class that raises when it is called."""
    module, _, path = NAMES[name].where.partition(":")
    first, *attributes = path.split(".")
    try:
        found: Any = importlib.import_module(module)
        # As `from module import first`, which imports a submodule that nobody has imported yet.
        if not hasattr(found, first):
            importlib.import_module(f"{module}.{first}")
        for part in (first, *attributes):
            found = getattr(found, part)
    except (ImportError, AttributeError):
        return _Missing(name, (Exception,), {})
    return found


def is_missing(found: Any) -> bool:
    """Return True if this torch has not what was found."""
    return isinstance(found, _Missing)


@functools.cache
def require(purpose: str = "") -> None:
    """Raise TorchVersionError if this torch lacks a name that is required, or is for a purpose."""
    wanted = [n for n, one in NAMES.items() if one.required or one.purpose == purpose]
    if gone := [name for name in wanted if is_missing(find(name))]:
        raise _error(gone)


@functools.cache
def traces() -> bool:
    """Return True if this torch has every name by which steps are traced."""
    names = [name for name, one in NAMES.items() if one.purpose == TRACING]
    return not any([is_missing(globals().setdefault(name, find(name))) for name in names])


def explain(error: BaseException) -> None:
    """Raise TorchVersionError from an error that a torch which was never tested makes us raise.

    That is one of a name or a signature, in our code or in torch's, where ours has called it.
    """
    import torch

    named = isinstance(error, AttributeError | ImportError | TypeError)
    named = named or type(error).__name__ == "InternalTorchDynamoError"  # one of these, in a trace
    if not named or isinstance(error, TorchVersionError):
        return
    untested = untested_warning(torch.__version__)
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    modules = [str(frame.f_globals.get("__name__")) for frame in frames]
    within = list(itertools.dropwhile(lambda name: not name.startswith("collage_fx."), modules))
    # What a user calls wrongly raises where the user's function, or an optimizer's, is called.
    own = [name for name in within if name.partition(".")[0] != "torch" or "optim" in name]
    if untested and own and own[-1].startswith("collage_fx.") and own[-1] not in _CALLING:
        raise TorchVersionError(f"{type(error).__name__}: {error}; {untested}") from error


def left_out() -> list[str]:
    """Return remarks for a report on names that are not required, and that torch has not."""
    gone = [NAMES[name] for name, found in globals().items() if is_missing(found) and name in NAMES]
    return [
        f"torch has no {one.where.replace(':', '.')}: without {one.purpose}"
        for one in gone
        if not one.required
    ]


def _error(names: list[str]) -> TorchVersionError:
    import torch

    gone = "; ".join(
        f"{NAMES[n].where.replace(':', '.')}, for {NAMES[n].purpose}" for n in names if n in NAMES
    )
    return TorchVersionError(
        f"torch {torch.__version__} has no {gone or ', '.join(names)}: collage_fx needs it, and no "
        f"step was taken. It was tested with torch {', '.join(TESTED)}: install one of them, or a "
        "newer collage_fx"
    )


if not TYPE_CHECKING:  # which would take every name for one that exists

    def __getattr__(name: str) -> Any:
        """Look for a name; from then on it is an ordinary attribute."""
        if name not in NAMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = globals()[name] = find(name)
        return found
