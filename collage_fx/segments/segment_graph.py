"""The FX graph of a segment, in the form in which Dynamo hands over its own."""

import operator
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import copysign, isfinite, isnan
from typing import Any, TypeAlias

import sympy
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from collage_fx.passes.ir.program import NUMBER
from collage_fx.runtime.torch_private import FakeTensorMode, FloatTensorSource, LocalSource
from collage_fx.segments.low_words import LowWords
from collage_fx.segments.memory import Lows, Part, copy_, join, split
from collage_fx.segments.segment import Line, Segment, WholeValues

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Numbers:
    """The Python floats of a call, as a graph takes them."""

    floats: list[float]
    """All floats of the call; those that do not change are constants."""
    changing: list[int]
    """The positions of those that are inputs."""
    same: list[int]
    """Position, for each, of the first float that it is always equal to."""

    @property
    def given(self) -> list[float]:
        """The values of those that are inputs."""
        return [self.floats[i] for i in self.changing]

    def have(self, floats: list[float]) -> bool:
        """Return True if floats are these, but for those that change, which are equal where these
        are: bit for bit, so that some NaN is not found to be another."""
        changing = set(self.changing)
        pairs = zip(self.floats, self.same, strict=True)
        expected = [floats[k] if k in changing else x for x, k in pairs]
        return array("d", floats).tobytes() == array("d", expected).tobytes()


@dataclass
class SeenNumbers:
    """The floats of the runs of a segment: which change, and which are always equal."""

    runs: int = 0
    floats: list[float] = field(default_factory=list)
    changing: set[int] = field(default_factory=set)
    same: list[int] = field(default_factory=list)
    """Position, for each float, of the first that it was always equal to: a rate that many
    parameters have."""

    def see(self, floats: list[float]) -> None:
        """Count a run; note which floats have changed since the one before."""
        self.runs += 1
        for i, (new, old) in enumerate(zip(floats, self.floats, strict=False)):
            if not same_number(new, old) and isfinite(new) and isfinite(old):
                self.changing.add(i)
        first: dict[tuple[int, int], int] = {}
        before, bits = self.same or [0] * len(floats), array("q", array("d", floats).tobytes())
        keys = zip(before, bits, strict=True)
        self.same = [first.setdefault(key, i) for i, key in enumerate(keys)]
        self.floats = floats

    def with_inputs(self, floats: list[float]) -> Numbers:
        """Return these floats, those as inputs that have changed."""
        return Numbers(floats, sorted({self.same[i] for i in self.changing}), list(self.same))


@dataclass
class Given:
    """The tensors of a call, as one way of doing it takes them."""

    args: list[Tensor]
    lows: list[Tensor] = field(default_factory=list)
    """Low words, behind the numbers that are inputs."""
    plain: frozenset[int] = frozenset()
    """The strands that are done as they stand."""
    parts: tuple[tuple[Part, ...], ...] = ()
    """Parts of each operand that have low words."""

    @property
    def structure(self) -> Any:
        """Structure of the operands, on which the compiled code depends too."""
        return self.plain, self.parts


Made: TypeAlias = tuple[Callable[[list[Any]], bool], Callable[..., bool]]
"""Function that runs compiled code, and predicate: the code is right for these numbers."""


@dataclass
class Compiled:
    """A segment compiled for some floats."""

    run: Callable[[list[Any]], bool]
    """Returns whether it has run: if not, nothing was written."""
    holds: Callable[..., bool]
    """Predicate: the code is right for these values of the numbers that are inputs."""
    numbers: Numbers
    structure: Any

    def fits(self, given: Given, floats: list[float]) -> bool:
        """Return True if it is right for a call with these floats."""
        before = self.numbers
        if self.structure != given.structure or not before.have(floats):
            return False
        return self.holds(*[floats[i] for i in before.changing])


def why_again(last: Compiled | None, given: Given, floats: list[float]) -> str:
    """Return the reason why a segment is compiled again for a call; none without a last one."""
    if last is None:
        return ""
    if last.structure != given.structure:
        return "; again, as the low words of its states are others"
    before = last.numbers
    changed = [
        f"{old} -> {new}"
        for i, (old, new) in enumerate(zip(before.floats, floats, strict=True))
        if not same_number(old, new) and before.same[i] not in before.changing
    ]
    return f"; again, as numbers in it have changed: {', '.join(changed) or 'a guard fails'}"


def same_number(a: float, b: float) -> bool:
    """Return True if two floats are the same, signs of zero and NaN included."""
    if a == b:
        return a != 0 or copysign(1, a) == copysign(1, b)
    return isnan(a) and isnan(b)


