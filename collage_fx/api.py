"""The public functions: compile a step, read values and residuals."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from collage_fx import checkpoint
from collage_fx.backend import Session
from collage_fx.config import split_options
from collage_fx.fused import as_its_kernel
from collage_fx.ownership import family, live_optimizers, owners_of
from collage_fx.report import Report
from collage_fx.runtime.residuals import STORE, Residual, storage_of
from collage_fx.runtime.shards import shard_of, sharded_like
from collage_fx.steps import compile_function, compile_optimizer, in_place, report_of


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
        for one in family(optimizer):
            checkpoint.attach(one)
        config = as_its_kernel(config, options, optimizer)
        session = Session(config, inductor, optimizer=weakref.ref(optimizer))
        return compile_optimizer(optimizer, session)
    if not callable(optimizer_or_function):
        raise TypeError(f"expected an optimizer or a function, got {type(optimizer_or_function)}")
    session = Session(config, inductor, named=True)
    plain = in_place(optimizer_or_function, tuple(carries))
    function = compile_function(plain, session)
    function._collage = (plain, options)  # type: ignore[attr-defined]
    return function


def report(step_or_optimizer: Callable[..., Any] | Optimizer) -> Report:
    """Say which engine served each carried state of a step, how often, and with what verdict.

    Args:
        step_or_optimizer: what `collage_fx.compile` returned, or an optimizer whose `step` it is.

    Raises:
        CollageError: it was not made by `collage_fx.compile`.
    """
    return report_of(step_or_optimizer)


def residuals(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the residual components of tensor, themselves, not copies; () if it has none.

    Each has the shape and device of tensor, and the dtype that its storage says: that of tensor
    for `mcf2`, whose value is the sum of both. A residual whose tensor was written since from
    outside does not count; the next step clears it.
    """
    residual = _present(tensor)
    components = () if residual is None else residual.components
    return tuple(sharded_like(c, tensor) for c in components)


def value(tensor: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return the value of the whole expansion, tensor plus residuals, in dtype.

    Shape and device are those of tensor. In float64 it is exact, for `mcf2` and `mcf3` unless the
    components are more than 2^53 apart. A tensor without residuals is converted.
    """
    residual = _present(tensor)
    if residual is None:
        return tensor.detach().to(dtype)
    return sharded_like(residual.whole(shard_of(tensor)).to(dtype), tensor)


def draws(tensor: Tensor) -> int:
    """Return how often the residual of tensor was rounded by chance, 0 if it has none."""
    residual = STORE.get(shard_of(tensor))
    return 0 if residual is None else residual.draws


def load_residuals(
    tensor: Tensor, components: Sequence[Tensor], *, draws: int | None = None
) -> None:
    """Give tensor the residual components that were saved with its present value.

    Args:
        tensor: bf16 or fp16, any shape.
        components: what `residuals(tensor)` returned when it was saved, in any storage; the next
            step converts them to its own.
        draws: what `draws(tensor)` returned then, for steps with stochastic rounding: each takes
            another seed, and without it they go on from what the tensor has, or begin anew.

    Raises:
        ResidualError: the components do not fit the tensor.
    """
    name = _name_of(tensor)
    tensor, components = shard_of(tensor), [shard_of(c) for c in components]
    storage = storage_of(tensor, components, name)
    STORE.load(tensor, components, storage=storage, name=name, draws=draws)


def _present(tensor: Tensor) -> Residual | None:
    """Return the residual of tensor if it belongs to its present value."""
    tensor = shard_of(tensor)
    residual = STORE.get(tensor)
    if residual is None or residual.expected_checksum is not None or residual.belongs(tensor):
        return residual
    return None


def _name_of(tensor: Tensor) -> str:
    owner = owners_of(live_optimizers()).get(id(shard_of(tensor)))
    return owner[1].name if owner else f"a tensor of shape {tuple(tensor.shape)}"
