"""Steps of which Dynamo traces one parameter of each class, the others being known to be alike.

Dynamo takes milliseconds for each tensor that it traces: with a thousand parameters nearly all of
the time to a first step. The optimizers of torch.optim update each parameter of a group by itself
and all in the same way, or they could not hand them to operations on lists (`foreach`). Their step
is traced for a stand-in of the optimizer that has only the first parameter of each class, and the
kernels of the classes run over all. Whether the graph is what that presumes, `represented` in
`passes/dedup/deduplicate.py` finds out; whether the parameters that Dynamo has not seen are still
what they were is checked here, before each step, as its guards would.
"""

import inspect
from collections.abc import Callable, Hashable
from contextlib import nullcontext
from typing import Any

import torch
from torch.optim import Optimizer

from collage_fx.binding.backoff import Backoff
from collage_fx.compilation.session import Outcome, Session
from collage_fx.compilation.side_inputs import Noted, Observed, is_looked_at, looked_at
from collage_fx.gradients.norm import resolve_gradients
from collage_fx.hooks.optimizer_hooks import has_foreign_hooks
from collage_fx.optimizer.fused import has_fused_groups, traceable
from collage_fx.optimizer.ownership import params_of
from collage_fx.passes.ir.program import Unlike
from collage_fx.record.steps import Steps
from collage_fx.runtime.kernels import left_out
from collage_fx.runtime.residuals.store import STORE
from collage_fx.runtime.torch_private import _disable_current_modes
from collage_fx.stand_in.alike import count_alike, register, residuals_of, shares, withdraw
from collage_fx.stand_in.members import members_of
from collage_fx.stand_in.repeated_step import RepeatedStep
from collage_fx.stand_in.shared_graph import SharedGraph, SharedStandIns, share, shared_stand_ins
from collage_fx.stand_in.stand_ins import StandIns
from collage_fx.stand_in.torch_steps import make_states, of_one_shape, serves, without_hooks

_BOUND = "bound to its tensors: repeated while nothing changes, without its Python"
ATTEMPTS = 3
"""Steps in a row that may come to nothing, until all parameters are traced."""


