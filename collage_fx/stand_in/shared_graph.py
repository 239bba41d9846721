"""Graphs compiled for one optimizer, and used by others that are alike.

One optimizer for each parameter, stepped as soon as its gradient is there (by a hook in the
backward pass), makes as many steps of the same code. Dynamo, AOTAutograd and the passes would come
to the same graph each time: kernels over classes, which take tensors of any sizes. So a graph that
does nothing but call such kernels over parameters, gradients, states and numbers of groups is bound
to the tensors of each optimizer that is like the first. All that belongs to one optimizer
(residuals, seeds, what its numbers have been) stays its own. An optimizer that has got other
tensors, as by a load, has its graph bound to them as a `RepeatedStep`.
"""

import threading
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from collage_fx.binding.bound_kernels import current_residuals
from collage_fx.binding.read_gradients import ReadGradients
from collage_fx.compilation.residual_binding import Gathered, Locate, Residuals, of_size
from collage_fx.compilation.session import Outcome, Session
from collage_fx.compilation.side_inputs import MOVED, Code, Observed, SideInputs
from collage_fx.hooks.nested_compile import GlobalState
from collage_fx.hooks.symbolic_numbers import numbers_if_traced
from collage_fx.optimizer.checkpoints.history import history_of
from collage_fx.optimizer.ownership import params_of
from collage_fx.optimizer.parameter_names import naming
from collage_fx.record.dispatch_modes import off_stack
from collage_fx.record.steps import Steps
from collage_fx.runtime import logs, progress
from collage_fx.runtime.expansion.stochastic import Seeds
from collage_fx.runtime.residuals.memory import overlapping
from collage_fx.runtime.residuals.residual import Residual, clear_stale, fit
from collage_fx.runtime.residuals.store import STORE
from collage_fx.segments.segment_graph import number_tensor
from collage_fx.stand_in.alike import residuals_of, shares, signature, starts_of
from collage_fx.stand_in.group_numbers import numbers_taken
from collage_fx.stand_in.members import GRAD, Member, Members, members_of
from collage_fx.stand_in.repeated_step import (
    ByKernels,
    RepeatedStep,
    contents_of,
)
from collage_fx.stand_in.stand_ins import StandIns


class Place(NamedTuple):
    """Place of a tensor among those of an optimizer."""

    param: int
    """The number of its parameter among those that have a gradient."""
    at: int
    """Position among the tensors of that parameter; see `Member.tensors`."""


_SHARED = -1
"""Number of a parameter in the places of `Session.shared_numbers`."""


class NotShared(Exception):
    """A graph that other optimizers cannot use; the reason."""


