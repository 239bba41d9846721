"""The public functions: compile a step, read values and residuals."""

import functools
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._dynamo import config as dynamo_config
from torch.optim import Optimizer

from collage_fx import checkpoint
from collage_fx.backend import Session
from collage_fx.config import split_options
from collage_fx.ownership import live_optimizers, owners_of
from collage_fx.runtime.residuals import STORE
from collage_fx.watch import has_gradient, why_not_compiled

RECOMPILE_LIMIT = 256
"""How many graphs Dynamo may keep for the step of one class of optimizers."""


def compile(
    optimizer_or_function: Optimizer | Callable[..., Any],
    *,
    mode: str | None = None,
    **options: Any,
) -> Callable[..., Any]:
    """Compile an optimizer's step, or a function that updates tensors, with compensation.

    Args:
        optimizer_or_function: a torch.optim.Optimizer (its class may be the user's own), or a
            function over tensors that updates some of them in place.
        mode: a mode of torch.compile, for Inductor.
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
    function = torch.compile(optimizer_or_function, backend=session)
    function._collage = (optimizer_or_function, options)  # type: ignore[attr-defined]
    return function


def _compile_optimizer(optimizer: Optimizer, session: Session) -> Callable[..., Any]:
    """Return a method bound to the optimizer that runs its class's step compiled."""
    # The class's own step: optimizer.step may be wrapped by a scheduler, or be ours already.
    compiled = torch.compile(types.MethodType(type(optimizer).step, optimizer), backend=session)

    @functools.wraps(type(optimizer).step)
    def step(self: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        runs = session.calls
        # All optimizers of a class share one function, whose graphs Dynamo counts together: its
        # default limit of 8 is soon reached, and the step would go on eagerly.
        with dynamo_config.patch(recompile_limit=RECOMPILE_LIMIT):
            # A closure runs the model: eagerly or as the user compiled it, not as part of the step.
            result = compiled() if closure is None else compiled(torch.compiler.disable(closure))
        self._opt_called = True  # type: ignore[attr-defined]  # what schedulers look at
        if session.calls == runs and has_gradient(self):
            session.warn_once(why_not_compiled(self))
        return result

    step._collage = session  # type: ignore[attr-defined]
    return types.MethodType(step, optimizer)


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
