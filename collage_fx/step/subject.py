"""Subjects of `compile`, `explain` and `report`: an optimizer, a function, or a mistake."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch.nn import Module
from torch.optim import Optimizer

from collage_fx.classes import own_step
from collage_fx.errors import OptionError, SubjectError
from collage_fx.hooks.step_substitution import STEP
from collage_fx.optimizer.ownership import without_arguments
from collage_fx.runtime.trees import tree_pairs
from collage_fx.step.other_methods import ServedMethod, names_in

_REMEDY = (
    "pass the optimizer, as in collage_fx.compile_(optimizer), or a function that updates tensors "
    "in place"
)


_PARAMETERS = frozenset({"param_groups", "params", "grad", "state"})
"""Names of attributes by which a step reaches parameters."""
_MASTERED = {"deepspeed": "DeepSpeed"}
"""Packages whose wrappers step on fp32 copies of the weights, and what to call them."""


def refuse_mastered(given: Any) -> None:
    """Raise SubjectError for a wrapper that keeps fp32 master weights, or has such a one in it."""
    while given is not None and not isinstance(given, Optimizer):
        package = type(given).__module__.partition(".")[0]
        if package in _MASTERED:
            raise SubjectError(
                f"{type(given).__name__} of {_MASTERED[package]} keeps fp32 copies of the weights "
                "and steps on these: nothing is lost there that could be compensated. Train "
                f"without {_MASTERED[package]}, with FSDP2 say, to do without the copies"
            )
        given = inner_of(given)


def subject_of(given: Any) -> Optimizer | Callable[..., Any]:
    """Return the optimizer or the function that is meant.

    The method `step` of an optimizer stands for the optimizer, whose checkpoints are to hold the
    residuals.

    Raises:
        SubjectError: a model, a class, or what cannot be called.
    """
    if isinstance(given, Optimizer):
        return given
    if isinstance(given, ServedMethod):
        return given.plain
    refuse_mastered(given)
    function = without_arguments(given)
    owner = getattr(function, "__self__", None)
    name = getattr(function, "__name__", "")
    if isinstance(owner, Optimizer) and name == "step":
        return owner
    if getattr(function, "_wrapped_by_lr_sched", False):
        raise SubjectError(f"a scheduler has put a function of its own around this step; {_REMEDY}")
    model = function if isinstance(function, Module) else owner
    if isinstance(model, Module) and (model is function or name in ("forward", "__call__")):
        raise SubjectError(
            f"a model, {type(model).__name__}, has no step whose updates could be lost: {_REMEDY}; "
            "the model itself may be compiled by torch.compile, or not at all"
        )
    if inspect.isclass(function):
        raise SubjectError(f"{function.__name__} is a class, no object of it; {_REMEDY}")
    if not callable(given):
        if inner_of(given) is not None:
            raise SubjectError(
                f"{type(given).__name__} is no torch.optim.Optimizer; compile the one that it wraps"
                ", as in collage_fx.compile_(wrapper.optimizer)"
            )
        raise SubjectError(
            f"expected an optimizer or a function, got {type(given).__name__}; {_REMEDY}"
        )
    return given


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of a function; of an object that can be called, that of its class."""
    function = without_arguments(function)
    return str(getattr(function, "__name__", type(function).__name__))


def step_made_here(given: Any, mark: str) -> Any:
    """Return the step that `collage_fx.compile` has marked; None if it has made none.

    Args:
        given: it, an optimizer that it was assigned to, or one that wraps such an optimizer and
            has it as its `optimizer`, as those that accelerate prepares.
        mark: the attribute that its steps have. What is put around them, by schedulers say, has
            their attributes too.
    """
    seen: list[Any] = []
    while given is not None and not any(given is one for one in seen):
        if getattr(given, mark, None) is not None:
            return given
        held = getattr(given, "__dict__", {})
        for step in (getattr(given, "step", None), held.get(STEP), own_step(given)):
            if getattr(step, mark, None) is not None:
                return step
        seen.append(given)
        given = inner_of(given)
    return None


def innermost(given: Any) -> Any:
    """Return the optimizer that has the states: given, or what it wraps and borrows them from."""
    has_states = isinstance(given, Optimizer) and "param_groups" in vars(given)
    inner = None if has_states else inner_of(given)
    return given if inner is None else innermost(inner)


def stepping(given: Any) -> Any:
    """Return the optimizer whose step is to be compiled: given, or what it only hands steps to.

    A wrapper that is a torch.optim.Optimizer may write parameters itself, as Lookahead does, behind
    the step of what it wraps. One whose step never asks for parameters, as accelerate's, does not.
    """
    inner = inner_of(given)
    if inner is None or innermost(given) is given:
        return given
    own = isinstance(given, Optimizer) and not _only_hands_on(type(given).step)
    return given if own else stepping(inner)


def _only_hands_on(step: Any) -> bool:
    code = getattr(inspect.unwrap(step), "__code__", None)
    return code is not None and _PARAMETERS.isdisjoint(names_in(code))


def inner_of(given: Any) -> Any:
    """Return the optimizer that another one wraps as its `optimizer`; None if it wraps none."""
    inner = getattr(given, "optimizer", None)
    return inner if hasattr(inner, "step") and hasattr(inner, "param_groups") else None


def in_place(function: Callable[..., Any], carries: tuple[str, ...]) -> Callable[..., Any]:
    """Return function with its first results written over the arguments of these names."""
    if not carries:
        return function
    signature = inspect.signature(function)
    unknown = [name for name in carries if name not in signature.parameters]
    if unknown:
        raise OptionError(
            f"carries={carries!r}: {signature} has no argument {', '.join(map(repr, unknown))}"
        )

    @functools.wraps(function)
    def update(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        results = function(*args, **kwargs)
        single = type(results) is not tuple  # a named one is a state
        results = (results,) if single else results
        old = tuple(bound.arguments[name] for name in carries)
        try:
            pairs = tree_pairs(old, results[: len(old)])
        except ValueError as error:
            raise SubjectError(
                f"carries={carries!r}: the first results do not have the structure of these "
                f"arguments ({error})"
            ) from error
        for state, new in pairs:
            state.copy_(new)
        return old[0] if single else old + results[len(old) :]

    return update
