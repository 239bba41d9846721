"""`verify=n`: the first steps, done again eagerly and in float64, and compared.

What stock torch.compile gets wrong of an optimizer, a compensated graph gets wrong too. So a copy
of the optimizer takes the same step as Python does it, in float64, and each state is held against
what the compiled step stored. A graph that fails is named, its step undone, and the recorder
does the steps from then on: what Dynamo made of the code may be what is wrong.

The code of a checked step runs twice; what it does to objects that the optimizer refers to and that
are no part of it is done twice.

Off by default: the copy takes 8 bytes for each element of parameters, gradients and states, and
what can be undone takes their bytes once more.
"""

import math
import types
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from collage_fx.dynamo.backend import Backend
from collage_fx.gradients.scaled_step import multiply
from collage_fx.hooks.optimizer_hooks import has_foreign_hooks
from collage_fx.optimizer.fused import AMP
from collage_fx.optimizer.ownership import all_tensors_of, family, params_of, tensors_in
from collage_fx.record.service import TRIED
from collage_fx.record.steps import Steps
from collage_fx.runtime.errors import listed
from collage_fx.runtime.residuals.dtensor import shard_of, sharded_like
from collage_fx.runtime.residuals.store import STORE
from collage_fx.runtime.storage.registry import kept
from collage_fx.step.optimizer_clone import clone_of, rehearsal

Values = dict[str, Tensor]
"""Name of a state -> its value, in float64."""


