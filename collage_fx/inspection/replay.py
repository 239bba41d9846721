"""The error of plain and of compensated steps, measured against float64 on the same gradients."""

import inspect
import math
import types
import weakref
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.compiler import set_stance
from torch.optim import Optimizer

from collage_fx.config import CollageConfig
from collage_fx.dynamo.backend import Backend
from collage_fx.errors import OptionError, SubjectError
from collage_fx.gradients.clipping import clip
from collage_fx.inspection.gradients import GradientRecorder, Gradients, gradients_of
from collage_fx.inspection.values import value
from collage_fx.optimizer.ownership import owned_tensors, params_of
from collage_fx.step.compiled_step import compile_optimizer
from collage_fx.step.first_steps import in_float64
from collage_fx.step.optimizer_clone import clone_of


class Squares(NamedTuple):
    """Sums over the elements of a state after a step."""

    plain: float
    """Sum of (x - x64)^2, x being what the step without compensation made."""
    compensated: float
    """Sum of (x - x64)^2, x being what the compensated step made, residual and all."""
    exact: float
    """Sum of x64^2."""


@dataclass
class Replay:
    """The errors of each state when the same gradients were given to three copies."""

    steps: int
    source: str
    """Description of the gradients."""
    states: dict[str, list[Squares]] = field(default_factory=dict)
    """Name of a state -> one for each step."""
    failure: str = ""
    """Reason why there is no replay."""

    def errors(self, names: Iterable[str]) -> list[tuple[float, float]]:
        """Return, after each step, the relative error of states together: plain, compensated."""
        rows = [self.states[name] for name in names if name in self.states]
        found = []
        for step in zip(*rows, strict=True):
            exact = math.fsum(s.exact for s in step)
            parts = (math.fsum(s.plain for s in step), math.fsum(s.compensated for s in step))
            plain, compensated = (math.sqrt(p / exact) if exact else 0.0 for p in parts)
            found.append((plain, compensated))
        return found


def replay(
    optimizer: Any, config: CollageConfig, inductor: dict[str, Any], asked: GradientRecorder | int
) -> Replay | None:
    """Give the same gradients to a plain, a compensated and a float64 copy of an optimizer.

    All three begin where the optimizer is now, at its learning rate of now.

    Args:
        optimizer: it stays as it is.
        config: of the compensated copy.
        inductor: settings of torch._inductor.config for it.
        asked: recorded gradients; or how often to take those of now, 0 for no replay.

    Raises:
        OptionError: nothing was recorded, or a negative number.
        SubjectError: no optimizer, or one that the gradients do not fit.
    """
    if asked == 0:
        return None
    if not isinstance(optimizer, Optimizer):
        raise SubjectError("replay= is for optimizers: a function has no gradients of its own")
    steps, source = _steps(optimizer, asked)
    result = Replay(len(steps), source)
    try:
        with torch.random.fork_rng():
            _run(optimizer, config, inductor, steps, result)
    except Exception as error:  # whatever code of the user's raises that wants 16 bits
        result.states.clear()
        result.failure = f"the step cannot be replayed: {type(error).__name__}: {error}"
    return result


def _steps(optimizer: Optimizer, asked: GradientRecorder | int) -> tuple[list[Gradients], str]:
    params = params_of(optimizer)
    if not isinstance(asked, GradientRecorder):
        if asked < 0:
            raise OptionError(
                f"replay={asked}: a number of steps, or what record_gradients returned"
            )
        return [gradients_of(optimizer)] * asked, f"the gradients of now, {asked} times"
    if not len(asked):
        raise OptionError("replay=: no step has been recorded yet")
    fits = all(
        len(one) == len(params)
        and all(g is None or g.shape == p.shape for g, p in zip(one, params, strict=True))
        for one in asked.steps
    )
    if not fits:
        raise SubjectError("replay=: the gradients were recorded of another optimizer")
    return asked.steps, f"the gradients of the last {len(asked)} recorded steps"


def _run(
    optimizer: Optimizer,
    config: CollageConfig,
    inductor: dict[str, Any],
    steps: list[Gradients],
    result: Replay,
) -> None:
    plain = clone_of(optimizer, torch.clone, residuals=False)
    exact = clone_of(optimizer, in_float64, residuals=False)
    better = clone_of(optimizer, torch.clone, residuals=True)
    session = Backend(config, inductor, named=True)
    session.optimizer = weakref.ref(better)
    compiled = compile_optimizer(better, session)
    for gradients in steps:
        for twin, step in ((plain, _own(plain)), (better, compiled), (exact, _own(exact))):
            for p, gradient in zip(params_of(twin), gradients, strict=True):
                p.grad = None if gradient is None else gradient.to(p.dtype, copy=True)
            if twin is not better:
                clip(twin, config)
            with nullcontext() if twin is better else set_stance("force_eager"):
                step(*closure_for(step))
        _note(plain, better, exact, result)


def _own(optimizer: Optimizer) -> Callable[..., Any]:
    return types.MethodType(type(optimizer).step, optimizer)


def closure_for(step: Callable[..., Any]) -> tuple[Any, ...]:
    """Return a closure for a step that needs one; the gradients stay as they are."""
    closure = inspect.signature(step).parameters.get("closure")
    needed = closure is not None and closure.default is inspect.Parameter.empty
    return (lambda: torch.zeros(()),) if needed else ()


def _note(plain: Optimizer, better: Optimizer, exact: Optimizer, result: Replay) -> None:
    """Add a step to the result, of each floating state that all three have."""
    found = [{o.name: o.tensor for o in owned_tensors(one)} for one in (plain, better, exact)]
    for name, target in found[2].items():
        if name in found[0] and name in found[1] and target.is_floating_point() and target.dim():
            ours = value(found[1][name])
            errors = (found[0][name].double() - target, ours - target)
            squares = Squares(*(float(e.square().sum()) for e in (*errors, target)))
            result.states.setdefault(name, []).append(squares)
