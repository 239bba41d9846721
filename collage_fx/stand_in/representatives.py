"""Steps of which Dynamo sees one parameter of each class, the others being known to be alike.

Dynamo takes milliseconds for each tensor that it traces: with a thousand parameters nearly all of
the time to a first step. The optimizers of torch.optim update each parameter of a group by itself
and all in the same way, or they could not hand them to operations on lists (`foreach`). Their step
is traced for a stand-in of the optimizer that has only the first parameter of each class, and the
kernels of the classes run over all. Whether the graph is what that presumes, `represented` in
`passes/dedup/deduplicate.py` finds out; whether the parameters that Dynamo has not seen are still
what they were is checked here, before each step, as its guards would.
"""

import contextlib
import inspect
import itertools
import operator
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, Adamax, AdamW, NAdam, Optimizer
from torch.utils._python_dispatch import _disable_current_modes

from collage_fx.compilation.inductor import uses_cudagraphs
from collage_fx.compilation.layout_guards import guards_of, is_plain
from collage_fx.hooks.optimizer_hooks import is_seen_by_others
from collage_fx.optimizer.fused import unscaled
from collage_fx.optimizer.ownership import STAND_IN, init_states
from collage_fx.passes.codegen.multi_tensor_kernel import least_members
from collage_fx.passes.ir.program import Unlike
from collage_fx.runtime.errors import CollageError
from collage_fx.runtime.kernels.argument_table import check_sizes
from collage_fx.runtime.storage.registry import held_dtypes

ALIKE = frozenset({Adam, Adamax, AdamW, NAdam, SGD})
"""Classes, not those derived from them, whose step treats each parameter of a group by itself."""
ATTEMPTS = 3
"""Steps in a row that may come to nothing, until all parameters are traced."""


class LeftToEngine(CollageError):
    """The eager engine has to do a step, of which nothing is done yet."""


