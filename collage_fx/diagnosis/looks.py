"""Looks at steps of an optimizer: samples of its tensors before and after, and in float64.

A copy of the optimizer that has only the samples takes the step again, once in its own dtypes and
once in float64. Where the first makes of a sample what the step made of the tensor, and half of the
samples become what they become among all, the second tells the exact updates; so it is for
optimizers that treat elements alike. Of the others (norms, matrices, factored averages) the moves
are fitted, as `runtime.residuals.lost_share` does.
"""

import math
import time
import types
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from collage_fx.diagnosis.tally import Change, Tally, add
from collage_fx.hooks.optimizer_hooks import hooks_of
from collage_fx.optimizer.ownership import (
    PARAM,
    Owned,
    all_tensors_of,
    owned_tensors,
    params_of,
)
from collage_fx.passes.ir.program import LOW_PRECISION
from collage_fx.runtime.kernels.triton_launch import is_capturing
from collage_fx.runtime.residuals.dtensor import shard_of
from collage_fx.runtime.residuals.lost_share import elements
from collage_fx.runtime.residuals.residual import version
from collage_fx.step.optimizer_clone import clone_of, rehearsal
from collage_fx.step.subject import step_made_here

FIRST = 4
"""So many steps are looked at one after the other."""
GROWTH = 1.5
"""From then on a step is looked at when so many times as many steps were taken."""
SHARE = 0.02
"""Of the time of a run of a thousand steps and more, the most that looks take after the first."""
ELEMENTS = 1024
"""Elements of a tensor in its sample, at most."""
MEMORY = 64 * 2**20
"""Bytes that a look may take, or a hundredth of those of parameters and states if that is more."""
_BYTES = 200
"""Bytes that a look takes for each element of the sample of a parameter."""
ALIKE = 0.98
"""The share of a sample that the copy must have made as the step did."""

Place = tuple[int, int, str]


@dataclass
class _Begun:
    """A step that is being looked at."""

    owned: dict[Place, Owned]
    before: dict[Place, Tensor]
    copy: Optimizer | None
    late: bool
    """Whether a closure computes the gradients within the step."""


