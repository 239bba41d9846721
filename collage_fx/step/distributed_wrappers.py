"""Optimizers of torch.distributed: they call the one that they hold, and communicate around it."""

import functools
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch.optim import Optimizer

from collage_fx.changes.noted import NotedChanges, begin_noting
from collage_fx.optimizer import plain_steps
from collage_fx.optimizer.checkpoints import state_dicts
from collage_fx.optimizer.ownership import family
from collage_fx.optimizer.served import Report

Step = Callable[..., Any]


def wrapped_optimizers(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizers of which one of torch.distributed calls the step; [] for any other.

    ZeroRedundancyOptimizer has each process update some of the parameters and broadcasts them: what
    there is to compensate is done by the optimizer that it holds. A user's wrapper may have
    arithmetic of its own around that, and is compiled as a whole.
    """
    module = getattr(type(optimizer).step, "__module__", None) or ""  # None: made by exec()
    return family(optimizer)[1:] if module.startswith("torch.distributed.") else []


def compile_wrapper(
    optimizer: Optimizer, held: list[Optimizer], steps: list[Step], *, changed: bool
) -> Step:
    """Return a method bound to the optimizer that takes its step, with compiled ones within.

    Args:
        optimizer: one of torch.distributed.
        held: the optimizers whose step it calls.
        steps: the compiled steps of these.
        changed: whether changes of parameters are noted. Those that other processes send are seen
            by a comparison with a copy.
    """
    state_dicts.attach_around(optimizer, held)
    noted = NotedChanges(optimizer) if changed else None
    if changed:
        begin_noting(optimizer)

    @functools.wraps(type(optimizer).step)
    def step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        plain_steps.called([self])
        copied = noted.in_full(traced=False) if noted is not None else nullcontext()
        with copied, _assigned(held, steps):
            result = type(self).step(self, *args, **kwargs)
        self._opt_called = True  # type: ignore[attr-defined]  # what schedulers look at
        step.grad_norm = getattr(steps[0], "grad_norm", None)  # type: ignore[attr-defined]
        return result

    def report() -> Report:
        found = [one._report() for one in steps]  # type: ignore[attr-defined]
        states = [state for one in found for state in one.states]
        notes = {note for one in found for note in one.notes}
        subject = f"{', '.join(one.subject for one in found)} in {type(optimizer).__name__}"
        return Report(subject, states, sorted(notes), max(one.taken for one in found))

    step._collage = steps[0]._collage  # type: ignore[attr-defined]
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    step._report = report  # type: ignore[attr-defined]
    return types.MethodType(step, optimizer)


@contextmanager
def _assigned(optimizers: list[Optimizer], steps: list[Step]) -> Iterator[None]:
    """Assign the compiled step to each optimizer, within this context."""
    before = [vars(one).get("step") for one in optimizers]
    for one, step in zip(optimizers, steps, strict=True):
        vars(one)["step"] = step
    try:
        yield
    finally:
        for one, old in zip(optimizers, before, strict=True):
            vars(one)["step"] = old
            if old is None:
                del vars(one)["step"]