class StepCheck:
    """The check of the first steps of one optimizer."""

    def __init__(self, steps: Steps, session: Backend, count: int) -> None:
        self.steps = steps
        self.session = session
        self.left = count
        """Number of steps that are still to be checked."""
        self.last = count + TRIED
        """The step after which none is: the first may run without a graph."""
        self.done = 0
        self.right: list[str] = []
        """The steps that were found right."""
        self.worst: tuple[float, str, float, float] = (-1.0, "", 0.0, 0.0)
        """Greatest error of a state in these steps: error by bound, state, error, and bound."""

    @property
    def wanted(self) -> bool:
        """True if the next step is to be checked."""
        return self.left > 0 and self.done < self.last

    def step(self, optimizer: Optimizer, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Do a step, checked if that can be; return what it returns.

        Args:
            optimizer: whose step it is.
            run: does it.
            args: its arguments.
            kwargs: the same by name.
        """
        self.done += 1
        exact = exact_step(optimizer, args, kwargs)
        if isinstance(exact, str):
            self._note(exact)
            return run(*args, **kwargs)
        before, snapshot = values_of(optimizer), Snapshot(optimizer)
        calls = self.session.calls
        result = run(*args, **kwargs)
        traced = self.session.calls > calls
        found = values_of(optimizer)
        self.left -= traced
        errors = self._errors(optimizer, before, found, exact)
        wrong = _beyond(errors)
        if traced and not wrong:
            self._note_right(errors)
        if not wrong or not traced:
            return result
        snapshot.restore()
        interpreted, self.steps.interpreted = self.steps.interpreted, True
        result = run(*args, **kwargs)
        # The errors without a compiler: of a step that is not stable they are as large.
        again = values_of(optimizer)
        uncompiled = self._errors(optimizer, before, again, exact)
        alike = _beyond(self._errors(optimizer, before, found, again)).keys() & wrong.keys()
        if all(wrong[name][0] <= 4 * uncompiled[name][0] for name in alike):
            self.steps.interpreted = interpreted
            self._note(
                f"step {self.done} is not as in float64, nor is it without a compiler: what "
                f"it does to {listed(wrong, 3)} depends on their dtype, or is not stable"
            )
            return result
        self.left = 0
        error, bound = max(wrong.values())
        self.steps.warn(
            "verify",
            f"verify: in step {self.done} of {self.steps.subject} the compiled graph that "
            f"updates {listed(wrong, 3)} is {error:.2g} of its update off from the same step done "
            f"by Python in float64, where {bound:.2g} is allowed. Nothing is lost: the step was "
            "undone, and it is done operation by operation from now on",
        )
        return result

    def _note_right(self, errors: dict[str, tuple[float, float]]) -> None:
        """Note a step that is right; have a report say so when all have been checked."""
        self.right.append(str(self.done))
        found = ((e / bound, name, e, bound) for name, (e, bound) in errors.items() if e)
        self.worst = max([self.worst, *found])
        if self.left:
            return
        which = f"steps {listed(self.right, 8)} are" if self.right[1:] else f"step {self.done} is"
        ratio, name, error, bound = self.worst
        most = f"{name} was most off, by {error:.1g} of its update, where {bound:.1g} is allowed"
        self._note(f"{which} as in float64; {most if ratio > 0 else 'no state was off'}")

    def _note(self, text: str) -> None:
        """Have a report say what was found, or why no more steps are checked."""
        self.left = 0
        self.session.notes.add(f"verify: {text}")

    def _errors(
        self, optimizer: Optimizer, before: Values, found: Values, exact: Values
    ) -> dict[str, tuple[float, float]]:
        """Return the error of each state and its bound: norms, in units of that of the update."""
        errors = {}
        for owned in all_tensors_of(optimizer):
            name, tensor = owned.name, owned.tensor
            if name not in found or name not in exact:
                continue
            value, target = found[name], exact[name]
            update = target - before.get(name, torch.zeros_like(target))
            size = float(update[update.isfinite()].norm())
            residual = STORE.get(tensor)
            bound = self._share(tensor) * size
            bound += (
                2
                * kept(tensor.dtype, residual.storage if residual is not None else "")
                * (float(target[target.isfinite()].norm()))
            )
            bound += torch.finfo(tensor.dtype).smallest_normal * math.sqrt(tensor.numel())
            same = torch.equal(value.isfinite(), target.isfinite())
            gap = (value - target)[value.isfinite() & target.isfinite()]
            error = float(gap.norm()) if same else math.inf
            unit = size or 1.0
            errors[name] = error / unit, bound / unit
        return errors

    def _share(self, tensor: Tensor) -> float:
        """Return by what share of an update rounding within the step may change it.

        In eft what is not on a carried path is computed in the state's own dtype, with a handful of
        roundings one after the other.
        """
        wide = self.session.config.arithmetic == "wide" or tensor.dtype.itemsize > 2
        return 2.0**-6 if wide else min(0.25, 16 * torch.finfo(tensor.dtype).eps)


def _beyond(errors: dict[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
    """Return, by name, the states whose error is above its bound, with both."""
    return {name: (error, bound) for name, (error, bound) in errors.items() if error > bound}


def exact_step(
    optimizer: Optimizer, args: Any, kwargs: Any, loss: Callable[[], Any] | None = None
) -> Values | str:
    """Return the values after the step of a copy in float64, or why these are not to be known.

    The copy begins with the values that the states have with their residuals.

    Args:
        optimizer: whose step it is.
        args: the arguments of the step; with any it is not known.
        kwargs: the same by name.
        loss: the closure that the step is given, if it may be called twice.
    """
    if any(a is not None for a in (*args, *kwargs.values())):  # accelerate gives closure=None
        return "steps with arguments, such as a closure, are not compared"
    if has_foreign_hooks(optimizer):
        return "steps with hooks are not compared, which would run twice"
    try:
        with rehearsal(optimizer) as drawn:
            twin = clone_of(optimizer, in_float64, residuals=False)
            multiply(twin)
            for name in AMP:  # a copy of what a GradScaler has left
                vars(twin).pop(name, None)
            types.MethodType(type(twin).step, twin)(*(() if loss is None else (loss,)))
    except Exception as error:  # whatever code of the user's raises that wants 16 bits
        return f"steps cannot be done in float64: {error}"
    if drawn():
        return "steps that draw random numbers are not compared"
    return {name: t.detach().double() for name, t in _floating(twin)}


def values_of(optimizer: Optimizer) -> Values:
    """Return the value of each floating state of an optimizer, residuals included."""
    return {name: in_float64(t) for name, t in _floating(optimizer)}


def _floating(optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    for owned in all_tensors_of(optimizer):
        if owned.tensor.is_floating_point() and owned.tensor.layout is torch.strided:
            yield owned.name, owned.tensor


def in_float64(tensor: Tensor) -> Tensor:
    """Return the value of a tensor with its residual, in memory of its own."""
    if not tensor.is_floating_point():
        return tensor.clone()
    shard = shard_of(tensor)
    residual = STORE.get(shard)
    if residual is not None and residual.fits(shard):
        return sharded_like(residual.whole(shard), tensor)
    return tensor.detach().to(torch.float64, copy=True)


class Snapshot:
    """Snapshot of an optimizer, to go back to if a step turns out wrong."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.containers: list[tuple[Any, Any]] = []
        self.tensors: dict[int, tuple[Tensor, Tensor]] = {}
        self.grads: list[tuple[Tensor, Tensor | None]] = []
        seen: set[int] = set()
        for one in family(optimizer):
            self._walk(vars(one), seen)
            states = getattr(one, "state", {}).values()
            for _, t in tensors_in([vars(one), dict(enumerate(states))]):
                self._keep(t)
            for p in params_of(one):
                self._keep(p)
                self.grads.append((p, p.grad))
                if p.grad is not None:
                    self._keep(p.grad)
        self.residuals = [
            (t, r.storage, r.name, tuple(c.clone() for c in r.components), r.draws, r.provisional)
            for t, _ in self.tensors.values()
            if (r := STORE.get(t)) is not None
        ]

    def _keep(self, tensor: Tensor) -> None:
        self.tensors.setdefault(id(tensor), (tensor, tensor.detach().clone()))

    def _walk(self, tree: Any, seen: set[int]) -> None:
        """Note the contents of dicts and sequences; a step may put other things there."""
        if id(tree) in seen:
            return
        seen.add(id(tree))
        if isinstance(tree, dict):
            self.containers.append((tree, dict(tree)))
            children = list(tree.values())
        elif isinstance(tree, list | deque):
            self.containers.append((tree, list(tree)))
            children = list(tree)
        else:
            children = list(tree) if isinstance(tree, tuple) else []
        for child in children:
            self._walk(child, seen)

    def restore(self) -> None:
        """Go back."""
        for container, then in self.containers:
            container.clear()
            (container.update if isinstance(container, dict) else container.extend)(then)
        for p, grad in self.grads:
            p.grad = grad
        with torch.no_grad():
            for tensor, then in self.tensors.values():
                tensor.data.copy_(then)
        for tensor, _ in self.tensors.values():
            if STORE.get(tensor) is not None:
                STORE.drop(tensor)
        for tensor, storage, name, components, draws, provisional in self.residuals:
            residual = STORE.adopt(tensor, components, storage, name)
            residual.draws, residual.provisional = draws, provisional
