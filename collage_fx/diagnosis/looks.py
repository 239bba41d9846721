"""Samples of an optimizer's tensors before and after a step, which is done again in float64.

A copy of the optimizer that has only the samples takes the step again, once in its own dtypes and
once in float64. Where the first makes of a sample what the step made of the tensor, and half of the
sample, as a matrix, becomes what it becomes as a part of all, the second tells the exact updates:
so it is for optimizers that treat elements alike. Only the code of torch.optim is run again so,
which has no effects elsewhere. Of other optimizers (a user's own, norms, matrices, factored
averages) the moves are fitted, as `runtime.residuals.lost_share` does.
"""

import copy
import inspect
import math
import sys
import time
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from collage_fx.diagnosis.tally import Change, Tally, note
from collage_fx.optimizer.ownership import PARAM, Owned, groups_of, owned_tensors, params_of
from collage_fx.passes.ir.program import LOW_PRECISION
from collage_fx.runtime.kernels.triton_launch import is_capturing
from collage_fx.runtime.residuals.dtensor import shard_of
from collage_fx.runtime.residuals.lost_share import elements
from collage_fx.step.subject import step_made_here

FIRST = 4
"""Number of first steps that are looked at one after the other."""
GROWTH = 1.5
"""Factor by which the number of steps grows between later looks."""
SHARE = 0.02
"""Largest share of the time that looks take, of a run of a thousand steps and more."""
ELEMENTS = 1024
"""Elements of a tensor in its sample, at most."""
MEMORY = 64 * 2**20
"""Bytes that a look may take, or a hundredth of those of parameters and states if that is more."""
_BYTES = 200
"""Bytes that a look takes for each element of the sample of a parameter."""
ALIKE = 0.98
"""The share of a sample that the copy must have made as the step did."""
_NUMBERS = (int, float, bool, str, complex, type(None))

Place = tuple[int, int, str]


@dataclass
class Clock:
    """Time that looks took, of all optimizers together."""

    started: float | None = None
    """The time at the end of the first step, which may load code."""
    spent: float = 0.0

    def is_short(self, steps: int, looks: int) -> bool:
        """Return True if looks, with one more of their mean length, take more than their share.

        The share is of a thousand steps at least, of the mean length of those since the first.
        """
        elapsed = time.perf_counter() - (self.started or time.perf_counter())
        whole = elapsed * max(1000 / max(steps - 1, 1), 1)
        return self.spent * (1 + 1 / looks) > SHARE * whole


@dataclass
class _Begun:
    """A step that is being looked at."""

    shapes: dict[Place, torch.Size]
    before: dict[Place, Tensor]
    gradients: dict[int, Tensor]
    """Position of a parameter -> the sample of its gradient."""
    copy: Optimizer | None
    late: bool
    """True if a closure computes the gradients within the step."""