class Looker:
    """Looks at the steps of one optimizer."""

    def __init__(self, optimizer: Optimizer, names: Callable[[Optimizer], dict[str, str]]) -> None:
        """Begin to look.

        Args:
            optimizer: whose steps they are; it is not kept alive.
            names: returns the names of its parameters by their positions.
        """
        self._names_of = names
        self.optimizer = weakref.ref(optimizer)
        self.subject = type(optimizer).__name__
        self.started, self.spent = time.perf_counter(), 0.0
        self.steps = self.looks = 0
        self.next = 1
        """The next step that is looked at."""
        self.tallies: dict[Place, Tally] = {}
        self.names: dict[str, str] = {}
        self.problem = ""
        """Why the last look failed."""
        self.fitted = ""
        """Why exact updates are not known."""
        self.params: dict[torch.dtype, int] = {}
        """The dtypes of the parameters, and how many there are of each."""
        self.versions = {id(p): (weakref.ref(p), version(p)) for p in params_of(optimizer)}
        self._within = False
        self._begun: _Begun | None = None
        self._looked = 0
        """The last step that was looked at."""
        self._size = 0

    def stepped_unseen(self) -> bool:
        """Tell whether the optimizer has states or has written parameters, and no step was seen."""
        optimizer = self.optimizer()
        now = ((ref(), number) for ref, number in self.versions.values())
        written = any(p is not None and version(p) != n for p, n in now)
        return not self.steps and (written or bool(optimizer is not None and optimizer.state))

    @property
    def compensated(self) -> bool:
        """Whether collage_fx does the steps."""
        optimizer = self.optimizer()
        return optimizer is not None and step_made_here(optimizer, "_collage") is not None

    def why_nothing(self) -> str:
        """Return why no step was looked at; empty if one was."""
        if self.looks or self.compensated:
            return ""
        if self.problem:
            return f"The steps of {self.subject} cannot be looked at: {self.problem}"
        if self.stepped_unseen():
            return (
                f"torch.compile runs the steps of {self.subject}, where nothing can look: run it "
                "once with TORCH_COMPILE_DISABLE=1 in the environment."
            )
        return f"No step of {self.subject} was seen."

    def before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Look before a step, if it is due."""
        self.steps += not self._within
        self._within = True
        # As if all steps took as long as those so far: the first of a thousand may take more.
        time_of_run = (time.perf_counter() - self.started) * max(1000 / self.steps, 1)
        busy = self.looks >= FIRST and self.spent > SHARE * time_of_run
        if self.steps >= self.next and not busy and not is_capturing():
            self.next = self.steps + 1
            if self.looks >= FIRST - 1:
                self.next = max(self.next, math.ceil(self.steps * GROWTH))
            self._timed(self._begin, args, kwargs)

    def after(self) -> None:
        """Look after a step, if it was looked at before."""
        self._within = False
        if self._begun is not None:
            self._timed(self._end)

    def _timed(self, look: Callable[..., None], *args: Any) -> None:
        """Look; nothing that fails there ends the run."""
        began = time.perf_counter()
        try:
            with torch.no_grad():
                look(*args)
        except Exception as error:
            self._begun, self.problem = None, f"{type(error).__name__}: {error}"
        self.spent += time.perf_counter() - began

    def _begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._begun = None
        optimizer = self.optimizer()
        if optimizer is None or self.compensated:
            return
        every = list(owned_tensors(optimizer))
        if not self._size:
            self._prepare(optimizer, every)
        owned = {o.place: o for o in every if _is_plain(o.tensor)}
        if not any(o.tensor.dtype in LOW_PRECISION for o in owned.values()):
            self.looks += 1
            return
        given = [a for a in (*args, *kwargs.values()) if a is not None and a is not optimizer]
        self.fitted = self._refused(optimizer, given)
        copy = None if self.fitted else self._copy(optimizer)
        before = {at: self.sample(o.tensor) for at, o in owned.items()}
        self._begun = _Begun(owned, before, copy, bool(given))

    def _prepare(self, optimizer: Optimizer, every: Iterable[Owned]) -> None:
        """Choose how large samples are; find the names while the model is there."""
        tensors = [o.tensor for o in every]
        params = [shard_of(p) for p in params_of(optimizer)]
        most = max(MEMORY, sum(t.nbytes for t in tensors) // 100)
        self._size = max(min(ELEMENTS, most // (_BYTES * max(len(params), 1))), 1)
        self.names = self._names_of(optimizer)
        for p in params:
            self.params[p.dtype] = self.params.get(p.dtype, 0) + 1

    def _refused(self, optimizer: Optimizer, given: list[Any]) -> str:
        """Return why a copy cannot take the step; empty if it can be tried."""
        if len(given) > 1 or not all(map(callable, given)):
            return "its steps take arguments"
        if hooks_of(optimizer):
            return "its steps have hooks, which would run twice"
        kept = (o.tensor for o in all_tensors_of(optimizer) if o.param < 0)
        if any(t.numel() > ELEMENTS for t in kept):
            return "it keeps tensors beside the states of its parameters"
        return ""

    def _copy(self, optimizer: Optimizer) -> Optimizer | None:
        try:
            return clone_of(optimizer, self.sample, residuals=False)
        except Exception as error:
            self.fitted = f"it cannot be copied ({type(error).__name__}: {error})"
            return None

    def sample(self, tensor: Tensor) -> Tensor:
        """Return elements of a tensor, or all in its shape where these are no more.

        Of the shard of this process where the tensor is sharded.
        """
        shard = shard_of(tensor).detach()
        if shard.numel() <= self._size:
            return shard.clone()
        return elements(shard, self._size)

    def _half(self, sample: Tensor) -> Tensor:
        """Return the first half of a sample, in float64; all of a tensor that was taken whole."""
        wide = _wide(sample)
        return wide[: self._size // 2].clone() if sample.shape == (self._size,) else wide

    def _end(self) -> None:
        begun, self._begun = self._begun, None
        optimizer = self.optimizer()
        if begun is None or optimizer is None:
            return
        after = {o.place: o for o in owned_tensors(optimizer)}
        after = {at: o for at, o in after.items() if begun.owned.get(at) is not None}
        same = {at: o for at, o in after.items() if o.tensor.shape == begun.owned[at].tensor.shape}
        if all(p.grad is None for p in params_of(optimizer)) or _is_skipped(optimizer):
            return
        self.looks += 1
        again, exact = self._again(optimizer, begun)
        narrow = {at: o for at, o in same.items() if o.tensor.dtype in LOW_PRECISION}
        now = {at: self.sample(o.tensor) for at, o in narrow.items()}
        alike = _alike([at for at in narrow if at in exact], again, now)
        wide: dict[int, list[Owned]] = {}
        for owned in same.values():
            if owned.key != PARAM and owned.tensor.dtype in (torch.float32, torch.float64):
                wide.setdefault(owned.param, []).append(owned)
        changes: dict[Any, list[Change]] = {}
        for at, owned in narrow.items():
            old, new = begun.before[at], now[at]
            tally = self.tallies.setdefault(at, Tally(owned, old))
            tally.see(new)
            if at in alike:
                kind = owned.tensor.dtype, owned.tensor.device
                changes.setdefault(kind, []).append(Change(tally, old, new, exact[at]))
            elif at[2] == PARAM and (gradient := _gradient(owned)) is not None:
                tally.fit(old, new, self.sample(gradient))
            if at[2] == PARAM and self.looks <= FIRST:
                tally.master = self._master(new, owned, wide.get(at[1], ()))
        for one in changes.values():
            add(one, self.steps - self._looked)
        self._looked = self.steps

    def _master(self, now: Tensor, param: Owned, states: Iterable[Owned]) -> str:
        """Return the key of the wide state that a parameter is a rounding of; empty for none."""
        for state in (s for s in states if s.tensor.shape == param.tensor.shape):
            held = self.sample(state.tensor)
            if torch.equal(held.to(now.dtype), now) and not torch.equal(held, now.to(held.dtype)):
                return state.key
        return ""

    def _again(
        self, optimizer: Optimizer, begun: _Begun
    ) -> tuple[dict[Place, Tensor], dict[Place, Tensor]]:
        """Return what a step makes of the samples, in their dtypes and in float64."""
        copy = begun.copy
        if copy is None:
            return {}, {}
        if begun.late:
            for p, q in zip(params_of(optimizer), params_of(copy), strict=True):
                q.grad = None if p.grad is None else self.sample(p.grad)
        try:
            with rehearsal(optimizer) as drawn:
                found, exact, half = (
                    _stepped(clone_of(copy, convert, residuals=False))
                    for convert in (torch.clone, _wide, self._half)
                )
            if drawn():
                self.fitted = "its steps draw random numbers"
                return {}, {}
            return found, {at: x for at, x in exact.items() if at in half and _begins(x, half[at])}
        except Exception as error:  # of code that wants matrices, or 16 bits
            self.fitted = f"it does not treat elements alike ({type(error).__name__}: {error})"
            return {}, {}


def _wide(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor.clone()


def _begins(exact: Tensor, half: Tensor) -> bool:
    """Tell whether the elements of half a sample become what they become among the others.

    Where updates are lost, a step that does not treat elements alike is not told by its results.
    """
    if exact.shape == half.shape:
        return True
    return torch.allclose(exact[: half.numel()], half, rtol=1e-12, atol=0, equal_nan=True)


def _stepped(copy: Optimizer) -> dict[Place, Tensor]:
    types.MethodType(type(copy).step, copy)()
    return {o.place: o.tensor.detach() for o in owned_tensors(copy)}


def _is_plain(tensor: Tensor) -> bool:
    """Tell whether a tensor has elements that can be looked at."""
    plain = type(tensor) in (Tensor, Parameter) and tensor.layout == torch.strided
    return plain and tensor.is_floating_point() and tensor.numel() > 0 and not tensor.is_meta


def _is_skipped(optimizer: Optimizer) -> bool:
    """Tell whether a fused step has done nothing, since a gradient scaler has found infinities."""
    found = getattr(optimizer, "found_inf", None)
    return isinstance(found, Tensor) and bool(found.any())


def _alike(
    places: Iterable[Place], again: dict[Place, Tensor], now: dict[Place, Tensor]
) -> set[Place]:
    """Return the places where a copy has made of samples what the step has made of tensors."""
    fit = [
        at
        for at in places
        if again[at].numel() == now[at].numel() and again[at].dtype == now[at].dtype
    ]
    if not fit:
        return set()
    device = now[fit[0]].device  # is waited for once
    shares = [_share_equal(again[at], now[at]).to(device) for at in fit]
    return {
        at for at, share in zip(fit, torch.stack(shares).tolist(), strict=True) if share >= ALIKE
    }


def _share_equal(a: Tensor, b: Tensor) -> Tensor:
    a, b = a.reshape(-1).float(), b.reshape(-1).float()
    return ((a == b) | (a.isnan() & b.isnan())).float().mean()


def _gradient(owned: Owned) -> Tensor | None:
    gradient = owned.whole.grad
    return gradient if gradient is not None and _is_plain(shard_of(gradient)) else None
