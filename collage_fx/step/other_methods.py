"""Methods of an optimizer beside its step: they are recorded, and what they write keeps low words.

Schedule-Free's `eval()` and `train()` move the parameters between two averages, others swap them,
reset them or synchronize them with slow copies. Such a method is recorded and interpreted. One that
takes the step of an optimizer, as SAM's `second_step()` does, is a step itself.
"""

import inspect
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.compiler import disable
from torch.optim import Optimizer

from collage_fx.config import CollageConfig
from collage_fx.errors import OptionError
from collage_fx.hooks import nested_compile
from collage_fx.hooks.step_substitution import codes
from collage_fx.optimizer import plain_steps
from collage_fx.optimizer.ownership import family
from collage_fx.runtime.trees import replace_functions

if TYPE_CHECKING:  # it imports Inductor, which a doctor does without
    from collage_fx.record.steps import Steps


class ServedMethod:
    """Replacement of a method of one optimizer; a copy of the optimizer has its class's own."""

    def __init__(self, optimizer: Optimizer, own: Callable[..., Any], steps: "Steps") -> None:
        self.optimizer = weakref.ref(optimizer)
        self.own = own
        self.steps = weakref.ref(steps)
        """Weak reference to the steps; without a compiled step the class's own method is called."""
        self.serving = _stepping if _takes_step(own) else _serving
        self.__name__, self.__doc__ = own.__name__, own.__doc__

    @property
    def plain(self) -> Callable[..., Any]:
        """The method as the class has it."""
        optimizer = self.optimizer()
        assert optimizer is not None, "a method outlived its optimizer"
        return _bound(self.own, optimizer)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Do the method, within a step as a part of that."""
        if torch.compiler.is_dynamo_compiling():  # a step that calls it
            return self.own(self.optimizer(), *args, **kwargs)
        return self._serve(args, kwargs)

    @disable
    def _serve(self, args: Any, kwargs: Any) -> Any:
        steps = self.steps()
        if steps is None or nested_compile.within_step():
            return self.plain(*args, **kwargs)
        _refuse_unclipped(self.own, steps.session.config)
        if args or kwargs:
            # A closure is no part of the method.
            args, kwargs = replace_functions(
                (args, kwargs),
                inspect.isroutine,
                lambda f: steps.recorder.suspended(f, steps.failures),
            )
        with self.serving(steps):
            result = self.plain(*args, **kwargs)
        return _Context(result, steps) if isinstance(result, AbstractContextManager) else result

    def __reduce__(self) -> Any:
        """Return constructor and arguments of a copy's method."""
        return _bound, (self.own, self.optimizer())


def _bound(own: Callable[..., Any], optimizer: Optimizer) -> Callable[..., Any]:
    return types.MethodType(own, optimizer)


class _Context(AbstractContextManager[Any]):
    """A context that a method has returned: what is done to enter and to leave it is served."""

    def __init__(self, made: AbstractContextManager[Any], steps: "Steps") -> None:
        self.made = made
        self.steps = steps

    def __enter__(self) -> Any:
        with _serving(self.steps):
            return self.made.__enter__()

    def __exit__(self, *raised: Any) -> Any:
        with _serving(self.steps):
            return self.made.__exit__(*raised)


@contextmanager
def _serving(steps: "Steps") -> Iterator[None]:
    if nested_compile.within_step():
        yield
        return
    with steps.beside(), nested_compile.step_of(steps.session, compiled=False):
        yield


@contextmanager
def _stepping(steps: "Steps") -> Iterator[None]:
    steps.go_on()
    plain_steps.called(steps.session.optimizers())
    with (
        steps.step(traced=False, once=False),
        steps.failures.caught(),
        nested_compile.step_of(steps.session, compiled=False),
    ):
        yield


def _refuse_unclipped(method: Callable[..., Any], config: CollageConfig) -> None:
    """Raise OptionError for a part of a step that is called by itself, as SAM's are."""
    asked = ["clip_grad_norm"] * (config.clip_grad_norm is not None)
    asked += ["zero_grads"] * config.zero_grads
    names = [name for code in codes(method) for name in names_in(code)]
    if asked and "grad" in names and ("step" in method.__name__ or _takes_step(method)):
        raise OptionError(
            f"{asked[0]} is for the gradients of step(): {method.__name__}() reads gradients by "
            "itself. Call step() with a closure, or clip and zero gradients around it"
        )


def _takes_step(method: Callable[..., Any]) -> bool:
    """Return True if a method calls `step`, that of the optimizer within say."""
    return any("step" in names_in(code) for code in codes(method))


def serve_methods(optimizer: Optimizer, steps: "Steps") -> None:
    """Serve the methods of an optimizer, and of what it wraps, that its steps do not call.

    What somebody has put in the place of one stays there. What steps call is a part of them, and
    traced by Dynamo, for whatever backend; unless one of these takes a step itself: then they may
    be called in its place (`first_step()`, `second_step()`).
    """
    everyone = family(optimizer)
    parts = _called_in_steps([type(one) for one in everyone])
    for one in everyone:
        _warn_of_call(type(one), steps)
        methods = _methods_of(type(one))
        if any(map(_takes_step, methods.values())):
            parts = set()
        for name, own in methods.items():
            before = vars(one).get(name)
            ours = before is None or (one is optimizer and isinstance(before, ServedMethod))
            if ours and name not in parts:
                vars(one)[name] = ServedMethod(one, own, steps)


def _warn_of_call(cls: type, steps: "Steps") -> None:
    """Warn of `optimizer()` that writes parameters: Python looks no `__call__` up in an object."""
    own = next((vars(c)["__call__"] for c in cls.__mro__ if "__call__" in vars(c)), None)
    if not isinstance(own, types.FunctionType) or _takes_step(own):
        return
    if any("param_groups" in names_in(code) for code in codes(own)):
        steps.warn(
            "plain-call",
            f"a call of {cls.__name__} itself, as in optimizer(), reaches its parameters "
            "without compensation: give that method a name, as in optimizer.update()",
        )


def _methods_of(cls: type) -> dict[str, Callable[..., Any]]:
    """Return the public methods that a class of optimizers adds to PyTorch's."""
    found: dict[str, Any] = {}
    for one in reversed([c for c in cls.__mro__ if not c.__module__.startswith("torch.")]):
        found |= {n: f for n, f in vars(one).items() if not n.startswith("_")}
    return {
        name: own
        for name, own in found.items()
        if isinstance(own, types.FunctionType)
        and not hasattr(Optimizer, name)
        and not inspect.isgeneratorfunction(own)
        and not inspect.iscoroutinefunction(own)
    }


def _called_in_steps(classes: list[type]) -> set[str]:
    """Return the names of the methods that the steps of these classes call, and those in turn."""
    found, waiting = {"step"}, ["step"]
    while waiting:
        name = waiting.pop()
        methods = [vars(c)[name] for cls in classes for c in cls.__mro__ if name in vars(c)]
        for code in [code for method in methods for code in codes(method)]:
            new = {n for n in names_in(code) if any(hasattr(cls, n) for cls in classes)} - found
            found |= new
            waiting += new
    return found


def names_in(code: types.CodeType) -> Iterator[str]:
    """Yield the names that some code asks objects for, that of functions within it too."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from names_in(constant)