class SharedGraph:
    """A compiled graph without the tensors of the optimizer that it was compiled for."""

    def __init__(
        self,
        optimizer: Optimizer,
        session: Session,
        stand_ins: StandIns,
        observed: Observed,
        residuals: Any,
    ) -> None:
        """Take up what a step of an optimizer has compiled.

        Args:
            optimizer: whose step it was.
            session: has compiled it.
            stand_ins: by which it was done.
            observed: what its graph was given.
            residuals: those that there were before it, see `residuals_of`.

        Raises NotShared.
        """
        code = stand_ins.code
        assert code is not None
        condition, sources = stand_ins.condition(), stand_ins.sources
        taken, self.numbers = numbers_taken(
            optimizer, sources, condition, observed.args, observed.inputs
        )
        members = members_of(optimizer)
        self.signature = signature(optimizer, session, self.numbers, members)
        self.residuals = {residuals, residuals_of(members)}
        """Residuals that there may be: as when it was compiled, or as it leaves them."""
        self.history = dict(history_of(optimizer).numbers)
        with torch.no_grad(), _unrecorded(session):
            self.globals = GlobalState(until_reset=True)
        self.place: dict[int, Place | int] = {number: k for k, number in enumerate(taken)}
        for i, p in enumerate(stand_ins.params):
            tensors = Member(p, optimizer).tensors()
            self.place |= {id(t): Place(i, at) for at, t in enumerate(tensors)}
        of_all = session.shared_numbers()
        self.place |= {id(t): Place(_SHARED, at) for at, t in enumerate(of_all)}
        low = len(observed.residuals.inputs)
        high = observed.inputs[: len(observed.inputs) - low]
        if self.signature is None or any(id(t) not in self.place for t in high):
            raise NotShared("it depends on other things than parameters, gradients and states")
        self.inputs = [self.place[id(t)] for t in high]
        """Place of each input of the kernels, or number; residuals come after them."""
        self._take_up(code, observed)
        counts = any(call.starts for call in self.direct.calls)
        self.starts = starts_of(members) if counts else None
        """Positions of the first elements of the parameters, if kernels count these."""

    def _take_up(self, code: Code, observed: Observed) -> None:
        """Note the kernels of the graph, and their operands."""
        direct, side, count = code.direct, code.side, len(self.inputs)
        if direct is None or side is None or not direct.only_kernels or code.reads:
            raise NotShared("it does more than to call kernels")
        if any(not isinstance(self.inputs[i], int) for i in direct.inputs if i < count):
            raise NotShared("what Inductor has compiled takes a tensor, such as a rate")
        self.direct, self.seeded, self.exact = direct, code.seeded, side.exact
        full = {i for call in direct.calls for i in (*call.operands[0], *call.operands[1])}
        first = len(observed.inputs) + len(code.seeded)
        if full & set(range(first, first + len(direct.memory))):
            raise NotShared("its kernels make tensors of one size")
        written = {i for call in direct.calls for i in call.operands[0]}
        self.written = sorted(i for i in written if i < count)
        residuals = side.residuals
        self.count_written = residuals.count_written
        """Number of the states that it writes; gradients that it reads with residuals follow."""
        if not all(c.gradient for c in residuals.carried[self.count_written :]):
            raise NotShared("it reads states that others write")
        carried = zip(residuals.locate, residuals.carried, strict=True)
        self.carried = [(self._place_of(find(observed.args)), c) for find, c in carried]
        self.storages = [residuals.storage_for(c) for c in residuals.carried]
        self.plain = [self._place_of(find(observed.args)) for find in residuals.others]
        self.plans = residuals.plan
        self.states = [(self._place_of(find(observed.args)), plan) for find, plan in code.states]
        self.high = [self._place_of(find(observed.args)) for find in code.high]
        self.computes_anew = bool(code.anew)
        """True if it may have to be recorded, where whole values have low words."""
        self.place.clear()

    def _place_of(self, tensor: Tensor | None) -> Place:
        found = self.place.get(id(tensor))
        if not isinstance(found, Place):
            raise NotShared("it writes other tensors than parameters and states")
        return found

    def numbers_of(self, optimizer: Optimizer, session: Session) -> dict[str, float | None] | None:
        """Return what would be known of an optimizer's numbers if this were compiled for it.

        None if what is compiled for it may be something else.
        """
        if not self.is_for(optimizer, session, members_of(optimizer)):
            return None
        return numbers_if_traced(optimizer, self.history)

    def is_for(self, optimizer: Optimizer, session: Session, members: Members) -> bool:
        """Return True if it does what would be compiled for an optimizer, no number having changed.

        Args:
            optimizer: any.
            session: compiles its steps.
            members: its parameters.
        """
        known = residuals_of(members) in self.residuals
        return known and self.is_of(optimizer, session, members)

    def is_of(self, optimizer: Optimizer, session: Session, members: Members) -> bool:
        """Return True if all that Dynamo would guard of a step is as it was when it traced one.

        The arguments are those of `is_for`.
        """
        with torch.no_grad(), _unrecorded(session):  # as in a step
            same = self.globals.same_within_modes()
        same = same and (self.starts is None or self.starts == starts_of(members))
        return same and signature(optimizer, session, self.numbers, members) == self.signature

    def repeated(
        self,
        optimizer: Optimizer,
        session: Session,
        members: Members,
        steps: Steps,
    ) -> RepeatedStep | None:
        """Return a step that it has done, bound to the tensors that the optimizer has got since.

        None if there is more to do than to call its kernels, and nothing is done. Residuals that do
        not belong to their tensors are cleared.

        Args:
            optimizer: whose step it is, and which it is for (`is_for`).
            session: has compiled it.
            members: its parameters.
            steps: keeps the record.

        Raises Unrepeatable, or whatever compiling the comparison raises.
        """
        used = [one for group in members for one in group if one[1][GRAD] is not None]
        rows = [tensors for _, tensors in used]
        shared = overlapping([t for row in rows for t in row], by_address=True)
        current = self._current(rows) if not (self.computes_anew or shared) else None
        if current is None:
            return None
        clear_stale(current, naming(session.optimizer))
        for _, residual in current:  # who was lent one was to write it before this step
            residual.lent = ()
        count, changed = self.count_written, session.config.changed
        current, read = current[:count], current[count:]
        bits = STORE.bits_for(current, [c for _, c in self.carried[:count]]) if changed else ()
        gathered = Gathered(current, [], read, bits)
        current_residuals([gathered])
        floats = list(map(number_tensor, self.numbers.read(optimizer.param_groups) or ()))
        of_all = session.shared_numbers()
        full = [*rows, of_all]  # the last, as `_SHARED` says
        high = [floats[x] if isinstance(x, int) else full[x.param][x.at] for x in self.inputs]
        observed = Observed(tuple(floats), gathered, [*high, *gathered.inputs])
        params = [member.whole for member, _ in used]
        contents = contents_of(optimizer, params, current, self.numbers, of_all, read)
        seeds = Seeds(session.config.seed, self.seeded) if self.seeded else None
        runs = ByKernels(self.direct, seeds, observed, contents, list(map(id, floats)))
        logs.LOG.info("%s: done by what was compiled before", session.subject)
        gradients = ReadGradients(read, contents.given[: len(params)])
        return RepeatedStep(runs, self.numbers, [r for _, r in current], gradients, steps)

    def _current(self, rows: Sequence[Sequence[Any]]) -> list[tuple[Tensor, Residual]] | None:
        """Return the states that have residuals, with these, if they are those that it is to have.

        Args:
            rows: the tensors of each parameter that has a gradient.
        """
        tensors = [rows[place.param][place.at] for place, _ in self.carried]
        found = STORE.of(tensors)
        current = [(t, r) for t, r in zip(tensors, found, strict=True) if r is not None]
        strides = [
            (r.stride if r.packed else c.stride()) == t.stride()
            for t, r in current
            for c in r.components
        ]
        whole = len(current) == len(tensors) and all(strides) and fit(current)
        whole = whole and [r.storage for _, r in current] == self.storages
        others = STORE.of([rows[place.param][place.at] for place in (*self.plain, *self.high)])
        return current if whole and not any(others) else None

    def bind(self, optimizer: Optimizer, session: Session, params: list[Tensor]) -> Code:
        """Return the graph for the parameters of an optimizer, those that have a gradient."""
        members = [Member(p, optimizer) for p in params]

        def find(place: Place) -> Locate:
            if place.param == _SHARED:
                return lambda args: session.shared_numbers()[place.at]
            return members[place.param].finder(place.at)

        def tensor(place: Place) -> Tensor:
            found: Tensor = members[place.param].tensors()[place.at]
            return found

        states = [(find(place), of_size(plan, tensor(place))) for place, plan in self.states]
        plans = self.plans | {plan.index: plan for _, plan in states}
        residuals = Residuals(
            session,
            [replace(c) for _, c in self.carried],
            [find(place) for place, _ in self.carried],
            [find(place) for place in self.plain],
            plans,
        )
        side = SideInputs(residuals, None, session.config.seed, self.exact)
        kernels = side.bind(self.direct.bind(self.direct.compiled), self.seeded)
        locate = [x if isinstance(x, int) else find(x) for x in self.inputs]

        def function(*numbers: Tensor) -> tuple[()]:
            given = [numbers[x] if isinstance(x, int) else x(numbers) for x in locate]
            written = [given[i] for i in self.written]
            kernels(given)
            torch.autograd.graph.increment_version([t for t in written if t is not None])
            return ()

        beside = [find for find in locate if not isinstance(find, int)]
        high, direct, seeded = list(map(find, self.high)), self.direct, self.seeded
        return Code(function, side, states, [], False, direct, seeded, beside=beside, high=high)


