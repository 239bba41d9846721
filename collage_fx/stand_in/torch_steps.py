"""Step functions of torch.optim that treat all parameters alike, and copies of them."""

import inspect
from collections.abc import Callable
from types import FunctionType, GenericAlias
from typing import Any

from torch import Tensor
from torch.optim import (
    SGD,
    Adadelta,
    Adafactor,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    Muon,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)

from collage_fx.classes import class_of
from collage_fx.compilation.session import Session
from collage_fx.hooks.step_substitution import layers, with_own_code
from collage_fx.optimizer.discovery import init_states
from collage_fx.optimizer.ownership import owned_tensors

ALIKE = frozenset({Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop, SGD})
"""Classes, not those that users derive, whose step treats each parameter of a group by itself."""

SHAPED = frozenset({Adafactor, Muon})
"""Classes whose step treats those parameters alike that have one shape."""


def of_one_shape(optimizer: Optimizer) -> bool:
    """Return True if the step of an optimizer treats those parameters alike that have one shape."""
    return class_of(optimizer) in SHAPED


def serves(optimizer: Optimizer, session: Session) -> bool:
    """Return True if the steps of an optimizer may be done with stand-ins."""
    if not session.deduplicates:
        return False
    if of_one_shape(optimizer):
        states = (o.tensor for o in owned_tensors(optimizer))
        if session.rounds_by_chance(states):
            return False
    if class_of(optimizer) not in ALIKE | SHAPED or "_init_group" in vars(optimizer):
        return False
    if optimizer.defaults.get("differentiable"):
        return False
    *around, step = layers(type(optimizer).step)
    if not all(f.__globals__["__name__"].startswith("torch.") for f in around):
        return False  # somebody has put a function of their own around the step
    return bool(step.__globals__["__name__"].startswith("torch.optim."))


def code_of_step(optimizer: Optimizer) -> tuple[Any, ...] | None:
    """Return the code of a torch.optim optimizer's step: its class, and all functions there.

    Of two that are equal, one does what the other does. None if somebody has put something of their
    own in the place of a function: what that depends on is not known.
    """
    kind: Any = class_of(optimizer)
    around = list(layers(kind.step))
    # Dynamo puts what it has compiled there too, under names that begin so.
    named = {k: v for k, v in around[-1].__globals__.items() if not k.startswith("__")}
    called = [v for v in named.values() if callable(v) and not isinstance(v, type | GenericAlias)]
    ours = ("torch.", "typing")
    if not all(
        [isinstance(v, FunctionType) and v.__globals__["__name__"].startswith(ours) for v in called]
    ):
        return None
    return kind, kind._init_group, *around, *[f.__code__ for f in around], *called


def without_hooks(optimizer: Optimizer, session: Session) -> Callable[..., Any]:
    """Return the step of an optimizer's class as it is written."""
    return session.with_gradients(inspect.unwrap(type(optimizer).step))


def copy_of_step(optimizer: Optimizer, session: Session) -> FunctionType:
    """Return the step of an optimizer's class, without hooks, as a function of its own."""
    step: Any = without_hooks(optimizer, session)
    return with_own_code(step, step.__name__)


def make_states(optimizer: Optimizer) -> None:
    """Make the states that Dynamo would have made before it traces, in the same way."""
    states = optimizer.state
    for group in optimizer.param_groups:
        new = all(p not in states for p in group["params"])
        if new and "capturable" in group and all(p.is_cuda or p.is_xpu for p in group["params"]):
            group["capturable"] = True
    for p, state in states.items():
        if isinstance(state.get("step"), Tensor) and state["step"].is_cpu:
            state["step"] = state["step"].to(p.device)
    init_states(optimizer, optimizer.param_groups)
