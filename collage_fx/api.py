"""Public functions that compile a step and report on it: `compile`, `compile_`, `report`."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch.compiler import disable
from torch.nn import Module
from torch.optim import Optimizer

from collage_fx.budget.plan import beginning
from collage_fx.budget.step import BudgetedSteps
from collage_fx.classes import refuse_compensated
from collage_fx.config import CollageConfig
from collage_fx.dynamo import backend
from collage_fx.dynamo.backend import Backend
from collage_fx.dynamo.options import names_options, split_options
from collage_fx.errors import SubjectError
from collage_fx.hooks import distributed_state_dicts, optimizer_hooks
from collage_fx.optimizer import plain_steps
from collage_fx.optimizer.checkpoints import state_dicts
from collage_fx.optimizer.checkpoints.history import share_history
from collage_fx.optimizer.fused import as_its_kernel
from collage_fx.optimizer.ownership import family
from collage_fx.optimizer.parameter_names import names_of
from collage_fx.optimizer.served import Report
from collage_fx.step.compiled_step import (
    Looks,
    compile_function,
    compile_optimizer,
    optimizer_of,
    report_of,
)
from collage_fx.step.distributed_wrappers import compile_wrapper, wrapped_optimizers
from collage_fx.step.subject import in_place, refuse_mastered, stepping, subject_of

OptimizerT = TypeVar("OptimizerT")


@names_options
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
            function over tensors that updates some of them in place. It may be a method, such as
            `AveragedModel.update_parameters`, and update the tensors of its object; the `step` of
            an optimizer stands for the optimizer. Of optimizers of torch.distributed, such as
            ZeroRedundancyOptimizer, the one that they hold is compiled.
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
        work with it. With `clip_grad_norm` its attribute `grad_norm` is the norm of the gradients
        of the last step, before they were clipped: a 0-d fp32 tensor on their device.
        state_dict() and load_state_dict() of the optimizer carry the residuals from then on.
        For a function the compiled function.

    Raises:
        OptionError: an option or value that does not exist.
        SubjectError: a model, or anything else that is neither an optimizer nor a function; an
            optimizer that compiles its own step, of a class of `collage_fx.optim` say.

    Examples:
        >>> optimizer.step = collage_fx.compile(optimizer, level="plus")
        >>> train(optimizer)

        A function that updates its argument:

        >>> def update(p, g):
        ...     p.sub_(g, alpha=2**-12)
        >>> step = collage_fx.compile(update)
        >>> p, g = torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.bfloat16)
        >>> step(p, g)
        >>> p, collage_fx.value(p)
        (tensor([1., 1.], dtype=torch.bfloat16), tensor([0.9998, 0.9998], dtype=torch.float64))
    """
    config, inductor = split_options(options, mode, beside=("mode", "carries"))
    subject = subject_of(optimizer_or_function)
    if isinstance(subject, Optimizer):
        refuse_compensated(subject)
        return compile_own(subject, mode, **options)
    session = Backend(config, inductor, named=True)
    plain = in_place(subject, tuple(carries))
    function = compile_function(plain, session)
    function._collage = (plain, options)  # type: ignore[attr-defined]
    return function


def compile_own(
    optimizer: Optimizer, mode: str | None = None, **options: Any
) -> Callable[..., Any]:
    """Compile the step of an optimizer, of whatever class; see `compile`."""
    config, inductor = split_options(options, mode)
    if held := wrapped_optimizers(optimizer):
        if config.clip_grad_norm is not None:  # a process may hold a part of the parameters
            options = {**options, "clip_over": [optimizer, *config.clip_over]}
        steps = [compile(one, mode=mode, **options) for one in held]
        return compile_wrapper(optimizer, held, steps, changed=config.changed)
    config = _begin(optimizer, config, options)
    plain_steps.watch(family(optimizer))
    session = Backend(config, inductor, optimizer=weakref.ref(optimizer))
    return compile_optimizer(optimizer, session, look=_look(config))


