"""Runs of recorded segments: rewritten by the passes, compiled on joined values, or interpreted."""

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

from torch import Tensor, is_inference_mode_enabled

from collage_fx.compilation.aot import compile_graph
from collage_fx.compilation.graph_inputs import Recorded
from collage_fx.compilation.session import Session
from collage_fx.compilation.side_inputs import Code
from collage_fx.errors import CollageError
from collage_fx.optimizer.ownership import Owned
from collage_fx.passes.ir.program import StatePlan
from collage_fx.runtime import logs
from collage_fx.runtime.residuals.store import STORE
from collage_fx.runtime.torch_private import (
    TensorifyScalarRestartAnalysis,
    TracingContext,
    compile_lock,
    tracing,
)
from collage_fx.segments.joined_compiler import Joining
from collage_fx.segments.low_words import LowWords
from collage_fx.segments.memory import gradients, storage_key
from collage_fx.segments.segment import Call, Readers, Segment, WholeValues
from collage_fx.segments.segment_graph import (
    Compiled,
    Given,
    Made,
    Numbers,
    Propagation,
    SeenNumbers,
    float_guard,
    graph_of_segment,
    number_tensor,
    why_again,
    with_fakes,
)
from collage_fx.segments.trie import on_one_line

SEEN = 2
"""The run in which a structure is compiled: what runs once is not worth it."""
_PASSED_ON = "16-bit values go on from it to other parts of the step, which would be rounded"
PATIENCE = 3
"""Number of steps more that a segment may wait to be compiled."""
FEW = 3
"""Number of segments that differ in sizes only, as those of masks do, which are compiled as others
are; each later one has to run twice as often as that before it, up to so many times:"""
DOUBLED = 3
MOST = 64
"""Number of times that segments of one step are compiled at most; others are interpreted."""


_Find: TypeAlias = Callable[[Segment, Call], Given | str]
"""Returns the tensors of a call, or why it cannot be done in a way."""
_Compile: TypeAlias = Callable[[Segment, Given, Numbers], Made | str]
"""Compiles a segment for these, or returns why not."""


@dataclass
class _Way:
    """Compiled code of a segment in one of the ways of running it."""

    compiled: list[Compiled] = field(default_factory=list)
    refused: str = ""
    """Reason why it cannot be run so."""


@dataclass
class _History(SeenNumbers):
    """Numbers and compiled code of a segment's runs."""

    begun: int = 0
    """The step of the first."""
    alike: int = 0
    """Number of segments before it that did the same there, to tensors of other sizes."""
    ways: defaultdict[str, _Way] = field(default_factory=lambda: defaultdict(_Way))


