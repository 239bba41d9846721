"""The public functions: compile a step, read values and residuals."""

import functools
import inspect
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._dynamo import config as dynamo_config
from torch.compiler import disable
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map

from collage_fx import checkpoint
from collage_fx.backend import Session
from collage_fx.config import split_options
from collage_fx.errors import CollageError, OptionError
from collage_fx.ownership import (
    Owned,
    argument_tensors,
    held_tensors,
    live_optimizers,
    owners_of,
    state_count,
)
from collage_fx.report import Report
from collage_fx.runtime.residuals import STORE
from collage_fx.storm import Storm, symbolic_math
from collage_fx.supervisor import Supervisor

RECOMPILE_LIMIT = 256
"""How many graphs Dynamo may keep for the step of one class of optimizers."""


def compile(
    optimizer_or_function: Optimizer | Callable[..., Any],
    *,
    mode: str | None = None,
    carries: Sequence[str] = (),
    **options: Any,
) -> Callable[..., Any]:
    """Compile an optimizer's step, or a function that updates tensors, with compensation.

    Args:
        optimizer_or_function: a torch.optim.Optimizer (its class may be the user's own), or a
            function over tensors that updates some of them in place.
        mode: a mode of torch.compile, for Inductor.
        carries: for a function that returns new states instead of updating its arguments: the names
            of the arguments that its first results take the place of, in order. With
            `carries=("p", "m")` a call `p, m = step(p, grad, m)` updates p and m in place, and
            returns them.
        **options: fields of CollageConfig (`level`, `arithmetic`, `storage`, `states`); other names
            are settings of torch._inductor.config.

    Returns:
        For an optimizer a method bound to it, to be called in place of `optimizer.step`; it can be
        assigned to `optimizer.step` as well, and learning-rate schedulers and gradient scalers
        work with it. state_dict() and load_state_dict() of the optimizer carry the residuals from
        then on. For a function the compiled function.

    Raises:
        OptionError: an option or value that does not exist.
        TypeError: neither an optimizer nor callable.
    """
    config, inductor = split_options(options, mode)
    if isinstance(optimizer_or_function, Optimizer):
        optimizer = optimizer_or_function
        checkpoint.attach(optimizer)
        session = Session(config, inductor, optimizer=weakref.ref(optimizer))
        return _compile_optimizer(optimizer, session)
    if not callable(optimizer_or_function):
        raise TypeError(f"expected an optimizer or a function, got {type(optimizer_or_function)}")
    session = Session(config, inductor, named=True)
    function = _compile_function(_in_place(optimizer_or_function, tuple(carries)), session)
    function._collage = (optimizer_or_function, options)  # type: ignore[attr-defined]
    return function


def _compile_optimizer(optimizer: Optimizer, session: Session) -> Callable[..., Any]:
    """Return a method bound to the optimizer that runs its class's step compiled."""
    # The class's own step: optimizer.step may be wrapped by a scheduler, or be ours already.
    plain = types.MethodType(type(optimizer).step, optimizer)
    reference = weakref.ref(optimizer)
    supervisor = Supervisor(
        session.config,
        lambda: held_tensors(_alive(reference)),
        lambda: state_count(_alive(reference)),
        session.warn_once,
        f"the step of {type(optimizer).__name__}",
    )
    run = _supervised(plain, session, supervisor)

    @functools.wraps(type(optimizer).step)
    def step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        result = run(*args, **kwargs)
        self._opt_called = True  # type: ignore[attr-defined]  # what schedulers look at
        return result

    step._collage = session  # type: ignore[attr-defined]
    step._report = functools.partial(_report, supervisor, session)  # type: ignore[attr-defined]
    return types.MethodType(step, optimizer)


def _compile_function(function: Callable[..., Any], session: Session) -> Callable[..., Any]:
    """Return the function compiled, and supervised as the step of an optimizer is."""
    arguments: list[Owned] = []
    name = getattr(function, "__name__", repr(function))
    supervisor = Supervisor(
        session.config, lambda: arguments, lambda: 0, session.warn_once, name, keeps=False
    )
    run = _supervised(function, session, supervisor)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        arguments[:] = argument_tensors(args, kwargs)
        try:
            return run(*args, **kwargs)
        finally:
            arguments.clear()

    call._report = functools.partial(_report, supervisor, session)  # type: ignore[attr-defined]
    return call


