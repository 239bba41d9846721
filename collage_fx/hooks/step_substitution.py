"""Substitution of an optimizer's step, where torch.compile runs it, by a compensated one.

PyTorch puts a function around the step of each class of optimizers, which calls the hooks of a step
and then what it has in its closure. That is the one place through which every step goes that
torch.compile was given as `optimizer.step`, and where an exception passes as through any call.
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch.compiler import disable
from torch.optim import Optimizer

from collage_fx.runtime.errors import OF_COPY
from collage_fx.runtime.torch_private import _use_grad_for_differentiable

STEP = "_collage_step"
"""Attribute of an optimizer: the function that does its steps; no checkpoint or copy has it."""
_STEPS = "_collage_steps"
"""Attribute of an optimizer: such functions by the options that they were made with."""
_SUBSTITUTED = "_collage_substituted"
"""Attribute set between its hooks and its step: the function is to be called in this call."""
_AROUND = Optimizer.profile_hook_step(lambda: None).__code__
_CUTTING = _use_grad_for_differentiable(lambda: None).__code__


def substitute(
    optimizer: Optimizer, make: Callable[..., Callable[..., Any] | None], options: dict[str, Any]
) -> None:
    """Have a function called in place of an optimizer's step, where torch.compile runs that.

    The hooks of the optimizer are called as before. Called by itself, without torch.compile, its
    step is what it was.

    Args:
        optimizer: whose step it is.
        make: called with the optimizer and the options, once for each; returns the function, which
            takes the arguments of the step, or None if the step is to be what it was.
        options: those of this call of torch.compile.
    """
    steps, key = vars(optimizer).setdefault(_STEPS, {}), repr(options)
    if key not in steps:
        steps[key] = make(optimizer, **options)
    if steps[key] is None:
        return
    setattr(optimizer, STEP, steps[key])
    setattr(optimizer, _SUBSTITUTED, True)
    around = _with_hooks(type(optimizer).step)
    assert around is not None and around.__closure__ is not None
    cell = around.__closure__[around.__code__.co_freevars.index("func")]
    if not hasattr(cell.cell_contents, _SUBSTITUTED):
        cell.cell_contents = _substitutable(cell.cell_contents)


def leave(optimizer: Optimizer) -> None:
    """Have a call that torch.compile does not run do the optimizer's own step."""
    if vars(optimizer).get(_SUBSTITUTED):  # another hook has failed in the call before
        setattr(optimizer, _SUBSTITUTED, False)


def can_substitute(optimizer: Optimizer) -> bool:
    """Return True if PyTorch calls the step of an optimizer after hooks, as it does since 2.0."""
    return _with_hooks(type(optimizer).step) is not None


def put_beneath_hooks(
    step: Any, put: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Callable[..., Any]:
    """Return the step of a class with a function put around what it does after its hooks.

    Around all of it, where somebody has put something around the hooks. Of torch.optim's steps
    within the function that cuts graphs, as it sets whether gradients are recorded.
    """
    around = _with_hooks(step)
    if around is None or around is not step:
        return put(step)
    own: Any = around.__wrapped__  # type: ignore[attr-defined]
    cuts = getattr(own, "__code__", None) is _CUTTING
    inner = own.__wrapped__ if cuts else own
    made = put(inner)
    if made is inner:
        return around
    return Optimizer.profile_hook_step(_use_grad_for_differentiable(made) if cuts else made)


def beneath_hooks(step: Any) -> Callable[..., Any]:
    """Return the step of a class with the decorators that it was written with, without hooks."""
    around = _with_hooks(step)
    assert around is not None
    own: Callable[..., Any] = around.__wrapped__  # type: ignore[attr-defined]

    def unhooked(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        return own(self, *args, **kwargs)

    copy = with_own_code(unhooked, own.__name__)
    # Dynamo leaves some classes of PyTorch alone.
    return copy if around is step else disable(copy)


_COPIES = itertools.count()


def with_own_code(function: Any, name: str) -> FunctionType:
    """Return a copy of a function, with code of its own that begins with a name.

    Dynamo keeps what it has compiled and seen as long as there is the code that it is for: a size
    that differs from what it has seen under the same name would become a symbol, and once plain
    torch.compile has met the limit of graphs of one code nothing is compiled of that any more.
    """
    code = function.__code__.replace(co_name=f"{name}{OF_COPY}{next(_COPIES)}")
    defaults, closure = function.__defaults__, function.__closure__
    copy = FunctionType(code, function.__globals__, code.co_name, defaults, closure)
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__dict__.update(function.__dict__)
    return copy


def apart(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function, or a method, with code of its own; another callable as it is.

    The function that PyTorch puts around steps has one code for all classes of optimizers.
    """
    if isinstance(function, MethodType) and isinstance(function.__func__, FunctionType):
        return MethodType(apart(function.__func__), function.__self__)
    if isinstance(function, FunctionType):
        return with_own_code(function, function.__name__)
    return function


def layers(function: Any) -> Iterator[Any]:
    """Yield a function, and those that decorators have wrapped in it."""
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)


def codes(function: Any) -> frozenset[CodeType]:
    """Return the code of a function and of those that decorators have wrapped in it."""
    found = (getattr(getattr(f, "__func__", f), "__code__", None) for f in layers(function))
    return frozenset(code for code in found if code is not None)


def _with_hooks(step: Any) -> FunctionType | None:
    return next((f for f in layers(step) if getattr(f, "__code__", None) is _AROUND), None)


def _substitutable(own: Callable[..., Any]) -> Callable[..., Any]:
    """Return the step of a class, which for some optimizers calls another function."""

    @functools.wraps(own)
    def step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, _SUBSTITUTED, False):
            return _run(self, args, kwargs)
        return own(self, *args, **kwargs)

    setattr(step, _SUBSTITUTED, True)
    return step


@disable
def _run(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    setattr(optimizer, _SUBSTITUTED, False)
    return vars(optimizer)[STEP](*args, **kwargs)