class _InGraph(WholeValues):
    """The same as a graph; the arguments are those of `graph_of_segment`."""

    def __init__(
        self,
        segment: Segment,
        numbers: Numbers,
        words: LowWords | None,
        parts: Sequence[Sequence[Part]],
        plain: frozenset[int],
    ) -> None:
        self.segment, self.graph = segment, Graph()
        add = self.graph.placeholder
        self.given = {at: add(f"input{i}") for i, at in enumerate(segment.inputs)}
        self.made = {at: add(f"result{i}") for i, at in enumerate(segment.live)}
        floats = {i: add(f"float{i}") for i in numbers.changing}
        self.places = self.given | self.made
        self.lows: dict[int, Lows] = {}
        for i, (at, some) in enumerate(zip(self.places, parts, strict=False)):
            names = [[f"low{i}_{k}_{n}" for n in range(part.words)] for k, part in enumerate(some)]
            self.lows[at] = [(p, list(map(add, n))) for p, n in zip(some, names, strict=True)]
        self.wide = words.wide if words is not None else {}
        self.left = segment.only_in(plain)
        items = {i: self.graph.call_method("item", (node,)) for i, node in floats.items()}
        given = [items.get(k, x) for k, x in zip(numbers.same, numbers.floats, strict=True)]
        self._begin(segment.computed(words) if words is not None else {}, plain, given)

    def _joined(self, at: int) -> Node:
        hi, dtype = self.given[at], self.segment.dtype[at]
        if dtype in self.wide:
            return join(self._append, hi, self.wide[dtype], self.lows[at])
        return self._cast(hi, self.computed[dtype]) if dtype in self.computed else hi

    def _called(self, line: Line, func: Any, args: list[Any], kwargs: dict[str, Any]) -> list[Node]:
        if isinstance(func, partial):
            func, args = func.func, [*func.args, *args]
        node = self.graph.call_function(func, tuple(args), kwargs)
        node.stack_trace = line.where
        if not line.many:
            return [node]
        return [self._append(operator.getitem, node, k) for k in range(len(line.made))]

    def _cast(self, x: Node, dtype: torch.dtype) -> Node:
        return self.graph.call_method("to", (x, dtype))

    def _store(self, at: int, value: Node) -> None:
        hi, dtype = self.places[at], self.segment.dtype[at]
        if dtype in self.wide and at not in self.left:
            split(self._append, value, hi, dtype, self.lows[at])
        else:
            self._append(copy_, hi, value)

    def _append(self, func: Any, *args: Any) -> Node:
        return self.graph.call_function(func, args)


def graph_of_segment(
    segment: Segment,
    numbers: Numbers,
    words: LowWords | None = None,
    parts: Sequence[Sequence[Part]] = (),
    plain: frozenset[int] = frozenset(),
) -> GraphModule:
    """Return a graph of operations that write their operands, as the step did them.

    Its inputs are those of the segment, the memory that results are stored in, the floats that
    change, as 0-d tensors, and the low words, if it is on whole values. It returns nothing.

    Args:
        segment: what it does.
        numbers: those of a call.
        words: for a graph on whole values, what these are computed in.
        parts: for each input, and each memory of a result, the parts that have low words.
        plain: the strands that are done as they stand.
    """
    made = _InGraph(segment, numbers, words, parts, plain)
    made.run()
    made.graph.output(())
    return GraphModule(torch.nn.Module(), made.graph)


def with_fakes(gm: GraphModule, given: Given, numbers: Numbers) -> tuple[FakeTensorMode, list[Any]]:
    """Return fake tensors of arguments, floats as Dynamo has them, and note them in a graph.

    With floats it notes what they are now.
    """
    mode = FakeTensorMode(shape_env=ShapeEnv())
    fakes: list[Any] = [mode.from_tensor(a, static_shapes=True) for a in given.args]
    for i, number in enumerate(numbers.given):
        source = FloatTensorSource(LocalSource(f"float{i}"))
        fakes.append(mode.from_tensor(number_tensor(number), source=source))
    fakes += [mode.from_tensor(a, static_shapes=True) for a in given.lows]
    placeholders: list[Node] = gm.graph.find_nodes(op="placeholder")
    for node, value in zip(placeholders, fakes, strict=True):
        node.meta["example_value"] = value
    for node, number in zip(placeholders[len(given.args) :], numbers.given, strict=False):
        node.meta[NUMBER] = number
    return mode, fakes


class Propagation(Interpreter):
    """Interpreter that notes each node's fake tensor, as Dynamo does: classes are found by that."""

    def run_node(self, n: Node) -> Any:
        """Run a node."""
        result = super().run_node(n)
        if n.op == "call_function":
            n.meta["example_value"] = result
        return result


def number_tensor(x: float) -> Tensor:
    """Return a float as graphs take it."""
    return torch.scalar_tensor(x, dtype=torch.float64, device=CPU)


def float_guard(mode: FakeTensorMode, fakes: Sequence[Any]) -> Callable[..., bool]:
    """Return the guard on a graph's floats: compiling may have asked about one (alpha == 1?)."""
    memos = [getattr(f, "item_memo", None) for f in fakes]
    # `expr` would be the number itself, where compiling has made it a constant.
    symbols = [m.node._expr for m in memos if m is not None]
    guards = [guard.expr for guard in mode.shape_env.guards]  # type: ignore[union-attr]
    if not guards:
        return lambda *floats: True
    holds = sympy.lambdify(symbols, guards, modules="math")  # NumPy is slow with single numbers
    return lambda *floats: all(holds(*floats))