def _supervised(
    plain: Callable[..., Any], session: Session, supervisor: Supervisor
) -> Callable[..., Any]:
    """Return plain compiled, as far as it can be, with the eager engine for the rest."""
    compiled = torch.compile(plain, backend=session)
    session.supervisor = weakref.ref(supervisor)
    storm = Storm(session)

    def run(*args: Any, **kwargs: Any) -> Any:
        with supervisor.step() as engine, storm.watch() as calm:
            # A closure runs the model, eagerly or as the user compiled it: no part of the step.
            args, kwargs = tree_map(
                lambda a: disable(engine.suspended(a)) if callable(a) else a, (args, kwargs)
            )
            # All optimizers of a class share one function, whose graphs Dynamo counts together: its
            # default limit of 8 is soon reached.
            with dynamo_config.patch(recompile_limit=RECOMPILE_LIMIT), symbolic_math():
                return compiled(*args, **kwargs) if calm else plain(*args, **kwargs)

    return run


def _in_place(function: Callable[..., Any], carries: tuple[str, ...]) -> Callable[..., Any]:
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
        single = not isinstance(results, tuple)
        results = (results,) if single else results
        old = tuple(bound.arguments[name] for name in carries)
        for state, new in zip(tree_leaves(old), tree_leaves(results[: len(old)]), strict=True):
            state.copy_(new)
        return old[0] if single else old + results[len(old) :]

    return update


def _alive(reference: Callable[[], Optimizer | None]) -> Optimizer:
    optimizer = reference()
    assert optimizer is not None, "the step outlived its optimizer"
    return optimizer


def report(step_or_optimizer: Callable[..., Any] | Optimizer) -> Report:
    """Say which engine served each carried state of a step, how often, and with what verdict.

    Args:
        step_or_optimizer: what `collage_fx.compile` returned, or an optimizer whose `step` it is.

    Raises:
        CollageError: it was not made by `collage_fx.compile`.
    """
    step = step_or_optimizer
    if isinstance(step, Optimizer):
        step = step.step
    made = getattr(step, "_report", None)
    if made is None:
        raise CollageError(
            f"{step_or_optimizer!r} was not made by collage_fx.compile, which keeps the record"
        )
    found: Report = made()
    return found


def _report(supervisor: Supervisor, session: Session) -> Report:
    return Report(supervisor.subject, list(supervisor.served.values()), sorted(session.warned))


def residuals(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the residual components of tensor, themselves, not copies; () if it has none.

    Each has the shape, dtype and device of tensor; tensor plus all of them is its full value. A
    residual whose tensor was written since from outside does not count; the next step clears it.
    """
    residual = STORE.get(tensor)
    if residual is None or not (residual.expected_checksum is not None or residual.belongs(tensor)):
        return ()
    return residual.components


def value(tensor: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return the value of the whole expansion, tensor plus residuals, in dtype.

    Shape and device are those of tensor. In float64 the sum is exact for bf16 and fp16 unless the
    components are more than 2^53 apart. A tensor without residuals is converted.
    """
    total = tensor.detach().to(torch.float64)
    for component in residuals(tensor):
        total = total + component.to(torch.float64)
    return total.to(dtype)


def load_residuals(tensor: Tensor, components: Sequence[Tensor]) -> None:
    """Give tensor the residual components that were saved with its present value.

    Args:
        tensor: bf16 or fp16, any shape.
        components: what `residuals(tensor)` returned when it was saved: shape and dtype of tensor.

    Raises:
        ResidualError: the components do not fit the tensor.
    """
    STORE.load(tensor, components, name=_name_of(tensor))


def _name_of(tensor: Tensor) -> str:
    owner = owners_of(live_optimizers()).get(id(tensor))
    return owner[1].name if owner else f"a tensor of shape {tuple(tensor.shape)}"
