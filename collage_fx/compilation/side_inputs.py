"""Extra kernel inputs and outputs that bypass AOTAutograd: residuals, seeds, tensors of members."""

import functools
import itertools
import operator
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from collage_fx.compilation.layout_guards import is_plain
from collage_fx.compilation.partition import Direct
from collage_fx.compilation.residual_binding import (
    Gathered,
    Locate,
    Residuals,
    conclude,
    is_lasting,
)
from collage_fx.passes.codegen.multi_tensor_kernel import MULTI_TENSOR_KERNELS
from collage_fx.passes.dedup.deduplicate import Narrow
from collage_fx.passes.ir.exact import ExactGraph
from collage_fx.passes.ir.program import StatePlan
from collage_fx.passes.ir.verdict import VerdictKind
from collage_fx.runtime.errors import CollageError
from collage_fx.runtime.expansion.stochastic import Seeds
from collage_fx.runtime.kernels import left_out
from collage_fx.runtime.residuals.dtensor import shard_of, shards_of
from collage_fx.runtime.residuals.memory import Apart, has_memory
from collage_fx.runtime.residuals.residual import Residual, next_draw
from collage_fx.runtime.residuals.store import STORE

MOVED = "other tensors share memory with states than when the step was compiled"
"""Reason why a graph is not called; see `Code.lies_as_before`."""