class Representatives:
    """The steps of one optimizer with stand-ins."""

    def __init__(self, optimizer: Callable[[], Optimizer], session: Any) -> None:
        self.optimizer = optimizer
        self.session = session
        self.known: list[Roster] = []
        """The latest last."""
        self.failed = 0 if serves(optimizer(), session) else ATTEMPTS
        self.signature: Any = inspect.signature(type(optimizer()).step) if self.tries else None

    @property
    def tries(self) -> bool:
        """Whether steps are to be tried in this way."""
        return self.failed < ATTEMPTS

    def step(
        self, compiled: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Do a step, with stand-ins if that can be; return what the optimizer's own returns.

        Args:
            compiled: the step, all parameters of which are traced.
            args: its arguments, at most a closure. That is called here: it computes the gradients.
            kwargs: the same by name.
        """
        closure = self.signature.bind(None, *args, **kwargs).arguments.get("closure")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        optimizer = self.optimizer()
        roster = self._roster(optimizer) if not is_seen_by_others(optimizer) else None
        try:
            if roster is not None:
                self._with(roster, optimizer)
                return loss
            self.failed += 1
        except LeftToEngine:  # all of it, so that all parameters are treated alike
            self.failed += 1
            self._plainly(optimizer)
            return loss
        except Unlike as reason:  # and nothing has been done
            self.session.notes.add(f"Dynamo traces every parameter: {reason}")
            self.failed = ATTEMPTS
        compiled()
        return loss

    def _with(self, roster: "Roster", optimizer: Optimizer) -> None:
        """Do a step with these stand-ins.

        Raises Unlike or LeftToEngine, with nothing done, if that cannot be.
        """
        roster.done = False
        self.session.roster = roster
        try:
            with roster.few.of(optimizer), torch.no_grad():
                roster.step()
        finally:
            self.session.roster = None
        self.failed = 0 if roster.done else self.failed + 1
        if not roster.done:  # Dynamo has left it, or parts of it, to the eager engine
            with roster.others.of(optimizer):
                self._plainly(roster.others.optimizer)

    def _plainly(self, optimizer: Optimizer) -> None:
        """Do a step as Python does it, under the eager engine."""
        with torch.no_grad():
            _without_hooks(optimizer)(optimizer)

    def _roster(self, optimizer: Optimizer) -> "Roster | None":
        for roster in reversed(self.known):
            if roster.holds(optimizer):
                return roster
        with torch.inference_mode(False), torch.no_grad(), _disable_current_modes():
            _make_states(optimizer)
            new = Roster.of(optimizer, self.session)
        if new is not None:
            self.known = [*self.known[1 - _KEPT :], new]
        return new


_KEPT = 4
"""Rosters of an optimizer that are remembered, as where gradients are missing by turns."""


class Roster:
    """Which parameters stand for which, as long as nothing of all that changes."""

    def __init__(self, optimizer: Optimizer, classes: list[list[Tensor]], session: Any) -> None:
        """Note what the parameters are now.

        Args:
            optimizer: whose they are.
            classes: parameters that are alike; the first of each stands for the others.
            session: compiles.
        """
        self.classes = [[Member(p, optimizer) for p in one] for one in classes]
        absent = {id(m.param) for one in self.classes for m in one[1:]}
        self.listed = [list(group["params"]) for group in optimizer.param_groups]
        params = list(itertools.chain.from_iterable(self.listed))
        self.params = [p for p in params if p.grad is not None]
        self.without = [p for p in params if p.grad is None]
        members = list(itertools.chain.from_iterable(self.classes))
        self.members = [m.param for m in members]
        self.states = [m.state for m in members]
        self.tensors = list(_values(self.states))
        self.plain = [p for p in self.params if is_plain(p) and is_plain(p.grad)]
        self.guards = guards_of([*self.plain, *self.tensors, *_grads(self.plain)])
        self.few = StandIn(optimizer, lambda p: id(p) not in absent and p.grad is not None)
        self.others = StandIn(optimizer, lambda p: id(p) in absent)
        step = _copy_of_step(optimizer)
        self.name = step.__name__
        self.step = torch.compile(MethodType(step, self.few.optimizer), backend=session)
        self.done = False
        """Whether the step has updated all parameters."""

    @classmethod
    def of(cls, optimizer: Optimizer, session: Any) -> "Roster | None":
        """Return the roster of an optimizer's parameters; None where none stands for others.

        Raises CollageError if a parameter has a gradient or a state of another size.
        """
        classes: dict[Hashable, dict[Hashable, list[Tensor]]] = {}
        tensors: list[Any] = []
        held = held_dtypes(session.config.storage)
        for g, group in enumerate(optimizer.param_groups):
            for p in (p for p in group["params"] if p.grad is not None):
                member = Member(p, optimizer)
                member.check()
                kind = member.kind(held)
                if kind is not None:
                    layout = tuple(n == 1 for n in p.shape)
                    classes.setdefault((g, kind), {}).setdefault(layout, []).append(p)
                tensors += member.tensors()
        least = least_members(session.config.settings)
        large = [one.values() for one in classes.values() if sum(map(len, one.values())) >= least]
        found = [alike for one in large for alike in one if len(alike) > 1]
        return None if not found or _meet(tensors) else cls(optimizer, found, session)

    def holds(self, optimizer: Optimizer) -> bool:
        """Tell whether all parameters, gradients and states are as they were."""
        groups = optimizer.param_groups
        if len(groups) != len(self.listed) or any(p.grad is not None for p in self.without):
            return False
        if not all(_same(g["params"], one) for g, one in zip(groups, self.listed, strict=True)):
            return False
        if any(p.grad is None for p in self.params):
            return False
        if not _same([optimizer.state.get(p, _NONE) for p in self.members], self.states):
            return False
        if not _same(list(_values(self.states)), self.tensors) or not self.few.shares(optimizer):
            return False
        return bool(self.guards.check(*self.plain, *self.tensors, *_grads(self.plain)))


class Member:
    """A parameter with its gradient and its states."""

    def __init__(self, param: Tensor, optimizer: Optimizer) -> None:
        self.param = param
        self.state: dict[str, Any] = optimizer.state.get(param, _NONE)

    def tensors(self) -> list[Any]:
        """Return them, in an order that members of a class have in common."""
        return [self.param, self.param.grad, *self.state.values()]

    def check(self) -> None:
        """Raise CollageError if the gradient or a state has not as many elements."""
        full = (t for t in self.tensors() if isinstance(t, Tensor) and t.dim())
        check_sizes([t.numel()] for t in full)

    def kind(self, held: Collection[torch.dtype]) -> Hashable | None:
        """Return in what members of a class agree, but for sizes; None for what is in no class.

        Args:
            held: the dtypes of states that may be compensated; others need no class.
        """
        p = self.param
        values = self.tensors()
        if not all(map(is_plain, values)):
            return None
        if not p.dim() or not p.numel() or p.is_complex():
            return None
        if not any(t.dtype in held and t.dim() for t in (p, *self.state.values())):
            return None
        if not (p.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(p)):
            return None
        for t in values:
            if t.dim() and (t.shape != p.shape or t.stride() != p.stride()):
                return None
            if t.device != p.device:
                return None
        facts = ((type(t), t.dtype, t.dim() > 0, t.requires_grad) for t in values)
        return p.device, *facts, *self.state

    def finder(self, at: int) -> Callable[[Any], Tensor | None]:
        """Return how to find one of its tensors, whatever the arguments of a graph."""
        reference = weakref.ref(self.tensors()[at] if at != GRAD else self.param)
        if at != GRAD:
            return lambda args: reference()
        return lambda args: None if (p := reference()) is None else p.grad


GRAD = 1
"""Where a member has its gradient."""
_NONE: dict[str, Any] = {}


def serves(optimizer: Optimizer, session: Any) -> bool:
    """Tell whether the steps of an optimizer may be done with stand-ins."""
    settings = session.config.settings
    if not settings.multi_tensor or uses_cudagraphs(session.inductor.get("triton.cudagraphs")):
        return False
    if type(optimizer) not in ALIKE or "_init_group" in vars(optimizer):
        return False
    if optimizer.defaults.get("differentiable"):
        return False
    *around, step = _layers(optimizer)
    if not all(f.__globals__["__name__"].startswith("torch.") for f in around):
        return False  # somebody has put a function of their own around the step
    return bool(step.__globals__["__name__"].startswith("torch.optim."))


def _layers(optimizer: Optimizer) -> Iterator[Any]:
    """Yield the step of an optimizer's class, with what PyTorch puts around it."""
    function: Any = type(optimizer).step
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)


