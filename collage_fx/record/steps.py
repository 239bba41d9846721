"""Steps of one optimizer or function: compiled by Dynamo, or recorded, and accounts of both."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.fx import GraphModule

from collage_fx.binding.bound_graph import BoundGraph
from collage_fx.changes.noted import NotedChanges
from collage_fx.changes.sharded import ShardedWrites
from collage_fx.compilation.session import Session
from collage_fx.compilation.side_inputs import Code, is_looked_at
from collage_fx.hooks import nested_compile
from collage_fx.hooks.dynamo_settings import Failures
from collage_fx.optimizer.checkpoints.agreement import check_loads
from collage_fx.optimizer.checkpoints.history import History, history_of
from collage_fx.optimizer.checkpoints.places import hand_on, note_places, renew_places
from collage_fx.optimizer.discovery import FunctionStates, OptimizerStates, StateStorage
from collage_fx.optimizer.ownership import PARAM, Owned, params_of
from collage_fx.optimizer.parameter_names import naming
from collage_fx.optimizer.served import RETURNED, not_given
from collage_fx.passes.dedup.replaced_states import Replaced
from collage_fx.passes.ir.program import StatePlan
from collage_fx.record.dispatch_modes import off_stack
from collage_fx.record.known_states import (
    KnownStates,
    OtherMemory,
    leave_memory,
    resumed,
    take_over,
)
from collage_fx.record.mode import Cause, Mode
from collage_fx.record.recorder import Recorder
from collage_fx.record.service import TRIED, Service
from collage_fx.runtime import logs
from collage_fx.runtime.errors import UnsupportedError
from collage_fx.runtime.kernels import left_out
from collage_fx.runtime.residuals.changes import note_write
from collage_fx.runtime.residuals.memory import has_memory
from collage_fx.runtime.residuals.residual import settle_at_end
from collage_fx.runtime.residuals.store import STORE
from collage_fx.runtime.storage.registry import compensable_dtypes
from collage_fx.runtime.trees import tree_leaves
from collage_fx.segments.executors import Executors
from collage_fx.segments.low_words import LowWords
from collage_fx.segments.memory import gradients, memory_key
from collage_fx.segments.segment import Call, Segment, WholeValues

_SWAPPED = "because it has weakref associated"
_NO_SWAP = (
    "calls torch.utils.swap_tensors, which takes no tensor with weak references, and residuals are "
    "found by these: copy the values, as in p.copy_(new). What the step did before is done, and "
    "nothing is swapped"
)

_AT_ONCE = "operations are done when they are called"


class Steps:
    """Runner of steps: by the graphs that Dynamo makes of them, and recorded where it makes none.

    Operations of a step that are in no Dynamo graph are recorded and done by segments. If they
    write states, then from the third step on the whole step is recorded, so that what Dynamo cannot
    trace is compiled too; and where a Dynamo graph ends that others go on from, from there on:
    values that are recorded keep their low words.
    """

    def __init__(self, session: Session, discovery: FunctionStates, subject: str) -> None:
        config = session.config
        self.session = session
        self.discovery = discovery
        self.subject = subject
        self.warn = session.warn_once
        self.failures = Failures(self.warn)
        self.storages = StateStorage(config, self.warn)
        self.states = KnownStates(discovery, self.storages, self.warn)
        self.service = Service(session, discovery, subject)
        self.steps = 0
        self.updates = 0
        """Number of steps with something to update, counted up to TRIED."""
        self.history = History()
        """History of the optimizer, from the first step on."""
        self.mode = Cause.ASKED.mode if config.record is True else Mode.COMPILED
        self.interpreted = False
        """True if nothing is compiled any more, by Dynamo or of what is recorded."""
        self.active = False
        self.in_method = False
        """True while a method runs that is no step."""
        self.sources: dict[Any, GraphModule] = {}
        """Graphs that Dynamo handed to the backend, to be compiled anew or recorded."""
        self.quiet = False
        """True if the last step wrote its states in Dynamo graphs only."""
        self.waited = False
        """True if a graph was recorded in this step that will be compiled in the next."""
        self.forced = False
        """True if the user wants nothing compiled in this step."""
        self.bound: BoundGraph | None = None
        """The graph that did all of the last step, bound to its tensors."""
        self.unseen = False
        """True if this step has not looked for its states yet: `bound` may still repeat it."""
        self.again = False
        """True if the bound graph has done this step."""
        self.exchanges = False
        """True if a state has taken the memory of another in a recorded step."""
        self.noted = -1
        """The generation of the store when the places of residuals were noted."""
        self.returned: set[int] = set()
        """The memory that Dynamo's graphs have returned."""
        self.given_up: list[Tensor] = []
        """Tensors on memory that states had when the step began, until it ends."""
        self.renewed: dict[int, Tensor] = {}
        """The ids of states -> the results that graphs store in copies of these."""
        self.words = LowWords(
            compensable_dtypes(config.storage),
            config.arithmetic == "eft",
            self._storage_for,
            config.rounds_by_chance,
            config.seed,
            self._lost,
            naming(session.optimizer),
        )
        self.sharded: ShardedWrites | None = None
        """Writes to the DTensors among the optimizer's parameters, if there are any."""
        self.changes: NotedChanges | None = None
        """Notes of the changes of the optimizer's parameters, where they are asked for."""
        self.forget_breaks()
        self.executors = Executors(session, self.words, self.failures.note)
        self.switches = type(discovery) is not FunctionStates
        """True if steps of which a part is recorded are recorded whole: a function may compute
        gradients, of which Dynamo makes better graphs."""
        self.other_memory = OtherMemory(
            self.words, finds_params=self.switches, storages=lambda: self.states.memory
        )
        self.recorder = Recorder(
            self.words,
            self._run,
            self._wake,
            self._unknown_reader,
            self.warn,
            self.other_memory.watched,
            record=config.record is not False,
        )

    @property
    def traces(self) -> bool:
        """True if Dynamo is to trace the steps."""
        return self.mode is not Mode.RECORDED and not self.interpreted

    @property
    def compiles(self) -> bool:
        """True if Dynamo graphs are to be compiled."""
        return self.mode is Mode.COMPILED and not self.interpreted

    @property
    def done_by_graph(self) -> bool:
        """True if nothing but a Dynamo graph has done anything in this step, as in the last one."""
        return self.quiet if not self.switches else self.recorder.asleep

    @property
    def was_repeated(self) -> bool:
        """True if the bound graph has done all of the last step."""
        return self.unseen and self.again

    @property
    def plain(self) -> bool:
        """True if the step has no state of a dtype with low words."""
        return self.words.plain

    def forget_breaks(self) -> None:
        """Say of no graph break that Dynamo has met in this process that it cuts these steps."""
        self.session.breaks.clear()

    def enter(self, cause: Cause) -> None:
        """Do the steps from now on in the mode that a cause leads to, if it is a later one."""
        if cause.mode > self.mode:
            self.mode = cause.mode
            logs.LOG.info("%s: %s from now on: %s", self.subject, self.mode, cause)
        self._note_mode()

    def _note_mode(self) -> None:
        """Note the mode for checkpoints: a resumed run begins in it."""
        if isinstance(self.discovery, OptimizerStates) and self.mode is not Mode.COMPILED:
            history = history_of(self.discovery.optimizer())
            history.recorded, history.traced = self.executors.changing, self.traces

    def record_rest(self, where: str) -> None:
        """Record the rest of this step, and all of the next: a graph ends that others go on from.

        Args:
            where: why, and where in the user's code.
        """
        if self.compiles and self.switches:
            self.enter(Cause.CUT)
            self.service.note_cut(where)

    @contextlib.contextmanager
    def step(self, *, traced: bool, once: bool) -> Iterator[Recorder]:
        """Run one step. What it raises comes up after what was recorded before was done.

        Args:
            traced: whether Dynamo traces it.
            once: whether it does not for this once only.
        """
        with self.noting(traced=traced):
            self._begin()
            self.discovery.place_numbers(traced=traced, once=once)
            self.active, self.waited = True, once
            failed = True
            try:
                repeats = self.unseen and self.recorder.asleep
                with self.recorder.recording(beside_dynamo=traced, repeats=repeats):
                    yield self.recorder
                failed = False
            except RuntimeError as error:
                if _SWAPPED in str(error):
                    raise UnsupportedError(f"{self.subject} {_NO_SWAP}") from error
                raise
            finally:
                self.active = False
                self._end(failed=failed)

    @contextlib.contextmanager
    def noting(self, *, traced: bool) -> Iterator[None]:
        """Note what is changed of parameters, where that is asked for, and written to DTensors.

        Args:
            traced: whether Dynamo traces what is done within this context.
        """
        optimizer, changes = self.session.optimizer(), self.changes
        if optimizer is not None and self.sharded is None:
            self.sharded = ShardedWrites.of(optimizer)
        elif optimizer is not None and self.sharded is not None:
            self.sharded.count(optimizer)
        try:
            with contextlib.nullcontext() if changes is None else changes.in_full(traced=traced):
                yield
        finally:
            if optimizer is not None and self.sharded is not None:
                self.sharded.note(optimizer)

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """Run what is no step, and may write states: they are looked for if it does anything.

        It is interpreted, and leaves no trace in what is known of steps.
        """
        self.other_memory.begin()
        self.recorder.asleep = self.in_method = self.active = True
        try:
            with self.noting(traced=False), self.recorder.recording(beside_dynamo=False):
                yield
        finally:
            if not self.recorder.asleep:
                self.words.adopt(self.states.find())
                self.other_memory.adopt()
                self.words.settle()
                self.words.forget()
                self.quiet = False  # it may have put others in the place of states
            self.recorder.asleep = self.in_method = self.active = False

    def repeated(self) -> None:
        """Note a step that did what the last one did, by the same graphs to the same states."""
        self.steps += 1
        self.history.taken += 1
        self.service.repeats += 1

    def see_results(self, results: Any) -> None:
        """Say so if a function returns new values of its states, and writes none."""
        self.recorder.flush_outside()
        found = [t for t in tree_leaves(results) if isinstance(t, Tensor) and has_memory(t)]
        found = [t for t in found if self.words.may_be_state(t)]
        if not self.words.writes and any(map(self.words.dropped, found)):
            self.warn("returned", RETURNED)

    def see_written(self) -> None:
        """Say so if a graph may have returned new states of a function, and none is written."""
        if self.session.returns_alike and not self.service.has_written():
            self.warn("returned", RETURNED)

    # The beginning.

    def _begin(self) -> None:
        """Take up the states as they are now, or at the first operation outside of graphs."""
        self.check_states()
        self.returned.clear()
        self.other_memory.begin()
        self.interpreted |= self.failures.no_compiler
        self.forced = nested_compile.stance_is_eager()
        self.unseen, self.again = True, False
        if self.bound is not None and self.quiet and self.traces:
            self.recorder.asleep = True
        else:
            self.look()

    def check_states(self) -> None:
        """Raise CollageError if the states of an optimizer were changed, so that no step can do."""
        if isinstance(self.discovery, OptimizerStates):
            self.discovery.check_dtypes()
            check_loads(self.discovery.optimizer())

    def look(self) -> None:
        """Look at the states before anything but the graph of the last step, done again, runs."""
        if not self.unseen:
            return
        again = self.bound.written if self.bound is not None and self.again else []
        self.unseen, self.bound = False, None
        self.service.count_repeats()
        self.steps += 1
        self.history.taken += 1
        self.service.by_graph.clear()
        if self.switches and self.quiet and self.traces and self.states.are_present():
            self.recorder.asleep = True
            self.service.begin_again(self.states.alive())
        else:
            self._find_states()
        self.service.by_graph.update((id(tensor), (tensor, plan)) for tensor, plan in again)
        if self.active:
            self.recorder.watch_reads()

    def _wake(self) -> None:
        """Look for the states before an operation outside of Dynamo's graphs runs."""
        self.look()
        if self.recorder.asleep:
            self._find_states()

    def go_on(self) -> None:
        """Record steps as before a checkpoint, or as the optimizer that this one is a copy of."""
        if self.steps or not isinstance(self.discovery, OptimizerStates):
            return
        self.history = history_of(self.discovery.optimizer())
        if self.history.at_once and not self.recorder.all_at_once:
            self.recorder.notes.all_at_once = True
            self._unknown_reader(self.history.at_once)
        before = self.history.recorded
        if before is not None:
            self.executors.changed_before = before
        if self.history.hand_on is not None:
            self.other_memory.hand_on = self.history.hand_on
        if before is not None:
            self.enter(Cause.RESUMED_TRACED if self.history.traced else Cause.RESUMED)
        self._note_mode()

    def _find_states(self) -> None:
        self.recorder.asleep = False
        with self.recorder.paused():  # who looks for them may ask for addresses, and compares rows
            if isinstance(self.discovery, OptimizerStates):
                hand_on(self.discovery.optimizer())
            present = self.states.find()
            self.words.begin(present)
        self.recorder.notes.carried = frozenset(self.states.memory)
        if self.in_method:
            return
        self.service.begin(present)
        at_once = self.session.keep or (self.steps == 1 and resumed(present))
        self.executors.begin(interpreted=self._why_interpreted(), at_once=at_once)

    def _why_interpreted(self) -> str:
        """Return the reason why nothing recorded is compiled in this step; empty if it may be."""
        if self.forced:
            return "torch.compiler.set_stance asks for no compiler"
        if self.failures.no_compiler:
            return "no C++ compiler works"
        if self.interpreted:
            return "compiled steps were not as in float64"
        if self.recorder.all_at_once:
            return _AT_ONCE
        if self.exchanges:  # a graph would drop the low words of what it overwrites
            return "states take the memory of others"
        # What is recorded beside Dynamo graphs is soon recorded with them, or over.
        joins = self.session.config.on_unsupported == "join"
        soon_over = joins and self.compiles and self.steps <= TRIED
        return "it is beside graphs, in the first steps" if soon_over else ""

    def _storage_for(self, owned: Owned) -> str:
        served = self.service.served.get(owned.place)
        plain = served is not None and served.judged and not served.compensated
        wanted = owned.place in self.executors.wanted or STORE.get(owned.tensor) is not None
        # What is computed anew may be so from whole values, which graphs of Dynamo's did not have.
        anew = served is not None and served.replaced and owned.owner != "state"
        if plain and not (wanted or anew):
            return ""
        return self.storages.storage(owned)

    def _unknown_reader(self, why: str) -> None:
        """Note why operations are done one by one, for the report and for a resumed run."""
        logs.LOG.info("%s: done operation by operation from now on: %s", self.subject, why)
        self.executors.interpreted = _AT_ONCE
        self.history.at_once = why
        self.service.note_at_once(why)

    def _warn_of_unknown(self, segment: Segment, call: Call) -> None:
        """Warn of what may be a parameter of a function, is written, and is no argument."""
        if type(self.discovery) is not FunctionStates:
            return
        for given, written in zip(call.inputs, segment.writes, strict=True):
            t = None if given.pieces or given.layout[0] not in self.words.wide else given.tensor
            if written and t is not None and t.requires_grad and t.is_leaf:
                how = "that is none of its arguments"
                self.warn("not-given", not_given(self.subject, t, how))

    def _lost(self, name: str) -> None:
        self.warn(
            "other-operation",
            f"{self.subject} writes {name} by an operation that knows no low words, a collective "
            "or a kernel of its own: its residual begins anew",
        )

    def _run(self, segment: Segment, call: Call) -> None:
        """Do a segment; see whether it stores in a state what a Dynamo graph has computed."""
        given = zip(segment.writes, call.inputs, strict=True)
        if self.words.multiplied.storages:
            segment.refuse_reads(call, self.words.multiplied)
        self.other_memory.see(segment, call)
        if any(written and not i.pieces for written, i in given):
            # States that the step has made, and those that are elsewhere.
            if new := self.discovery.changed():
                self.words.take_up(self._moved(self.states.find()))
            filled = gradients(self.words.memory.values())
            new |= self.other_memory.take_up(segment, call, {*self.returned, *filled})
            if new:
                call.inputs = [
                    i if (t := i.present) is None else self.words.input(t) for i in call.inputs
                ]
            at = len(self.executors.changing)
            tries = self.executors.seen > 1 or self.history.hand_on is None
            self.other_memory.keep_low_words(segment, call, filled, at, tries=tries)
        self._see_moved(leave_memory(self.words, call, self.states.find))
        for to, source in segment.copies if self.returned and not self.in_method else ():
            by_value = dict(zip(segment.inputs, call.inputs, strict=True))
            if memory_key(by_value[source].data) in self.returned and by_value[to].pieces:
                self._chained(by_value[to].pieces[0].owned.name)
        call.plain = segment.plain(call, self.words)
        if self.in_method:
            WholeValues(segment, call, self.words).run()
        else:
            self._warn_of_unknown(segment, call)
            self.executors.run(segment, call)
        # A new state is known before it has been computed.
        self.words.adopt(owned for t in call.memory for owned in self.words.states_in(t))

    # Dynamo graphs.

    def repeat(self, graph: Any, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Do the step as the graph did the last one; return its results.

        None, with nothing done, if it has to be done in full.
        """
        bound, results = self.bound, None
        fresh = self.active and self.unseen and not (self.again or is_looked_at())
        if fresh and bound is not None and bound.graph is graph and not left_out.is_open():
            with self.recorder.paused(), off_stack(self.recorder):
                results = bound.run(args)
        self.again |= results is not None
        if results is None:
            self.look()
        return results

    def recorded(self, graph: Any, args: tuple[Any, ...]) -> Any:
        """Record the operations of a Dynamo graph; return its results."""
        results = self.recorder.graph(self.sources[graph], args)
        self._note_renewed(graph.replaced, results, args)
        return results

    def _note_renewed(self, replaced: Replaced, results: Any, args: tuple[Any, ...]) -> None:
        self.renewed |= {id(args[j]): results[k] for k, j in replaced.items()}

    def stored(self, replaced: Replaced, results: Any, args: tuple[Any, ...]) -> None:
        """Note the results that a compiled graph has stored in copies of states.

        A result in the place of another state has the low word that this one would need.
        """
        self._note_renewed(replaced, results, args)
        self.returned.update(memory_key(results[k]) for k in replaced)

    def expands(self, args: tuple[Any, ...], *, writes: bool) -> bool:
        """Return True if a graph would not see all of its arguments, which are known better here.

        Args:
            args: tensors, and whatever else.
            writes: whether it writes states: it may store in them what a segment has computed.
        """
        if self.recorder.asleep:
            return False
        tensors = [a for a in args if isinstance(a, Tensor) and has_memory(a)]
        return any(map(self.words.dropped, tensors)) or (
            writes and any(map(self.words.is_result, tensors))
        )

    def want(self, tensors: Iterable[Tensor | None]) -> None:
        """Have the states among these keep a low word for a graph that reads them.

        Whether something has written them does not matter: resumed, nobody would know.
        """
        states = {id(owned.tensor): owned for owned in self.states.find()}
        with self.recorder.paused():  # new residuals are zero now
            for owned in filter(None, (states.get(id(t)) for t in tensors)):
                self.executors.keep(owned)

    def run_graph(self, code: Code, args: tuple[Any, ...]) -> Any:
        """Run a compiled graph, and note what it has written and returned."""
        written = code.written(args)
        self._look_for_chain(written, args)
        if not self.recorder.asleep:
            self.words.settle()
        try:
            with self.recorder.paused(), off_stack(self.recorder):
                result = code.run(args)
        finally:
            for tensor, plan in written:
                self.service.by_graph[id(tensor)] = tensor, plan
                if not self.recorder.asleep:
                    self.words.wrote(tensor)
        # States that are put in the place of others, maybe.
        tensors = (t for t in tree_leaves(result) if isinstance(t, Tensor))
        self.returned.update(memory_key(t) for t in tensors if t.dtype in self.words.wide)
        return result

    def _look_for_chain(
        self, written: list[tuple[Tensor, StatePlan]], args: tuple[Any, ...]
    ) -> None:
        """Notice a state that is replaced by what an earlier graph of this step has computed.

        Of that only the high word is known. Where it comes from is not: a parameter that is
        replaced as a whole in a later graph is taken for such a state.
        """
        if not (self.service.by_graph or self.returned):
            return
        handed = any(isinstance(a, Tensor) and memory_key(a) in self.returned for a in args)
        for tensor, plan in written:
            if plan.replaced and (handed or tensor.requires_grad):
                self._chained(plan.name)

    def _chained(self, name: str) -> None:
        """Record the whole of the steps from now on, where such values keep their low words."""
        if self.mode is Mode.COMPILED:
            self.enter(Cause.CHAINED)
            self.service.warn_chained(name)

    # The end.

    def _end(self, *, failed: bool) -> None:
        """Take up the states that the step has made or replaced, and note what served each."""
        if self.was_repeated:
            self.recorder.asleep = False
            return self.repeated()
        self.look()
        asleep = self.recorder.asleep
        known = asleep and bool(self.renewed) and self.states.renew(self.renewed)
        renewed = self.renewed if known else {}
        unaccounted = self._account_asleep(renewed) if asleep else self._account()
        if isinstance(self.discovery, OptimizerStates):
            if renewed:
                renew_places(self.discovery.optimizer(), renewed)
            elif not asleep or self.noted != STORE.generation:
                note_places(self.discovery.optimizer())
            self.noted = STORE.generation
        self.renewed.clear()
        self.given_up.clear()
        self.recorder.asleep = False
        self.service.by_graph.clear()
        if failed:  # what was counted as written need not have been
            return
        if unaccounted:
            self.quiet = False
            self.enter(Cause.UNSEEN)
            self.service.warn_unaccounted(unaccounted)
        if self.steps == 1:
            self.service.say_what_level_leaves()
        updates = self.updates < TRIED and self._updates()
        self.updates += updates
        if updates and (self.updates == TRIED or not self.states):
            self.service.say_what_is_not_compensated()

    def _moved(self, states: list[Owned]) -> list[Owned]:
        """Return states, with the low words of memory that they have taken from others."""
        self._see_moved(take_over(self.words, states))
        return states

    def _see_moved(self, moved: bool) -> None:
        """Record the steps from now on in which states take the memory of others."""
        if moved and not self.in_method:
            self.exchanges = True
            for _, plan in self.service.by_graph.values():
                self._chained(plan.name)  # it may have dropped what it wrote there
            self.enter(Cause.MOVED)

    def _updates(self) -> bool:
        """Return True if a step had something to update: an optimizer may have no gradients yet."""
        if not isinstance(self.discovery, OptimizerStates) or self.service.has_written():
            return True
        return any(p.grad is not None for p in params_of(self.discovery.optimizer()))

    def _account_asleep(self, renewed: Mapping[int, Tensor]) -> list[str]:
        """Count what graphs have written in a step like the last; name what others have."""
        service = self.service
        service.renew(renewed)
        rest = [t for t in self.states.alive() if id(t) not in service.by_graph]
        unaccounted = service.unaccounted(rest)
        service.count_graphs()
        return unaccounted

    def _account(self) -> list[str]:
        """Account for what was written; return the names of states that nobody accounts for."""
        service, present, places = self.service, self.states.find(), self.service.places
        scalars = {o.param for o in present if o.key == PARAM and not o.tensor.dim()}
        new = service.take_up(present)
        # Others are norms, say, that somebody looks at.
        replaced = [o for o in new if o.tensor.dim() or o.param in scalars]
        by_results = {id(t): key for key, t in self.renewed.items()}
        others = [o for o in replaced if by_results.get(id(o.tensor)) != places.get(o.place, 0)]
        for owned in (o for o in others if o.place in places):
            if memory_key(owned.tensor) in self.returned:
                self._chained(owned.name)
            elif (
                self.compiles
                and self.switches
                and (id(owned.tensor) in by_results or self.words.has_made(owned.tensor))
            ):
                self.enter(Cause.REPLACED)
                service.note_replaced(owned.name)
        self.words.adopt(self._moved(present))
        self.other_memory.adopt()
        self.history.hand_on = self.other_memory.hand_on
        self.words.settle()
        rest = service.not_by_graphs(present)
        outside = {id(o.tensor): o for o in rest if self.words.has_written(o.tensor)}
        for key, owned in outside.items():
            service.note(owned, self.executors.plans.get(key))
            if self.changes is None:
                note_write(owned.tensor)
        for owned in self.words.memory.met:
            if self.words.has_written(owned.tensor):
                service.note(owned, self.executors.plans.get(id(owned.tensor)))
        service.warn_elsewhere(self.words.memory.lasting)
        left = [o.tensor for o in rest if id(o.tensor) not in outside]
        unaccounted = service.unaccounted(left, [o.tensor for o in outside.values()])
        service.count_graphs()
        self.quiet = bool(service.by_graph) and not outside and not others
        settled = self.steps >= TRIED and self.switches and not (self.waited or self.forced)
        if outside and settled and self.traces:
            self._go_on_recording()
        self.words.forget()
        if not self.switches:
            self._settle_arguments(present)
        return unaccounted

    def _settle_arguments(self, present: Iterable[Owned]) -> None:
        """Settle the states of a function at the end of a call, by their bits where versions tell
        nothing."""
        tensors = [owned.tensor for owned in present]
        pairs = zip(tensors, STORE.of(tensors), strict=True)
        settle_at_end([(t, r) for t, r in pairs if r is not None])

    def _go_on_recording(self) -> None:
        """Record steps whole of which a part was; ask Dynamo no more, unless its graphs do most."""
        if self.mode is Mode.COMPILED:
            self.service.note_switch(self.session.breaks)
        in_graphs = self.recorder.in_graphs > 2 * self.recorder.apart
        self.enter(Cause.PARTLY_OUTSIDE if in_graphs else Cause.OUTSIDE)