def _unrecorded(session: Session) -> AbstractContextManager[Any]:
    """Have modes, within, as they are around a step."""
    steps = session.steps()
    assert isinstance(steps, Steps)
    return off_stack(steps.recorder)


class SharedStandIns(StandIns):
    """The parameters of an optimizer whose step was compiled for another one that is like it."""

    def __init__(self, graph: SharedGraph, optimizer: Optimizer, session: Session) -> None:
        """Bind a graph to all parameters of an optimizer that have gradients."""
        params = [[p] for p in params_of(optimizer) if p.grad is not None]
        super().__init__(optimizer, params, session)
        self.graph: SharedGraph = graph
        self.session = session
        self.code = graph.bind(optimizer, session, self.params)
        self.sources = [place.name for place in graph.numbers.places]
        self.condition = lambda: graph.numbers.condition

    def holds(self, optimizer: Optimizer) -> bool:
        """Return True if all is as it was, and as it was for the optimizer that was traced."""
        code = self.code
        members = members_of(optimizer)
        if not super().holds(optimizer) or not self.graph.is_of(optimizer, self.session, members):
            return False
        assert code is not None
        return not (code.drops_residual(()) or code.meets_residual(()))

    @progress.apart
    def step(self) -> None:
        """Do the step by the graph, or note that it has to be recorded."""
        steps, code = self.session.steps(), self.code
        assert isinstance(steps, Steps) and code is not None
        self.session.calls += 1
        found = self.graph.numbers.read(self.few.optimizer.param_groups)
        numbers = tuple(map(number_tensor, found or ()))
        steps.recorder.flush_outside()
        tensors = (*self.params, *self.tensors, *(p.grad for p in self.params), *numbers)
        lies_as_before = code.lies_as_before(numbers, sized=True)
        if not lies_as_before:
            self.session.notes.add(f"recorded: {MOVED}")
        if (
            not (steps.active and steps.compiles)
            or not lies_as_before
            or steps.executors.computes_anew(code, numbers)
            or steps.expands(tensors, writes=True)
        ):
            self.outcome = Outcome.TO_RECORD
            return
        code.conclude(numbers)
        steps.run_graph(code, numbers)
        self.outcome = Outcome.DONE