@disable  # where the whole training step is compiled
def methods_of(first_use: Any) -> dict[str, Callable[..., Any]]:
    """Return the methods of an optimizer that compiles its own step, compiled now if need be."""
    methods: dict[str, Callable[..., Any]] = first_use.methods()
    return methods


@names_options
def compile_(optimizer: OptimizerT, *, mode: str | None = None, **options: Any) -> OptimizerT:
    """Compile the step of an optimizer with compensation, in place: assign what `compile` returns.

    Args:
        optimizer: a torch.optim.Optimizer, or a wrapper that has one as its `optimizer`. Of a
            wrapper that only hands steps on, such as accelerate's AcceleratedOptimizer, that one's
            step is compiled; of one whose step reaches for parameters, such as Lookahead, its own.
            Schedulers may have been made for it already.
        mode: as of `compile`.
        **options: as of `compile`.

    Returns:
        The optimizer that was given.

    Raises:
        OptionError: an option or value that does not exist.
        SubjectError: anything that is no optimizer.

    Examples:
        >>> optimizer = collage_fx.compile_(optimizer)
        >>> scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
        >>> train(optimizer)
    """
    refuse_mastered(optimizer)
    inner = stepping(optimizer)
    if not isinstance(inner, Optimizer):
        raise SubjectError(f"compile_ takes an optimizer, got {type(optimizer).__name__}")
    inner.step = compile(inner, mode=mode, **options)  # type: ignore[method-assign]
    return optimizer


def _begin(optimizer: Optimizer, config: CollageConfig, options: dict[str, Any]) -> CollageConfig:
    """Have checkpoints of an optimizer hold residuals; return the configuration for its step."""
    distributed_state_dicts.know_residuals()
    config = beginning(config, optimizer)
    for one in family(optimizer):
        state_dicts.attach(one, config.storage)
        share_history(optimizer, one)
    return as_its_kernel(config, options, optimizer)


def _look(config: CollageConfig) -> Looks | None:
    """Return what makes an observer of steps that a configuration asks for."""
    return None if config.budget is None else BudgetedSteps


def _compile_for_backend(
    optimizer: Optimizer, mode: str | None = None, options: dict[str, Any] | None = None
) -> Callable[..., Any] | None:
    """Return the function that does an optimizer's steps which torch.compile runs with our backend.

    None for an optimizer of torch.distributed, which calls that of the one that it holds.
    """
    if wrapped_optimizers(optimizer):
        return None
    config, inductor = split_options(options or {}, mode)
    backend.refuse_for_string(config)
    config = _begin(optimizer, config, options or {})
    session = Backend(config, inductor, optimizer=weakref.ref(optimizer))
    return compile_optimizer(optimizer, session, hooked=False, look=_look(config))


def __getattr__(name: str) -> Any:
    """Give the backend, `collage`, to who asks for it: torch.compile, before it traces anything.

    Only from then on is there something to watch in the steps of optimizers.
    """
    if name != "collage":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    optimizer_hooks.install(backend.collage, _compile_for_backend)
    return backend.collage


def report(
    step_or_optimizer: Callable[..., Any] | Optimizer,
    *,
    model: Module | None = None,
    verbose: bool = False,
) -> Report:
    """Report how each carried state of a step was written, how often, and with what verdict.

    Args:
        step_or_optimizer: what `collage_fx.compile` returned, an optimizer whose `step` it is, or
            one that wraps such an optimizer and has it as its `optimizer`.
        model: the module whose names the parameters have, as of `explain`.
        verbose: whether its text has a row for each state, though others say the same.

    Raises:
        CollageError: it was not made by `collage_fx.compile`.
        SubjectError: a `model` that has not the parameters of the optimizer.

    Examples:
        >>> train(collage_fx.compile_(optimizer))
        >>> found = collage_fx.report(optimizer)
        >>> [(state.name, state.compensated) for state in found.states]
        [('weight', True), ('exp_avg of weight', False), ('exp_avg_sq of weight', True)]
    """
    found = report_of(step_or_optimizer)
    found.verbose = verbose
    subject = optimizer_of(step_or_optimizer)
    return found if subject is None else found.named(names_of(subject, model))