class Looker:
    """Observer of one optimizer's steps, some of which it does again on samples."""

    def __init__(
        self,
        optimizer: Optimizer,
        names: Callable[[Optimizer], dict[str, str]],
        clock: Clock | None = None,
    ) -> None:
        """Begin to look.

        Args:
            optimizer: whose steps they are; it is not kept alive.
            names: returns the names of its parameters by their positions.
            clock: of all looks together.
        """
        self._names_of = names
        self.optimizer = weakref.ref(optimizer)
        self.subject = type(optimizer).__name__
        self.clock = clock or Clock()
        self.steps = self.looks = 0
        self.next = 1
        """The next step that is looked at."""
        self.tallies: dict[Place, Tally] = {}
        self.names: dict[str, str] = {}
        self.problem = ""
        """Reason why the last look failed."""
        self.fitted = ""
        """Reason why exact updates are not known."""
        self.params: dict[torch.dtype, int] = {}
        """The dtypes of the parameters, and how many there are of each."""
        self._depth = 0
        """Number of step calls under way: that of a class and that of its base, say."""
        self._begun: _Begun | None = None
        self._size = 0

    @property
    def compensated(self) -> bool:
        """True if collage_fx does the steps; not known of an optimizer that is gone."""
        optimizer = self.optimizer()
        return optimizer is not None and step_made_here(optimizer, "_collage") is not None

    def before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Look before a step, if it is due."""
        if self._depth and not _is_nested(self.optimizer()):
            self._depth = 0  # the step before has raised
        self._depth += 1
        if self._depth > 1:
            return
        self.steps += 1
        busy = self.looks >= FIRST and self.clock.is_short(self.steps, self.looks)
        if self.steps >= self.next and not busy and not is_capturing():
            self.next = self.steps + 1
            if self.looks >= FIRST - 1:
                self.next = max(self.next, math.ceil(self.steps * GROWTH))
            self._timed(self._begin, args, kwargs)

    def after(self) -> None:
        """Look after a step, if it was looked at before."""
        self._depth = max(self._depth - 1, 0)
        if self._begun is not None and not self._depth:
            self._timed(self._end)
        self.clock.started = self.clock.started or time.perf_counter()

    def _timed(self, look: Callable[..., None], *args: Any) -> None:
        """Look; nothing that fails there ends the run."""
        began = time.perf_counter()
        try:
            with torch.no_grad():
                look(*args)
        except Exception as error:
            self._begun, self.problem = None, f"{type(error).__name__}: {error}"
        self.clock.spent += time.perf_counter() - began

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
        gradients = self._gradients(optimizer)
        if not given and not gradients:
            self.problem = "no parameter had a gradient"
            return
        self.fitted = _refused(optimizer, given)
        twin = None if self.fitted else self._copy(optimizer, self.sample)
        before = {at: self.sample(o.tensor) for at, o in owned.items()}
        shapes = {at: o.tensor.shape for at, o in owned.items()}
        self._begun = _Begun(shapes, before, gradients, twin, bool(given))

    def _prepare(self, optimizer: Optimizer, every: Iterable[Owned]) -> None:
        """Choose how large samples are; find the names while the model is there."""
        tensors = [o.tensor for o in every]
        params = [shard_of(p) for p in params_of(optimizer)]
        most = max(MEMORY, sum(t.nbytes for t in tensors) // 100)
        self._size = max(min(ELEMENTS, most // (_BYTES * max(len(params), 1))), 1)
        self.names = self._names_of(optimizer)
        for p in params:
            self.params[p.dtype] = self.params.get(p.dtype, 0) + 1

    def _gradients(self, optimizer: Optimizer) -> dict[int, Tensor]:
        """Return samples of the gradients by the positions of their parameters."""
        grads = ((i, p.grad) for i, p in enumerate(params_of(optimizer)) if p.grad is not None)
        return {i: self.sample(g) for i, g in grads if _is_plain(shard_of(g))}

    def _copy(self, optimizer: Optimizer, convert: Callable[[Tensor], Tensor]) -> Optimizer:
        """Return a copy of an optimizer of torch.optim whose tensors are converted ones."""
        twin: Optimizer = object.__new__(type(optimizer))
        hooks = {name: OrderedDict() for name in vars(optimizer) if name.endswith("_hooks")}  # type: ignore[var-annotated]
        kept = {k: v for k, v in vars(optimizer).items() if k != "step"}
        vars(twin).update(kept | hooks)
        twin.param_groups, twin.state = [], defaultdict(dict)
        for group in groups_of(optimizer):
            params = [self._converted(p, convert) for p in group["params"]]
            rest = {k: _copied(v, torch.clone) for k, v in group.items() if k != "params"}
            twin.param_groups.append({**rest, "params": params})
            for p, q in zip(group["params"], params, strict=True):
                if p in optimizer.state:
                    state = optimizer.state[p].items()
                    twin.state[q] = {k: _copied(v, convert) for k, v in state}
        return twin

    def _converted(self, p: Tensor, convert: Callable[[Tensor], Tensor]) -> Tensor:
        new = convert(p.detach()).detach().requires_grad_(p.requires_grad)
        new.grad = None if p.grad is None else convert(p.grad).detach()
        return new

    def sample(self, tensor: Tensor) -> Tensor:
        """Return elements of a tensor, or all in its shape where these are no more.

        Of the shard of this process where the tensor is sharded.
        """
        shard = shard_of(tensor).detach()
        if shard.numel() <= self._size:
            return shard.clone()
        return elements(shard, self._size)

    def _half(self, sample: Tensor) -> Tensor:
        """Return the first half of a sample as a matrix, in float64; all of what is no sample."""
        wide = _wide(sample)
        sampled, half = sample.shape == (self._size,), self._size // 4 * 2
        return wide[:half].clone().view(2, -1) if sampled and half else wide

    def _end(self) -> None:
        begun, self._begun = self._begun, None
        optimizer = self.optimizer()
        if begun is None or optimizer is None or _is_skipped(optimizer):
            return
        if begun.late:
            begun.gradients = self._gradients(optimizer)
            if not begun.gradients:
                return
        self.looks += 1
        after = {o.place: o for o in owned_tensors(optimizer)}
        same = {at: o for at, o in after.items() if o.tensor.shape == begun.shapes.get(at)}
        again, exact = self._again(begun)
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
            elif at[2] == PARAM and (gradient := begun.gradients.get(at[1])) is not None:
                tally.fit(old, new, gradient)
            if at[2] == PARAM and self.looks <= FIRST:
                tally.master = self._master(new, owned, wide.get(at[1], ()))
        for one in changes.values():
            note(one, self.steps)

    def _master(self, now: Tensor, param: Owned, states: Iterable[Owned]) -> str:
        """Return the key of the wide state that a parameter is a rounding of; empty for none."""
        for state in (s for s in states if s.tensor.shape == param.tensor.shape):
            held = self.sample(state.tensor)
            if torch.equal(held.to(now.dtype), now) and not torch.equal(held, now.to(held.dtype)):
                return state.key
        return ""

    def _again(self, begun: _Begun) -> tuple[dict[Place, Tensor], dict[Place, Tensor]]:
        """Return the samples after a step that is done again, in their dtypes and in float64."""
        twin = begun.copy
        if twin is None:
            return {}, {}
        if begun.late:
            for i, q in enumerate(params_of(twin)):
                q.grad = begun.gradients.get(i)
        try:
            found, exact, half = (
                _stepped(self._copy(twin, convert)) for convert in (torch.clone, _wide, self._half)
            )
        except Exception as error:  # of code that wants matrices, or 16 bits
            self.fitted = f"its steps do not treat elements alike ({type(error).__name__}: {error})"
            return {}, {}
        return found, {at: x for at, x in exact.items() if at in half and _begins(x, half[at])}


def _refused(optimizer: Optimizer, given: list[Any]) -> str:
    """Return the reason why a copy cannot take the step; empty if it can."""
    if len(given) > 1 or not all(map(callable, given)):
        return "its steps take arguments"
    for cls in type(optimizer).__mro__:
        own = (v for k, v in vars(cls).items() if k != "__init__")
        if not f"{cls.__module__}.".startswith("torch.optim.") and any(map(inspect.isroutine, own)):
            return "its steps are not those of torch.optim, and may have effects elsewhere"
        if cls is Optimizer:
            break
    states = (v for state in optimizer.state.values() for v in state.values())
    if not all(isinstance(v, (Tensor, *_NUMBERS)) for v in states):
        return "its states are no tensors"
    return ""


def _copied(value: Any, convert: Callable[[Tensor], Tensor]) -> Any:
    """Return a copy of a value of a group or state; tensors are converted."""
    return convert(value.detach()) if isinstance(value, Tensor) else copy.copy(value)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor.clone()


def _begins(exact: Tensor, half: Tensor) -> bool:
    """Return True if elements become in a matrix of half a sample what they become in the vector.

    Where updates are lost, a step that does not treat elements alike is not told by its results.
    """
    if exact.shape == half.shape:
        return True
    same = exact[: half.numel()], half.reshape(-1)
    return torch.allclose(*same, rtol=1e-12, atol=0, equal_nan=True)


def _stepped(twin: Optimizer) -> dict[Place, Tensor]:
    """Have a copy take a step, without hooks; return its tensors."""
    inspect.unwrap(type(twin).step)(twin)
    return {o.place: o.tensor.detach() for o in owned_tensors(twin)}


def _is_nested(optimizer: Optimizer | None) -> bool:
    """Return True if the step whose hook is running was called by another one of the optimizer."""
    frame, found = sys._getframe(), 0
    while frame is not None:
        code = frame.f_code
        wraps = code.co_name == "wrapper" and code.co_filename.endswith("optim/optimizer.py")
        if wraps and (frame.f_locals.get("args") or (None,))[0] is optimizer:
            found += 1
        frame = frame.f_back  # type: ignore[assignment]
    return found > 1


def _is_plain(tensor: Tensor) -> bool:
    """Return True if a tensor has elements that can be looked at."""
    plain = type(tensor) in (Tensor, Parameter) and tensor.layout == torch.strided
    return plain and tensor.is_floating_point() and tensor.numel() > 0 and not tensor.is_meta


def _is_skipped(optimizer: Optimizer) -> bool:
    """Return True if a fused step has done nothing, as a gradient scaler has found infinities."""
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