class StandInSteps:
    """Runner of steps of which Dynamo traces a part, the representatives, for all parameters."""

    def __init__(self, optimizer: Callable[[], Optimizer], session: Session) -> None:
        self.optimizer = optimizer
        self.session = session
        self.known: list[StandIns] = []
        """Representatives that have been traced, the latest last."""
        self.failed = 0 if serves(optimizer(), session) else ATTEMPTS
        self.last: RepeatedStep | None = None
        """The last step, to be done again."""
        self.graph: SharedGraph | None = None
        """Graph without the tensors, to be bound to others."""
        self.observed: tuple[StandIns, Noted] | None = None
        """The arguments of the graph of the last step, and the inputs of its kernels, if noted."""
        self.backoff = Backoff(session, _BOUND, never="repeat" in session.config.without)
        self.graphs: list[SharedGraph] = []
        """Graphs that were compiled for this one, the latest last, and others may use."""
        self.residuals: tuple[tuple[int, int], Hashable] = (-1, -1), None
        """`STORE.counts`, with the residuals that there were then."""
        if self.tries:
            register(optimizer(), session)
        self.signature: Any = inspect.signature(type(optimizer()).step) if self.tries else None

    def begin_anew(self) -> None:
        """Trace representatives anew: others than before are alike, as storages have changed."""
        self.known, self.last, self.graph, self.graphs = [], None, None, []

    @property
    def tries(self) -> bool:
        """True if steps are to be tried in this way."""
        return self.failed < ATTEMPTS

    def repeat(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, bool, Any]:
        """Do the step again as the last was done, if that can be.

        Args:
            args: its arguments, at most a closure.
            kwargs: the same by name.

        Returns:
            Whether it is done, whether what is left is to be done without the closure, which was
            called, and what that returned.
        """
        if is_looked_at():
            return False, False, None
        if len(args) + len(kwargs) > 1 or kwargs.keys() - {"closure"}:
            self.last = None
        if self.last is None:
            return False, False, None
        optimizer = self.optimizer()
        closure = args[0] if args else kwargs.get("closure")
        called, loss = False, None
        if closure is not None and not has_foreign_hooks(optimizer):
            called = True
            with torch.enable_grad():
                loss = closure()
        if (called or closure is None) and self._again(optimizer):
            self.backoff.held()
            return True, False, loss
        self.last = None
        return False, called, loss

    def _again(self, optimizer: Optimizer) -> bool:
        """Do the last step again, maybe to other tensors; return False if that cannot be."""
        last = self.last
        if last is None or last.run(optimizer):
            return last is not None
        self.last = None
        self.last = self._rebound(optimizer, last.steps)
        return self.last is not None and self.last.run(optimizer)

    def _rebound(self, optimizer: Optimizer, steps: Steps) -> RepeatedStep | None:
        """Return the last step bound to the tensors that the optimizer has now, as from a load.

        None if it is not known to do all that a step is to do.
        """
        graph = self.graph
        if (
            graph is None
            or not steps.compiles
            or left_out.is_open()
            or has_foreign_hooks(optimizer)
        ):
            return None
        steps.check_states()
        resolve_gradients(params_of(optimizer))
        fused = has_fused_groups(optimizer)
        with traceable(optimizer, asks=True) if fused else nullcontext(True) as wanted:
            members = members_of(optimizer)
            known = wanted and graph.is_for(optimizer, self.session, members)
        if not known:
            return None
        last = self.backoff.bind(lambda: graph.repeated(optimizer, self.session, members, steps))
        if last is not None:  # what has other states would keep them alive
            self.known = [one for one in self.known if one.has_states_of(optimizer)]
        return last

    def prepare_repeat(self, steps: Steps, *, wanted: bool) -> None:
        """Take up the step that was just done, if it may be done again in the same way.

        Args:
            steps: the record of the steps.
            wanted: whether the next step may be a repeated one.
        """
        # Whatever comes of it, the gradients are let go of.
        observed, self.observed = self.observed, None
        if observed is None or not wanted or not steps.quiet or self.last is not None:
            return
        self.last = self.backoff.bind(lambda: RepeatedStep.of(self.optimizer(), *observed, steps))
        self.graph = observed[0].graph

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
        stand_ins = self._stand_ins(optimizer) if not has_foreign_hooks(optimizer) else None
        if stand_ins is None:
            self.failed += 1
            compiled()
            return loss
        outcome = self._with(stand_ins, optimizer)
        self.failed = 0 if outcome is Outcome.DONE else self.failed + 1
        if outcome is Outcome.PARTS:
            with stand_ins.others.of(optimizer):
                self._plainly(stand_ins.others.optimizer)
        elif outcome is Outcome.TO_RECORD and stand_ins.unlike is not None:
            self._give_up(stand_ins.unlike)
            if stand_ins.pooled:
                withdraw(optimizer, self.session)
            compiled()
        elif outcome is Outcome.TO_RECORD:  # all of it, so that all parameters are treated alike
            self._plainly(optimizer)
        return loss

    def _with(self, stand_ins: StandIns, optimizer: Optimizer) -> Outcome:
        """Do a step with these stand-ins, if that can be; return what became of it."""
        stand_ins.outcome = Outcome.PARTS
        self.session.stand_ins = stand_ins
        before = stand_ins.code
        repeats = self.backoff.is_due() and before is not None
        repeats = repeats and not left_out.is_open()  # a repeated step does not look there
        noted = Noted()
        keeps = shares(self.session) and not isinstance(stand_ins, SharedStandIns)
        looks = looked_at(noted) if repeats or keeps else nullcontext()
        if keeps and (before is None or self.residuals[0] != STORE.counts):
            self.residuals = STORE.counts, residuals_of(members_of(optimizer))
        try:
            with looks, stand_ins.few.of(optimizer), torch.no_grad():
                stand_ins.step()
        finally:
            self.session.stand_ins = None
            stand_ins.count_versions()
        if stand_ins.outcome is Outcome.DONE and noted.calls:
            if repeats:
                self.observed = stand_ins, noted
            if keeps and stand_ins.code is not before:
                self._keep(optimizer, stand_ins, noted.calls[0])
        return stand_ins.outcome

    def _keep(self, optimizer: Optimizer, stand_ins: StandIns, observed: Observed) -> None:
        """Keep what was compiled for other tensors, as after a load; let those like it use it."""
        _, residuals = self.residuals
        graph = share(optimizer, self.session, stand_ins, observed, residuals)
        if graph is not None:
            stand_ins.graph = graph
            self.graphs = [*self.graphs[1 - _KEPT :], graph]
        elif stand_ins.pooled:
            withdraw(optimizer, self.session)

    def _give_up(self, unlike: Unlike) -> None:
        """Have all parameters traced from now on, in this step too, of which nothing is done."""
        self.session.notes.add(f"Dynamo traces every parameter: {unlike.reason}")
        self.failed = ATTEMPTS
        if (steps := self.session.steps()) is not None:
            steps.waited = False

    def _plainly(self, optimizer: Optimizer) -> None:
        """Do a step as Python does it, to be recorded."""
        with torch.no_grad():
            without_hooks(optimizer, self.session)(optimizer)

    def _stand_ins(self, optimizer: Optimizer) -> StandIns | None:
        for stand_ins in reversed(self.known):
            if stand_ins.holds(optimizer):
                return stand_ins
        with torch.inference_mode(False), torch.no_grad(), _disable_current_modes():
            make_states(optimizer)
        new: StandIns | None = shared_stand_ins(optimizer, self.session, self.graphs)
        if new is None:
            alike = 1 if of_one_shape(optimizer) else count_alike(optimizer, self.session)
            with torch.inference_mode(False), torch.no_grad(), _disable_current_modes():
                new = StandIns.of(optimizer, self.session, alike)
        if new is not None:  # what has other states, as from before a load, would keep them alive
            known = [one for one in self.known if one.has_states_of(optimizer)]
            self.known = [*known[1 - _KEPT :], new]
        return new


_KEPT = 4
"""Sets of stand-ins that are remembered, as where gradients are missing by turns."""
