"""One step under supervision: which states there are, who wrote them, and what that calls for."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.fx import GraphModule
from torch.utils.weak import WeakIdKeyDictionary

from collage_fx.config import CollageConfig
from collage_fx.eager.engine import Engine
from collage_fx.eager.operands import Write, tensors_of
from collage_fx.eager.verdict import TRIED, Verdicts
from collage_fx.errors import UnsupportedError
from collage_fx.hooks.dynamo_errors import Failures
from collage_fx.optimizer.discovery import FunctionStates, StateStorage
from collage_fx.optimizer.ownership import Owned
from collage_fx.optimizer.served import Served, left_by_level, nothing_compensated
from collage_fx.passes.analysis.affine import Form
from collage_fx.passes.ir.program import StatePlan
from collage_fx.passes.rewrite.expand import WAY_OUT
from collage_fx.runtime.residuals.store import STORE, clear_stale, version, zeros


class Supervisor:
    """Watches the steps of one optimizer or function.

    `discovery` finds the states. A state that is written outside compiled graphs gets a residual by
    the same verdict as in a graph, from the recurrence that its first writes show. At the end of a
    step the version counter of each state is compared with the writes that were accounted for.
    """

    def __init__(
        self,
        config: CollageConfig,
        discovery: FunctionStates,
        warn: Callable[[str], None],
        subject: str,
        *,
        keeps: bool = True,
    ) -> None:
        self.config = config
        self.keeps = keeps
        """Whether the states are mostly those of the step before, and may be kept alive."""
        self.discovery = discovery
        self.warn = warn
        self.failures = Failures(warn)
        self.subject = subject
        self.served: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self.engine = Engine(config, config.seed, self)
        self.states: dict[Any, tuple[Owned, Write]] = {}
        """Place of a state -> its tensor at the beginning of the step."""
        self.verdicts = Verdicts(config, self.served, self.states, self.engine.memory, warn)
        self.storages = StateStorage(config, warn)
        self.by_graph: set[int] = set()
        self.returned: set[int] = set()
        self.sources: dict[Any, GraphModule] = {}
        """What Dynamo handed to the backend, to be compiled anew or run by the eager engine."""
        self.active = False
        self.eager_only = False
        """Whether the steps are not to be compiled any more."""
        self.steps = 0
        self.quiet = False
        """Whether the last step wrote its states in graphs only: then little needs to be done."""
        self.versions: list[int] = []
        """The versions of the states at the beginning of a quiet step."""
        self.by_id: dict[int, Served] = {}
        self.resumed = False
        """Whether the states have just come from a checkpoint: those of them that have no residual
        there were judged before, and a residual for the time being would change their bits."""
        self.without_rule: set[str] = set()
        """Operations that the eager engine did as join - op - split."""

    @contextmanager
    def step(self) -> Iterator[Engine]:
        """Supervise one step."""
        self._begin()
        self.active = True
        try:
            with self.engine:
                yield self.engine
        finally:
            self.active = False
            self._end()

    # The beginning.

    def _begin(self) -> None:
        """Take up the states as they are now; lightly if only graphs wrote them last time."""
        self.steps += 1
        self.by_graph.clear()
        self.returned.clear()
        if self.quiet and not self.discovery.changed():
            self.engine.asleep = True
            self.versions = [version(write.tensor) for _, write in self.states.values()]
        else:
            self.wake()

    def wake(self) -> None:
        """Find the states, their residuals and how far their verdicts are."""
        self.engine.asleep = False
        present = self._low()
        if not self._same(present):
            self.engine.forget()
            self.states.clear()
            self.resumed = any(
                (r := STORE.get(o.tensor)) is not None and r.expected_checksum is not None
                for o in present
            )
            for owned in present:
                self._know(owned)
            self.resumed = False
        # While a verdict is open all are followed: that state may take over the value of another.
        follow = any(not s.compensated and s.judged < TRIED for s in self._present())
        for owned, write in self.states.values():
            write.begin()
            # A parameter that is not followed would seem to keep nothing of itself: see `enters`.
            light = self.config.level == "light" and owned.owner == "param"
            self._refresh(write, follow=follow or light)

    def _present(self) -> Iterator[Served]:
        return (self.served[write.tensor] for _, write in self.states.values())

    def _same(self, present: list[Owned]) -> bool:
        """Tell whether these are the states of the step before, in the same memory."""
        if len(present) != len(self.states):
            return False
        for owned in present:
            state = self.states.get(owned.place)
            if state is None or state[0].tensor is not owned.tensor:
                return False
            if state[1].address != owned.tensor.data_ptr() or not state[1].record.same(
                owned.tensor
            ):
                return False
        return True

    def _refresh(self, write: Write, *, follow: bool = True) -> None:
        """Give a state its residual or, while the verdict is open, one for the time being."""
        tensor, record = write.tensor, write.record
        served, residual = self.served[tensor], STORE.get(tensor)
        record.forms, record.make, record.made = {}, None, None
        if residual is not None:
            residual = STORE.ensure(tensor, write.storage.name, served.name, residual)
            if served.eager:
                clear_stale([(tensor, residual)])
            record.made = residual.components
        elif served.judged < TRIED and tensor.dtype in write.storage.residuals:
            record.make = functools.partial(zeros, tensor, write.storage.name)
        if follow or not served.compensated:
            record.forms = {write: Form(1)}

    def _low(self) -> list[Owned]:
        """Return the states that may be compensated."""
        return self.discovery.find(self.storages.is_compensable, self.warn)

    def _know(self, owned: Owned) -> None:
        tensor = owned.tensor
        served = self.served.get(tensor)
        if served is None:
            served = self.served[tensor] = Served(owned.name, tensor.dtype, tuple(tensor.shape))
            if STORE.get(tensor) is not None:
                served.compensated, served.reason = True, "it has a residual already"
            elif self.resumed:
                served.judged = TRIED
        served.name = owned.name  # a graph may have known it as an argument only
        write = self.engine.know(tensor, self.storages.storage(owned))
        self._refresh(write)
        self.states[owned.place] = owned, write

    def enlist(self) -> None:
        """Take up the states that the step has made since it began."""
        if self.discovery.changed():
            for owned in self.discovery.find_new(self.storages.is_compensable, self.warn):
                if owned.place not in self.states:
                    self._adopt(owned)
                    self.served[owned.tensor].judged = 0  # the step goes on, and may write it

    def not_given(self, tensor: Tensor) -> None:
        """Say so if a function writes a parameter that it was not seen to be given."""
        whole = tensor._base if tensor._is_view() else tensor
        if not self.keeps and whole is not None and whole.is_leaf and whole.requires_grad:
            self.warn(
                f"{self.subject} writes a parameter of shape {tuple(whole.shape)} outside compiled "
                "graphs, and without compensation, since it was not seen to be given it: hand over "
                "the optimizer, the model, or a list or dict of parameters as an argument"
            )

    def _adopt(self, owned: Owned) -> None:
        """Take up a state that the step has made, with the low word that it was made with."""
        made = self.engine.memory.find(owned.tensor)
        self._know(owned)
        if made is not None and made.made is not None:
            _, write = self.states[owned.place]
            hi, lows = self.engine.operands.kept(
                owned.tensor, made.low(owned.tensor), write.storage
            )
            if hi is not owned.tensor:
                owned.tensor.data.copy_(hi)
            write.record.made = lows
            self.verdicts.judge_made(owned, write, made)

    def prepare(self, write: Write) -> None:
        """Before the first write to a state in a step: see that its residual belongs to it."""
        residual = STORE.get(write.tensor)
        if residual is not None:
            clear_stale([(write.tensor, residual)])
            write.record.made = residual.components

    @contextmanager
    def graph(
        self, written: list[tuple[Tensor, StatePlan]], args: tuple[Any, ...]
    ) -> Iterator[Callable[[Any], None]]:
        """Let a compiled graph run that writes these states; give it a function for its results."""
        self._look_for_chain(written, args)
        if not self.engine.asleep:
            self._hand_over(written)
        try:
            with self.engine.pause():
                yield self._results
        finally:
            self._account(written)

    def expands(self, args: tuple[Any, ...]) -> bool:
        """Tell whether one of these is an expansion that the eager engine has made, and no state.

        A graph that runs after it would read the high word of it.
        """
        if self.engine.asleep:
            return False
        records = [self.engine.memory.find(a) for a in args if isinstance(a, Tensor)]
        made = (s for s in records if s is not None and s not in self.engine.writes)
        return any(s.made is not None or s.whole for s in made)

    def _look_for_chain(
        self, written: list[tuple[Tensor, StatePlan]], args: tuple[Any, ...]
    ) -> None:
        """Notice a state that is replaced by what an earlier graph of this step has computed.

        Of that only the high word is known. Where it comes from is not: a parameter that is
        replaced as a whole in a later graph is taken for such a state.
        """
        if not (self.by_graph or self.returned):
            return
        handed = any(id(a) in self.returned for a in args)
        for tensor, plan in written:
            if plan.replaced and (handed or tensor.requires_grad):
                self.chained(plan.name)

    def chained(self, name: str) -> None:
        """Leave the steps to the eager engine from now on, which sees such values whole."""
        self.eager_only = True
        self.warn(
            f"{self.subject} computes the new value of {name} in one compiled graph and stores it "
            "in another, or not in place at all, which drops its low word in this step; the eager "
            "engine does the steps from now on. TORCH_LOGS=graph_breaks shows what cuts the step"
        )

    def _hand_over(self, written: list[tuple[Tensor, StatePlan]]) -> None:
        """Put into the store what the eager engine holds of the states that a graph is to write."""
        for tensor, _ in written:
            write = self._write_of(tensor)
            if write is None or not write.wrote or not write.accounted:
                continue
            served = self.served[tensor]
            wanted = served.compensated or served.judged < TRIED
            if wanted and STORE.get(tensor) is None and write.record.made is not None:
                STORE.adopt(tensor, write.record.made, write.storage.name, served.name)
            if (residual := STORE.get(tensor)) is not None:
                residual.settle(tensor)

    def _results(self, results: Any) -> None:
        """Note what a graph returned: states that are put in the place of others, maybe."""
        tensors = (t for t in tensors_of(results) if t.dtype in self.engine.operands.storages)
        self.returned.update(map(id, tensors))

    def _account(self, written: list[tuple[Tensor, StatePlan]]) -> None:
        for tensor, plan in written:
            write = None if self.engine.asleep else self._write_of(tensor)
            served = self.by_id.get(id(tensor)) or self.served.get(tensor)
            if served is None and write is not None and write.record.same(tensor):
                served = self.served[write.tensor]  # p.detach() in the place of p
            new = served is None
            if served is None:
                served = self.served[tensor] = Served(plan.name, tensor.dtype, plan.shape)
            if id(tensor) not in self.by_graph:
                served.graph += 1
                self.by_graph.add(id(tensor))
            if self.engine.asleep and not new:
                continue
            residual = STORE.get(tensor)
            if not served.compensated or residual is None:
                served.compensated, served.reason = plan.compensated, plan.reason
                served.recurrence = plan.recurrence
            if write is not None:
                write.version, write.wrote = version(tensor), False
                write.record.made = None if residual is None else residual.components

    def _write_of(self, tensor: Tensor) -> Write | None:
        record = self.engine.memory.find(tensor)
        return self.engine.writes.get(record) if record is not None else None

    def _end(self) -> None:
        if self.engine.asleep:
            self.engine.asleep = False
            unaccounted = []
            for (owned, write), before in zip(self.states.values(), self.versions, strict=True):
                if id(write.tensor) not in self.by_graph and version(write.tensor) != before:
                    self.served[write.tensor].unaccounted += 1
                    unaccounted.append(owned.name)
        else:
            unaccounted = self._settle()
        if unaccounted:
            self._warn_unaccounted(unaccounted)
            self.quiet, self.eager_only = False, True
        if (self.steps == TRIED and not self.eager_only) or not self.states:
            self._say_if_nothing_was_needed()
        elif self.steps == 1:  # a graph with other numbers may judge otherwise, and too late
            reasons = {s.name: s.reason for s in self.served.values() if s.graph}
            if left_by_level(reasons, unknown=True):
                self._say_if_nothing_was_needed()
        self.engine.user_rounding.clear()
        if not self.keeps:
            self.quiet = False
            self.engine.forget()
            self.states.clear()
            self.by_id.clear()

    def _settle(self) -> list[str]:
        """Judge and settle what was written; return the names of what nobody accounts for."""
        present = self._low()
        self.verdicts.find_cycles(present)
        made = [owned for owned in present if owned.place not in self.states]
        for owned in present:
            state = self.states.get(owned.place)
            if state is None:
                continue
            if state[0].tensor is not owned.tensor or state[1].address != owned.tensor.data_ptr():
                self._replaced(owned, state[1])
        unaccounted, eager = [], bool(made)
        for owned, write in self.states.values():
            served = self.served[write.tensor]
            eager |= write.eager or write.tensor is not owned.tensor
            if not write.accounted:
                served.unaccounted += 1
                unaccounted.append(owned.name)
            elif write.eager:
                served.eager += 1
                self.verdicts.decide(owned, write, write.record)
            if not served.compensated:
                write.record.made = None
        for owned in made:  # which may take over what was judged just now
            self._adopt(owned)
        self.quiet = not eager and bool(self.by_graph)
        self.by_id = {id(w.tensor): self.served[w.tensor] for _, w in self.states.values()}
        return unaccounted

    def _say_if_nothing_was_needed(self) -> None:
        floating = {o.tensor.dtype for o in self.discovery.all() if o.tensor.is_floating_point()}
        written = [s for s in self.served.values() if s.steps]
        other = floating - set(self.engine.operands.storages)
        reasons = {s.name: s.reason for s in written}
        if (other or written) and not any(s.compensated for s in written):
            self.warn(nothing_compensated(floating, reasons))
        elif left := left_by_level(reasons, unknown=True):
            self.warn(left)

    def _replaced(self, owned: Owned, old: Write) -> None:
        """Go on where a step put another tensor, or other memory, in the place of a state."""
        record = self.engine.memory.find(owned.tensor)
        if record in self.engine.writes and record is not old.record:
            return  # two states changed places
        served = self.served[old.tensor]
        if any(o is not owned and o.tensor is old.tensor for o in self._low()):
            served = replace(served, name=owned.name)  # the old one lives on in another place
        self.served[owned.tensor] = served
        old.version = version(old.tensor)
        if record is None or not (record.forms or record.lows is not None):
            if id(owned.tensor) in self.returned:
                self.chained(owned.name)
            return
        served.eager += 1
        self.verdicts.decide(owned, old, record)

    def _warn_unaccounted(self, names: list[str]) -> None:
        more = f" and {len(names) - 4} more" if names[4:] else ""
        self.warn(
            f"{self.subject} wrote {', '.join(names[:4])}{more} in a way that neither a compiled "
            "graph nor the eager engine saw, so without compensation: with a kernel of its own, or "
            "by putting a new tensor in the place of the old; update it in place by PyTorch's "
            "operations. The eager engine does the steps from now on"
        )

    def missing(self, name: str, states: list[Write]) -> None:
        """Note an operation without a rule; raise UnsupportedError if that was asked for.

        States for which the verdict is open, or is that they need no residual, are no reason.
        """
        self.without_rule.add(name)
        if self.config.on_unsupported != "error" or self.config.wide:
            return
        owners = {write: owned for owned, write in self.states.values()}
        critical = [
            owners[w].name
            for w in states
            if w in owners and (owners[w].owner == "param" or self.served[w.tensor].compensated)
        ]
        if critical or not states:
            where = ", ".join(critical) or "a state that is compensated"
            raise UnsupportedError(
                f"{name} has no rule: on the path of {where}, in {self.subject}, outside compiled "
                f"graphs. {WAY_OUT}"
            )