@dataclass(eq=False)
class Members:
    """The members of classes that were left out of a graph: what they take and what they make."""

    narrow: Narrow
    count: int
    """Number of results of the whole graph."""
    locate: list[Locate] = field(default_factory=list)
    """Functions that find the inputs of the members that were left out."""
    written: list[int] = field(default_factory=list)
    """Positions of those inputs whose writes autograd should know of."""
    made: dict[int, int] = field(default_factory=dict)
    """Result of the whole graph -> the additional result of the narrow one that it is."""
    returned: dict[int, Locate] = field(default_factory=dict)
    """Result of the whole graph -> how to find the input that it is."""

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], call: "_Call") -> Any:
        """Run the narrow graph; return the results of the whole one."""
        kept = function(*(args[i] for i in self.narrow.inputs))
        if self.written:
            torch.autograd.graph.increment_version([call.members[i] for i in self.written])
        return self.results([*kept, *call.made], args)

    def results(self, made: Sequence[Any], args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the results of the whole graph, given all those of the narrow one."""
        kept = made[: len(self.narrow.results)]
        results: list[Any] = [None] * self.count
        for k, result in zip(self.narrow.results, kept, strict=True):
            results[k] = result
        for k, at in self.made.items():
            results[k] = made[len(kept) + at]
        for k, find in self.returned.items():
            results[k] = find(args)
        return tuple(results)


@dataclass
class _Call:
    """Inputs and results of one call of a graph that bypass AOTAutograd."""

    args: tuple[Any, ...]
    residuals: Gathered
    members: list[Any]
    """The inputs of the members that were left out."""
    made: list[Any] = field(default_factory=list)
    """Results of the kernels for those members."""


@dataclass
class Observed:
    """Inputs that one call of a graph gave to its kernels."""

    args: tuple[Any, ...]
    """The arguments of the call, as Dynamo orders them."""
    residuals: Gathered
    inputs: list[Any]
    """All, in the order in which `Direct` numbers them, those for random bits left out."""


class _Calls(threading.local):
    """The calls that are under way in a thread, the innermost last."""

    def __init__(self) -> None:
        self.running: list[_Call] = []


class Look:
    """Observer of the calls of graphs."""

    reads = True
    """True if it reads the results of a graph: it has to know then if none are written."""

    def enter(self, args: tuple[Any, ...]) -> None:
        """A graph is about to be called with these, or a part of one."""

    def take(self, exact: ExactGraph | None, observed: Observed) -> None:
        """Take the inputs of a call, none of which has been written."""

    def leave(self) -> None:
        """Note that the call is done, the residuals of what it wrote being settled too."""


class Noted(Look):
    """Observer that notes the calls of graphs."""

    reads = False

    def __init__(self) -> None:
        self.calls: list[Observed] = []
        """Noted calls; of graphs, or parts of one, with nothing to compensate there is none."""
        self.args: tuple[Any, ...] | None = None
        """The arguments of the first call."""

    def enter(self, args: tuple[Any, ...]) -> None:
        """Note the arguments of the first call."""
        self.args = args if self.args is None else self.args

    def take(self, exact: ExactGraph | None, observed: Observed) -> None:
        """Note the inputs of a call."""
        self.calls.append(observed)


class _Observing(threading.local):
    """The `Look`s at the calls of a thread."""

    looks: tuple[Look, ...] = ()


_OBSERVING = _Observing()


@contextmanager
def looked_at(look: Look) -> Iterator[None]:
    """Have each call of a graph by this thread looked at, within this context."""
    before, _OBSERVING.looks = _OBSERVING.looks, (*_OBSERVING.looks, look)
    try:
        yield
    finally:
        _OBSERVING.looks = before


def is_looked_at() -> bool:
    """Return True if somebody looks at the calls of this thread."""
    return bool(_OBSERVING.looks)


@dataclass(eq=False)
class SideInputs:
    """Residuals, seeds and tensors of left-out members, brought past AOTAutograd at each call.

    AOTAutograd hands on what the graph takes and returns, nothing else, and counts up the versions
    of some mutated inputs before it runs the graph, so that residuals are gathered before that.
    """

    residuals: Residuals
    members: Members | None
    seed: int
    exact: ExactGraph | None
    """The graph, to be done again in float64."""
    calls: _Calls = field(default_factory=_Calls)
    seeds: Seeds | None = None

    def draw(self, residuals: Sequence[Residual], devices: Sequence[torch.device]) -> list[Tensor]:
        """Return a seed for each device, which is another in each call."""
        if not devices:
            return []
        if self.seeds is None:  # now, and not under the fake mode of compiling
            self.seeds = Seeds(self.seed, devices)
        return self.seeds.draw(next_draw(residuals))

    def begin(self, args: tuple[Any, ...], known: Gathered | None = None) -> _Call:
        """Return the operands of a call; nothing is written.

        Args:
            args: those of the whole graph.
            known: its residuals, if they are known to be those of the tensors.
        """
        gathered = known or self.residuals.gather(args)
        if gathered.replaced:  # which are cleared here, and not by a kernel
            left_out.ask()
        absent = [find(args) for find in self.members.locate] if self.members else []
        return _Call(args, gathered, absent)

    def call(self, function: Callable[..., Any], call: _Call) -> Any:
        """Call what AOTAutograd made."""
        members, args, gathered = self.members, call.args, call.residuals
        for look in _OBSERVING.looks:
            look.enter(args)
        self.calls.running.append(call)
        try:
            result = members.run(function, args, call) if members else function(*args)
        except CollageError:
            gathered.keep()
            raise
        finally:
            self.calls.running.pop()
        gathered.settle()
        for look in _OBSERVING.looks:
            look.leave()
        return result

    def bind(self, inner: Any, devices: Sequence[torch.device]) -> Callable[[list[Any]], Any]:
        """Return a boxed callable that appends all this to the inputs of inner.

        Args:
            inner: a boxed callable.
            devices: those on which it takes a seed.
        """
        count = len(self.members.narrow.results) if self.members is not None else None

        def run(args: list[Any]) -> Any:
            call = self.calls.running[-1]
            residuals = [residual for _, residual in call.residuals.current]
            full = [*args, *call.members, *call.residuals.inputs]
            if _OBSERVING.looks:
                observed = Observed(call.args, call.residuals, full.copy())
                for look in _OBSERVING.looks:
                    look.take(self.exact, observed)
            full += self.draw(residuals, devices)
            args.clear()
            results = inner(full)
            if count is None:
                return results
            call.made = list(results[count:])
            return results[:count]

        run._boxed_call = True  # type: ignore[attr-defined]
        return run


@dataclass
class Code:
    """A compiled graph with what it does to the carried states."""

    function: Callable[..., Any]
    side: SideInputs | None
    states: list[tuple[Locate, StatePlan]]
    """The carried states of 16 bits: how to find each, and its verdict."""
    reads: list[tuple[Locate, str]]
    """Functions that find the states of which the graph reads the high word only, with the names
    of these."""
    refused: bool
    """True if a state that needs a residual cannot have one in this graph."""
    direct: Direct | None = None
    """Kernels of the graph, where they are called without Inductor."""
    seeded: Sequence[torch.device] = ()
    """The devices on which it takes a seed."""
    wanted: list[Locate] = field(default_factory=list)
    """Functions that find the states it reads which should get a low word if they have none."""
    kernels: list[tuple[str, torch.device]] = field(default_factory=list)
    """The kernels of classes in it, with the devices that they run on."""
    parts: Sequence["Code"] = ()
    """The parts of a graph that is compiled in parts; `function` gets the arguments, and a call for
    each part, then."""
    beside: Sequence[Locate] = ()
    """Locators of further tensor inputs, beside the arguments and `members`."""
    apart: Apart | None = None
    """The tensors of the first call that lay in memory of states of the graph."""
    others: Sequence[Locate] = ()
    """Locators of the tensor inputs that are no states of the graph."""
    high: Sequence[Locate] = ()
    """Functions that find the 16-bit tensors which it reads, and which had no residual."""
    concluded: bool = False
    """True once the residuals that its states were made with are kept or dropped."""

    @property
    def reads_others(self) -> bool:
        """True if it reads states that it does not write, with their residuals or to get them."""
        return bool(self.reads) or any(s.residuals.reads_others for s in self._sides())

    @property
    def returns_from_parts(self) -> bool:
        """True if the graph is compiled in parts and returns anything."""
        return any(map(_results_of, self.parts))

    def new_seeds(self) -> Seeds | None:
        """Return seeds as it takes them; None if it takes none."""
        return Seeds(self.side.seed, self.seeded) if self.side and self.seeded else None

    def compile_kernels(self) -> None:
        """Compile the kernels of classes; raise what the compiler raises before anything runs."""
        for key, device in self.kernels:
            MULTI_TENSOR_KERNELS[key].runner(device)

    def run(self, args: tuple[Any, ...]) -> Any:
        """Run the graph with its residuals."""
        if left_out.is_open() and not self._may_be_left_out():
            left_out.ask()
        return self.call(args, self.begin(args))

    def begin(self, args: tuple[Any, ...], known: Sequence[Gathered] = ()) -> list[_Call]:
        """Return the operands of each part of a call; nothing is written.

        Args:
            args: those of the graph.
            known: the residuals of each part, if they are known to be those of the tensors.
        """
        return [s.begin(args, r) for s, r in itertools.zip_longest(self._sides(), known)]

    def call(self, args: tuple[Any, ...], begun: list[_Call]) -> Any:
        """Run the graph; return its results."""
        if self.parts:
            return self.function(args, begun)
        return self.function(*args) if self.side is None else self.side.call(self.function, *begun)

    def _may_be_left_out(self) -> bool:
        """Return True if nothing changes anywhere while its kernels write nothing."""
        quiet = not (self.seeded or any(look.reads for look in _OBSERVING.looks))
        return quiet and self.direct is not None and self.direct.may_be_left_out

    def lies_as_before(self, args: tuple[Any, ...], *, sized: bool) -> bool:
        """Return True if what a call takes lies in memory of states only where it did in the first.

        What is compiled takes it for other memory: it has the high word only, and need not be read
        before the state is written.

        Args:
            args: those of the graph.
            sized: whether all sizes are those of the first call.
        """
        states = _found(self._held, args)
        if not states:
            return True
        if self.apart is None:
            self.others = self._others(args, set(map(id, states)))
            self.apart = Apart(states, _found(self.others, args))
        others = _found(self.others, args)
        if not sized:
            return Apart(states, others).is_like(self.apart)
        return self.apart.hold(states, others)

    def _sides(self) -> list[SideInputs]:
        return [one.side for one in self.parts or [self] if one.side is not None]

    @functools.cached_property
    def _held(self) -> list[Locate]:
        """Return functions that find the tensors with residuals, and the 16-bit ones it writes."""
        found = (side.residuals for side in self._sides())
        return [find for one in found for find in (*one.locate, *one.others)]

    def _others(self, args: tuple[Any, ...], states: set[int]) -> list[Locate]:
        """Return functions that find the other tensors that it takes."""
        finds: list[Locate] = [operator.itemgetter(i) for i in range(len(args))]
        finds += (find for s in self._sides() if s.members for find in s.members.locate)
        found = ((shard_of(find(args)), find) for find in (*finds, *self.beside))
        taken = {
            id(t): find for t, find in found if t is not None and is_plain(t) and has_memory(t)
        }
        return [find for number, find in taken.items() if number not in states]

    @functools.cached_property
    def anew(self) -> list[Locate]:
        """Return functions that find the states it computes anew without compensation."""
        return [
            f
            for f, plan in self.states
            if plan.computed_anew
            and not plan.compensated
            and plan.decision.kind is not VerdictKind.GRADIENT
        ]

    def written(self, args: tuple[Any, ...]) -> list[tuple[Tensor, StatePlan]]:
        """Return the tensors of 16 bits that a call writes."""
        return [(t, plan) for find, plan in self.states if (t := find(args)) is not None]

    def conclude(self, args: tuple[Any, ...]) -> None:
        """Keep or drop the residuals that the states of the first call were made with.

        Only when it is known that this graph will update them: another way may need what it drops.
        """
        if not self.concluded:
            for tensor, plan in self.written(args):
                conclude(plan, tensor)
            self.concluded = True

    def misses_residual(self, args: tuple[Any, ...]) -> bool:
        """Return True if a state of a call has a residual that the graph would need or drop, or in
        another storage than the graph has it in."""
        kept_otherwise = any(side.residuals.keeps_otherwise(args) for side in self._sides())
        return bool(kept_otherwise or self.drops_residual(args)) or self.meets_residual(args)

    def meets_residual(self, args: tuple[Any, ...]) -> bool:
        """Return True if a tensor of which it reads the high word only has a residual."""
        return any(STORE.of(_found(self.high, args))) or bool(self.reads_residual(args))

    def reads_residual(self, args: tuple[Any, ...]) -> list[str]:
        """Return the names of states that it reads with a low word that the graph would need."""
        read = [(t, name) for find, name in self.reads if (t := find(args)) is not None]
        found = STORE.of([t for t, _ in read])
        return [name for (_, name), r in zip(read, found, strict=True) if r is not None]

    def drops_residual(self, args: tuple[Any, ...]) -> list[str]:
        """Return the names of states that have a residual which this graph does not know of."""
        states = [(t, p) for t, p in self.written(args) if not (p.compensated or p.replaced)]
        found = STORE.of([t for t, _ in states])
        # Others than those that are yet to be concluded on.
        return [
            plan.name
            for (_, plan), r in zip(states, found, strict=True)
            if r is not None and (self.concluded or is_lasting(r, plan))
        ]


def in_turn(first: Code | None, apart: list[Code], count: int) -> Code:
    """Return the code of a graph that is compiled in parts, called one after another.

    Args:
        first: that of the graph which hands values to the others; None if there is none.
        apart: those of the others, each with narrow graphs.
        count: how many results the whole graph has.
    """
    codes = [first, *apart] if first is not None else apart

    def run(args: tuple[Any, ...], begun: list[_Call]) -> tuple[Any, ...]:
        results: list[Any] = [None] * count
        for code, call in zip(codes, begun, strict=True):
            made = _side(code).call(code.function, call)
            for k in _results_of(code):
                if k < count:
                    results[k] = made[k]
            if code is first:
                for other in begun[1:]:
                    other.args = (*args, *made[count:])
        return tuple(results)

    return Code(
        run,
        None,
        [state for code in codes for state in code.states],
        [read for code in codes for read in code.reads],
        any(code.refused for code in codes),
        wanted=[find for code in codes for find in code.wanted],
        kernels=[kernel for code in codes for kernel in code.kernels],
        parts=codes,
        high=[find for code in codes for find in code.high],
    )


def _found(finds: Iterable[Locate], args: tuple[Any, ...]) -> list[Tensor]:
    return shards_of([t for find in finds if (t := find(args)) is not None])


def _side(code: Code) -> SideInputs:
    assert code.side is not None
    return code.side


def _results_of(code: Code) -> list[int]:
    """Return the positions of the results of the whole graph that a part returns."""
    members = _side(code).members
    assert members is not None
    return [*members.narrow.results, *members.made, *members.returned]