_GRAPHS: weakref.WeakSet[SharedGraph] = weakref.WeakSet()
"""Graphs that others may use: each goes with the last optimizer that uses it."""
_LOCK = threading.Lock()


def share(
    optimizer: Optimizer, session: Session, stand_ins: StandIns, observed: Observed, residuals: Any
) -> SharedGraph | None:
    """Return the compiled code of a step without its tensors; others may use it if it is pooled.

    None if it is for these tensors only; the arguments are those of `SharedGraph`.
    """
    try:
        graph = SharedGraph(optimizer, session, stand_ins, observed, residuals)
    except NotShared as why:
        logs.LOG.info("%s: compiled for these tensors only: %s", session.subject, why)
        return None
    if stand_ins.pooled:
        with _LOCK:
            _GRAPHS.add(graph)
    return graph


def shared_stand_ins(
    optimizer: Optimizer, session: Session, own: Sequence[SharedGraph]
) -> SharedStandIns | None:
    """Return the way to do an optimizer's step by what was compiled before; None if there is none.

    Args:
        optimizer: whose step it is.
        session: compiles it.
        own: what was compiled for it, the latest last: it has got other states since, as by a load.
    """
    if not shares(session):
        return None
    with _LOCK:
        others = [graph for graph in _GRAPHS if graph not in own]
    for graph in (*reversed(own), *others):
        numbers: dict[str, float | None] | None
        if graph in own:
            numbers = {} if graph.is_for(optimizer, session, members_of(optimizer)) else None
        else:
            numbers = graph.numbers_of(optimizer, session)
        if numbers is None:
            continue
        members = (Member(p, optimizer) for p in params_of(optimizer) if p.grad is not None)
        if overlapping((t for m in members for t in m.tensors()), by_address=True):
            return None
        found = SharedStandIns(graph, optimizer, session)
        history_of(optimizer).numbers.update(numbers)
        logs.LOG.info("%s: done by what was compiled before", session.subject)
        return found
    return None