def _without_hooks(optimizer: Optimizer) -> Callable[..., Any]:
    """Return the step of an optimizer's class as it is written."""
    *_, step = _layers(optimizer)
    return unscaled(step, optimizer)


def _copy_of_step(optimizer: Optimizer) -> FunctionType:
    """Return the step of an optimizer's class, without hooks, as a function of its own.

    Dynamo keeps what it has compiled and seen by the function: a size that differs from what it has
    seen under the same name would become a symbol.
    """
    step: Any = _without_hooks(optimizer)
    code = step.__code__.replace(co_name=f"{step.__name__}_{next(_COPIES)}")
    copy = FunctionType(code, step.__globals__, code.co_name, step.__defaults__, step.__closure__)
    copy.__kwdefaults__ = step.__kwdefaults__
    return copy


_COPIES = itertools.count()


def _make_states(optimizer: Optimizer) -> None:
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


class StandIn:
    """An optimizer that has some of another's parameters, and shares their states."""

    def __init__(self, optimizer: Optimizer, wanted: Callable[[Tensor], bool]) -> None:
        few: Optimizer = object.__new__(type(optimizer))
        few.__dict__[STAND_IN] = True
        few.param_groups = [
            {"params": [p for p in group["params"] if wanted(p)]}
            for group in optimizer.param_groups
        ]
        few.state = defaultdict(dict)
        params = itertools.chain.from_iterable(group["params"] for group in few.param_groups)
        few.state.update((p, optimizer.state[p]) for p in params if p in optimizer.state)
        self.optimizer = few

    @contextlib.contextmanager
    def of(self, optimizer: Optimizer) -> Iterator[None]:
        """Within, it has what else the optimizer has, its rates and so on, and gives it back."""
        few = self.optimizer
        own = {k: vars(few)[k] for k in (STAND_IN, "param_groups", "state")}
        few.__dict__.update({k: v for k, v in vars(optimizer).items() if k not in (*own, "step")})
        groups = list(zip(few.param_groups, optimizer.param_groups, strict=True))
        for mine, group in groups:
            params = mine["params"]
            mine.clear()
            mine.update({**group, "params": params})
        try:
            yield
        finally:
            for mine, group in groups:
                group.update((k, v) for k, v in mine.items() if k != "params")
                params = mine["params"]
                mine.clear()  # what the user replaces is let go of
                mine["params"] = params
            for p, state in few.state.items():
                optimizer.state.setdefault(p, state)
            few.__dict__.clear()
            few.__dict__.update(own)

    def shares(self, optimizer: Optimizer) -> bool:
        """Tell whether the states of its parameters are still the optimizer's."""
        mine, its = self.optimizer.state, optimizer.state
        params = itertools.chain.from_iterable(g["params"] for g in self.optimizer.param_groups)
        return all(mine.get(p) is its.get(p) for p in params)


def _same(found: list[Any], expected: list[Any]) -> bool:
    """Tell whether two lists have the same objects."""
    return len(found) == len(expected) and all(map(operator.is_, found, expected))


def _values(states: Iterable[dict[str, Any]]) -> Iterable[Any]:
    return itertools.chain.from_iterable(map(dict.values, states))


def _grads(params: Iterable[Tensor]) -> list[Tensor]:
    return [p.grad for p in params]  # type: ignore[misc]  # none of them is None


def _meet(tensors: list[Any]) -> bool:
    """Tell whether any two of these may have memory in common."""
    strided = [t for t in tensors if isinstance(t, Tensor) and t.layout is torch.strided]
    spans = sorted(
        (start, start + extent)
        for t in strided
        if t.numel() and (start := t.data_ptr()) and (extent := _extent(t))
    )
    return any(end > start for (_, end), (start, _) in itertools.pairwise(spans))


def _extent(t: Tensor) -> int:
    """Return how many bytes there are from the first element to the end of the last."""
    steps = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    return (steps + 1) * t.element_size()