@dataclass(eq=False)
class Executors:
    """Runner of the segments of one optimizer or function, in the first possible of three ways.

    `rewritten`: compiled by the passes, as a Dynamo graph is. `joined`: on whole values,
    compiled by Inductor. `interpreted`: on whole values, operation by operation; so is what is seen
    for the first time.
    """

    session: Session
    words: LowWords
    note: Callable[[BaseException], None]
    """Function that is told of an error in compiling."""
    interpreted: str = ""
    """Reason why nothing is compiled in this step; empty if something may be."""
    logged: set[str] = field(default_factory=set)
    """Reasons that the log has."""
    changing: list[list[int]] = field(default_factory=list)
    """Number of floats of each segment of this step, with the positions of those that change."""
    changed_before: list[list[int]] = field(default_factory=list)
    """Numbers of the last step before a checkpoint, as `changing`."""
    steps: int = 0
    """Number of steps, with that which is being taken."""
    count: int = 0
    """Number of times that a segment was compiled."""
    alike: Counter[Any] = field(default_factory=Counter)
    """Operations, and position in a step -> the number of segments of these operations there."""
    runs: Counter[str] = field(default_factory=Counter)
    """Way -> how many segments were done so."""
    left: dict[Segment, str] = field(default_factory=dict)
    """Segments of the last step that the passes could not compile -> why."""
    wanted: set[Any] = field(default_factory=set)
    """The places of the states that keep a low word whatever their own verdict is."""
    written: set[Any] = field(default_factory=set)
    """The places of the states that graphs of the passes have written."""
    readers: Readers = field(default_factory=Readers)
    """Segments that read whole states, or may for all that the passes know yet, at level light."""
    plans: dict[int, StatePlan] = field(default_factory=dict)
    """Tensor -> its verdict, of the states that rewritten segments wrote in this step."""

    def __post_init__(self) -> None:
        joining = Joining(self.session, self.words)
        self.ways: dict[str, tuple[_Find, _Compile]] = {
            "rewritten": (self._for_passes, self._rewrite),
            "joined": (joining.given, joining.compile),
        }
        # Who wants an error for an operation without a rule gets it in the first step.
        self.seen = SEEN if self.session.config.on_unsupported == "join" else 1

    def begin(self, *, interpreted: str, at_once: bool) -> None:
        """Begin a step.

        Args:
            interpreted: the reason why nothing is to be compiled; empty if something may be.
            at_once: whether from now on what is seen for the first time is compiled: by who wants
                to see graphs, and after a checkpoint, to be bit-equal to the run that goes on
                unbroken, whose segments are compiled by now.
        """
        self.steps += 1
        self.plans.clear()
        self.left.clear()
        self.changing.clear()
        self.interpreted = interpreted
        if at_once:
            self.seen = 1

    def run(self, segment: Segment, call: Call) -> None:
        """Do a segment.

        Raises the CollageError that a user has asked for, before anything of it is written.
        """
        history = self._history(segment, call)
        if self.session.config.level == "light" and not history.ways["rewritten"].compiled:
            self.readers.add(segment, call)
        obstacle = self._obstacle(segment)
        if self.words.plain and len(call.plain) == len(segment.strands):
            pass  # nothing is compensated: as in eager PyTorch, to the bit
        elif obstacle:
            self.left[segment] = obstacle
            if obstacle not in self.logged:
                self.logged.add(obstacle)
                self._log(segment, f"interpreted: {obstacle}")
        elif history.runs >= self._enough(history) and not self._waits(segment, history, call):
            for name in self.ways:
                why = self._done(name, segment, history, call)
                if not why:
                    self.runs[name] += 1
                    return
                self.left.setdefault(segment, why)
        self.runs["interpreted"] += 1
        WholeValues(segment, call, self.words).run()

    def _enough(self, history: _History) -> int:
        """Return the run in which a segment is to be compiled."""
        return self.seen << min(max(history.alike - FEW, 0), DOUBLED)

    def _log(self, segment: Segment, became: str) -> None:
        what = f"a recorded segment of {len(segment.lines)} operations is {became}"
        logs.LOG.info("%s: %s", self.session.subject, what)

    def _waits(self, segment: Segment, history: _History, call: Call) -> bool:
        """Return True if a segment is to be compiled after others that only read what it writes.

        Level light would have it drop residuals that those turn out to need.
        """
        return self.steps - history.begun < self.seen + PATIENCE - 1 and any(
            residual.provisional
            for owned in self.readers.of_written(segment, call)
            if (residual := STORE.get(owned.tensor)) is not None
        )

    def _obstacle(self, segment: Segment) -> str:
        """Return the reason why a segment is not to be compiled at all; empty if it is."""
        if self.interpreted:
            return self.interpreted
        if segment.opaque:
            return "an operation in it cannot stand in a graph"
        # AOTAutograd's callables count versions, which inference tensors do not have.
        return "the step runs in inference mode" if is_inference_mode_enabled() else ""

    def outside_graphs(self) -> list[str]:
        """Say of the last step which parts the passes could not compile, and why."""
        found: dict[str, list[Segment]] = {}
        for segment, why in self.left.items():
            found.setdefault(why, []).append(segment)
        return [
            f"{len(parts)} of {len(self.changing)} parts of the step run on whole values, outside "
            f"the graphs of the passes: {why}. The first begins at "
            f"{on_one_line(parts[0].lines[0].where)}. A step that reads "
            "no data of its tensors (.item(), bool(), printing) is one part"
            for why, parts in found.items()
        ]

    def _history(self, segment: Segment, call: Call) -> _History:
        floats, history = call.floats, segment.history
        if history is None:
            does = len(self.changing), tuple(line.func for line in segment.lines)
            history = segment.history = _History(begun=self.steps, alike=self.alike[does])
            self.alike[does] += 1
        history.see(floats)
        if history.runs == 1 and (at := len(self.changing)) < len(self.changed_before):
            count, *changed = self.changed_before[at]
            if count == len(floats):
                history.changing.update(changed)
        self.changing.append([len(floats), *sorted(history.changing)])
        return history

    def _done(self, name: str, segment: Segment, history: _History, call: Call) -> str:
        """Do a segment in one way, compiled for the call if need be; return why not if it fails."""
        way, (find, compile_) = history.ways[name], self.ways[name]
        given = way.refused or find(segment, call)
        if isinstance(given, str):
            return given
        compiled = next((c for c in way.compiled if c.fits(given, call.floats)), None)
        if compiled is None:
            if self.count >= MOST:
                return f"{MOST} parts of the step have been compiled, and no more are"
            self.count += 1
            last = next(iter(way.compiled), None)
            self._log(segment, f"compiled, {name}{why_again(last, given, call.floats)}")
            made = self._compile(compile_, segment, history, given, call)
            if isinstance(made, str):
                self._log(segment, f"not {name}: {made}")
                way.refused = made
                return made
            compiled = made
            way.compiled.insert(0, compiled)
        numbers = [number_tensor(call.floats[i]) for i in compiled.numbers.changing]
        done = compiled.run([*given.args, *numbers, *given.lows])
        if not done:  # it is compiled anew for what there is by now
            way.compiled.remove(compiled)
        return "" if done else "a state has got a residual since it was compiled"

    def _compile(
        self, compile_: _Compile, segment: Segment, history: _History, given: Given, call: Call
    ) -> Compiled | str:
        made: Made | str = ""
        wanted = numbers = history.with_inputs(call.floats)
        for numbers in (wanted, replace(wanted, changing=[])):
            try:
                with compile_lock:
                    made = compile_(segment, given, numbers)
                break
            except CollageError:
                raise
            except TensorifyScalarRestartAnalysis:  # for a float that has to be a constant
                continue
            except Exception as error:  # whatever the compiler raises: there is another way
                self.note(error)
                return f"compiling it failed: {type(error).__name__}"
        if isinstance(made, str):
            return made
        return Compiled(*made, numbers, given.structure)

    # Rewritten by the passes.

    def _for_passes(self, segment: Segment, call: Call) -> Given | str:
        """Return the arguments of a graph, or why not: it would see high words only.

        That is so where a value has low words that is no state, where a state is a part of a
        larger piece of memory or has moved, and where results outlive the segment: those of a
        dtype that is compensated, and all that may hold more of a state than its high word.
        """
        if segment.undoes_rounding:
            return "it rounds to 16 bits by itself"
        if any(t.dtype in self.words.wide for t in call.memory):
            return _PASSED_ON
        made = any(map(self.words.may_be_state, call.memory))
        args = []
        wide, memory = self.words.wide, self.words.memory
        for given, written in zip(call.inputs, segment.writes, strict=True):
            t = given.data
            if given.pieces:
                piece = given.pieces[0]
                exact = piece.layout is given.layout or piece.layout == given.layout
                if len(given.pieces) > 1 or not exact or piece.moved:
                    return "it takes a part of a state, or several states, as one tensor"
                t = piece.owned.tensor
                if made and STORE.get(t) is not None:
                    return _PASSED_ON
            elif given.layout[0] in wide and (
                (memory[given.key].between is not None and self.words.known(t))
                or (written and not self._source(t).name)
            ):
                return _PASSED_ON
            args.append(t)
        return Given([*args, *call.memory], plain=call.plain)

    def _source(self, t: Tensor) -> Recorded:
        """Return the name of a state, or of the gradient of one; empty for other memory."""
        state = next(iter(self.words.states_in(t)), None)
        if state is not None:
            return Recorded(state.name, state.state_name)
        return Recorded(gradients(self.words.memory.values()).get(storage_key(t), ""), None)

    def _rewrite(self, segment: Segment, given: Given, numbers: Numbers) -> Made | str:
        gm = graph_of_segment(segment, numbers)
        args = (*given.args, *map(number_tensor, numbers.given))
        mode, fakes = with_fakes(gm, given, numbers)
        with mode:
            Propagation(gm).run(*fakes)
        for node, t in zip(gm.graph.find_nodes(op="placeholder"), given.args, strict=False):
            node._dynamo_source = self._source(t)
        with tracing(TracingContext(mode)):
            code = compile_graph(self.session, gm, fakes, args)
        # All of them, as the weight of a state is not known where others scale what it enters.
        read = [x for find, _ in code.reads if (x := find(args)) is not None]
        for owned in self._states(read):
            self._want(owned)
        if not read:
            self.readers.discard(segment)
        if code.refused or code.reads_residual(args):
            return _PASSED_ON
        if self.computes_anew(code, args):
            return "it computes a parameter anew instead of adding to it"
        code.compile_kernels()
        written = [t for t, writes in zip(args, segment.writes, strict=False) if writes]
        for owned in self._states(written):
            if self.readers.of(owned):
                self.keep(owned)
        code.conclude(args)
        return partial(self._run_code, code), float_guard(mode, fakes)

    def _states(self, tensors: list[Tensor]) -> list[Owned]:
        return [owned for t in tensors for owned in self.words.states_in(t)]

    def computes_anew(self, code: Code, args: tuple[Any, ...]) -> bool:
        """Return True if a graph stores in a parameter what it rounds: no sum, or not its own one.

        On whole values that has a low word.
        """
        anew = [x for find in code.anew if (x := find(args)) is not None]
        return any(owned.owner != "state" for owned in self._states(anew))

    def _want(self, owned: Owned) -> None:
        """Have a state keep a low word for who reads it, though its own updates need none."""
        if owned.place in self.written or STORE.get(owned.tensor) is not None:
            self.keep(owned)
        else:
            self.wanted.add(owned.place)

    def keep(self, owned: Owned) -> None:
        """Give a state a residual that no verdict on its own updates drops."""
        self.wanted.add(owned.place)
        residual = self.words.ensure(owned)
        if residual is not None:
            residual.provisional = False

    def _run_code(self, code: Code, args: list[Any]) -> bool:
        """Run a graph; return False where a state has got a residual that it does not know."""
        given = tuple(args)
        if code.misses_residual(given):
            return False
        code.run(given)
        self.session.calls += 1
        for tensor, plan in code.written(given):
            self.plans[id(tensor)] = plan
            for owned in self.words.wrote(tensor):
                self.written.add(owned.place)
                if owned.place in self.wanted:
                    self.keep(owned)
        return True
