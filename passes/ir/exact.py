"""Replay of a step's graph in float64: what each 16-bit state should have become."""

import ctypes
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate, map_arg

from collage_fx.passes.ir.graph_memory import draws
from collage_fx.passes.ir.program import (
    CONVERT,
    LOW_PRECISION,
    Carried,
    Program,
    Slice,
    StateClass,
    graph_of,
    low_word,
    value_of,
)
from collage_fx.runtime.ops import JOINS
from collage_fx.runtime.storage.registry import STORAGES, value_in_float64

aten = torch.ops.aten
LARGEST = 5000
"""A graph of more nodes is not kept to be done again: each takes some kilobytes."""
Function: TypeAlias = Callable[..., tuple[Tensor, ...]]
_ON_CPU, _ON_OTHERS = 3 << 13, 1 << 22


class NotExact(Exception):
    """A graph, or a part of it, that cannot be done again; the reason."""


class Words(NamedTuple):
    """A tensor with the components that its residual has."""

    high: Any
    """The tensor; what is no tensor, such as a size, stands for itself."""
    lows: tuple[Tensor, ...] = ()
    storage: str = ""

    @property
    def full(self) -> bool:
        """True for a tensor that is not 0-d; others stand for all elements."""
        return isinstance(self.high, Tensor) and self.high.dim() > 0

    def each(self, function: Callable[[Tensor], Tensor]) -> "Words":
        """Return the words of which each is a function's result."""
        return Words(function(self.high), tuple(map(function, self.lows)), self.storage)

    def piece(self, where: slice | None) -> "Words":
        """Return some elements of a flat one, or all."""
        return self.each(lambda t: t[where]) if where is not None and self.full else self

    def flat(self) -> "Words":
        """Return a view of one dimension, in the order of the memory, of a dense tensor."""
        return self.each(lambda t: t.as_strided((t.numel(),), (1,))) if self.full else self

    def unpacked(self) -> "Words":
        """Return the same with low words of the shape of the high one."""
        if not self.lows:
            return self
        return self._replace(lows=STORAGES[self.storage].words(self.high, self.lows))

    def value(self) -> Any:
        """Return the value, in float64 if it is floating."""
        if not isinstance(self.high, Tensor) or not self.high.is_floating_point():
            return self.high
        return value_in_float64(self.storage, self.high, self.lows)


class Update(NamedTuple):
    """Some elements of a state before and after a step."""

    tensor: Tensor
    """The state, all of it."""
    high: Tensor
    """The state before the step, in its dtype."""
    whole: Tensor
    """Value with the residual then, in float64."""
    now: Tensor
    """The state after the step, in its dtype."""
    after: Tensor
    """Value with the residual then, in float64."""
    exact: Tensor
    """Value that it should be, in float64."""


class ExactGraph:
    """The canonical graph of a step with its classes, to be done again in float64."""

    def __init__(self, program: Program) -> None:
        placeholders = graph_of(program.canonical).graph.find_nodes(op="placeholder")
        self.place = {n: i for i, n in enumerate(placeholders)}
        self.classes = program.classes
        self.copies = program.copies
        self.written = [c.index for own in program.carried for c in program.alike(own)]
        """The inputs that the graph overwrites, those of members left out among them."""
        self.residuals = [c.index for c in program.residual_inputs]
        self.operations: dict[Node, tuple[Any, Any, Any]] = {}

    @staticmethod
    def of(program: Program) -> "ExactGraph | None":
        """Return the exact graph of a rewritten program, if it is small enough to be kept."""
        nodes = graph_of(program.canonical).graph.nodes
        return ExactGraph(program) if len(nodes) <= LARGEST else None

    @functools.cached_property
    def functions(self) -> list[Function] | NotExact:
        """Return each class's function from a member's inputs to new values of 16-bit states."""
        try:
            return [_function(one) for one in self.classes]
        except NotExact as why:
            return why

    def begin(
        self, inputs: Sequence[Any], residuals: Sequence[tuple[str, Sequence[Tensor]]]
    ) -> "ExactStep":
        """Note the inputs of a call before it, and copy those that it overwrites.

        Args:
            inputs: of the graph, then of the members that were left out of it.
            residuals: the storage and the components of each residual that it takes.

        Raises NotExact.
        """
        if isinstance(self.functions, NotExact):
            raise self.functions
        words = [Words(x) for x in inputs]
        for index, (storage, components) in zip(self.residuals, residuals, strict=True):
            words[index] = Words(words[index].high, tuple(components), storage)
        before = {i: words[i].each(_copy) for i in self.written}
        return ExactStep(self, self.functions, words, before)

    def updated(self, inputs: Sequence[Any]) -> Iterator[Tensor]:
        """Yield the 16-bit states of classes among the inputs of a call; raises NotExact."""
        if isinstance(self.functions, NotExact):
            raise self.functions
        for one in self.classes:
            for part in one.members:
                for row in self.rows(part):
                    yield from (inputs[row.get(c.index, c.index)] for c, _ in narrow_states(part))

    def rows(self, part: Slice) -> Iterator[dict[int, int]]:
        """Yield replacements of a slice's inputs: none, then those for each slice it stands for."""
        yield {}
        states = {c.index for c, _, _ in part.states}
        for copies in self.copies:
            if states & set(copies.inputs):
                for other in copies.others:
                    yield {i: o.index for i, o in zip(copies.inputs, other, strict=True)}

    def operation(self, node: Node) -> tuple[Any, Any, Any]:
        """Return the result of `operation`, looked up once."""
        if node not in self.operations:
            self.operations[node] = operation(node)
        return self.operations[node]


def narrow_states(part: Slice) -> list[tuple[Carried, int]]:
    """Return the 16-bit states of a slice, each with its position among the inputs of that."""
    return [(c, at) for c, at, _ in part.states if c.val.dtype in LOW_PRECISION]


def _function(one: StateClass) -> Function:
    for part in one.members:
        for node in part.inputs:
            # In float64 it would be another than the step has had, which may be meant in 16 bits.
            if value_of(node).dim() and not _is_given(node) and node.target is not low_word:
                raise NotExact(f"an update is made of what {node.target} makes")
    part = one.representative
    new = {c.index: value for c, _, value in part.states}
    wanted = [new[c.index] for c, _ in narrow_states(part)]
    return in_float64(part.nodes, part.inputs, wanted)


@dataclass
class ExactStep:
    """One call of a graph: what its inputs were."""

    graph: ExactGraph
    functions: list[Function]
    words: list[Words]
    """The inputs, which hold after the call what it has made of them."""
    before: dict[int, Words]
    """States that it overwrites, as they were."""

    def classes(self) -> Iterator[list["Member"]]:
        """Yield, after the call, the members of each class."""
        numbers: dict[Node, Any] = {}
        for function, one in zip(self.functions, self.graph.classes, strict=True):
            yield [
                Member(self, function, part, row, {} if row else numbers)
                for part in one.members
                for row in self.graph.rows(part)
            ]


@dataclass
class Member:
    """A slice of a call of a graph, or one that it stands for."""

    call: ExactStep
    function: Function
    """Function that makes the new values of its 16-bit states out of its inputs, in float64."""
    part: Slice
    row: dict[int, int]
    """Input of the slice -> the input that it has instead."""
    numbers: dict[Node, Any]
    """0-d values made by what is in no slice, as far as they are known."""
    tensors: dict[Node, Any] = field(default_factory=dict)
    """Values of other nodes, of which such are made: they are kept until the inputs are known."""

    @functools.cached_property
    def states(self) -> list[int]:
        """The positions of its 16-bit states among its inputs."""
        return [at for _, at in narrow_states(self.part)]

    @functools.cached_property
    def inputs(self) -> list[Words]:
        """Inputs before the call; raises NotExact."""
        inputs = [self._input(n) for n in self.part.inputs]
        self.tensors.clear()
        return inputs

    @functools.cached_property
    def new(self) -> list[Words]:
        """16-bit states after the call."""
        carried = (c.index for c, _ in narrow_states(self.part))
        return [self.call.words[self.row.get(i, i)].unpacked() for i in carried]

    @functools.cached_property
    def alike(self) -> bool:
        """True if all that is not 0-d lies in memory in one and the same dense order."""
        words = [w for w in (*self.inputs, *self.new) if w.full]
        if not words:  # of 0-d tensors
            return False
        first = words[0].high
        return aten.is_non_overlapping_and_dense(first) and all(
            t.size() == first.size() and t.stride() == first.stride()
            for w in words
            for t in (w.high, *w.lows)
        )

    def updates(self) -> Iterator[Update]:
        """Yield the call's updates of its 16-bit states, piece by piece.

        Raises whatever an operation raises that wants 16 bits.
        """
        inputs, new = self.inputs, self.new
        tensors = [words.high for words in new]
        size = step = tensors[0].numel() if tensors else 0
        if not size:
            return
        if self.alike:
            inputs, new = [w.flat() for w in inputs], [w.flat() for w in new]
            step = min(size, piece_for(tensors[0].device))
        for start in range(0, size, step):
            piece = slice(start, start + step) if step < size else None
            given, now = [w.piece(piece) for w in inputs], [w.piece(piece) for w in new]
            values = [w.value() for w in given]
            made = self.function(*values)
            exact = [x.expand_as(w.high) for x, w in zip(made, now, strict=True)]
            for k, at in enumerate(self.states):
                yield Update(
                    tensors[k], given[at].high, values[at], now[k].high, now[k].value(), exact[k]
                )

    def _input(self, node: Node) -> Words:
        """Return an input of the slice: of the graph, or made by what is in no slice."""
        if node.target is low_word:
            return Words(None)  # the state itself has its low words
        if node.op != "placeholder":
            return Words(self._value(node))
        index = self.call.graph.place[node]
        index = self.row.get(index, index)
        return (self.call.before.get(index) or self.call.words[index]).unpacked()

    def _value(self, node: Node) -> Any:
        if node.op == "placeholder":
            return self._input(node).value()
        for known in (self.numbers, self.tensors):
            if node in known:
                return known[node]
        target, args, kwargs = self.call.graph.operation(node)
        value = target(*_mapped(args, self._value), **_mapped(kwargs, self._value))
        large = isinstance(value, list | tuple) or (isinstance(value, Tensor) and value.dim())
        (self.tensors if large else self.numbers)[node] = value
        return value


def piece_for(device: torch.device) -> int:
    """Return of how many elements operations are done together on a device.

    On a CPU what lies in the cache is done faster, and by one thread, which waits for no other.
    """
    return _ON_CPU if device.type == "cpu" else _ON_OTHERS


def in_float64(nodes: Sequence[Node], inputs: Sequence[Node], wanted: Sequence[Node]) -> Function:
    """Return a function that does these operations in float64.

    Args:
        nodes: the operations, in an order in which they can run.
        inputs: the nodes whose values it takes.
        wanted: those whose values it returns.
    """
    graph = Graph()
    env: dict[Node, Any] = {n: graph.placeholder(f"input{i}") for i, n in enumerate(inputs)}
    for node in nodes:
        if node.target in JOINS:
            env[node] = env[node.all_input_nodes[0]]
            continue
        if node.target is CONVERT:
            operand: Any = node.args[0]
            if value_of(node).is_floating_point() and value_of(operand).is_floating_point():
                env[node] = env[operand]
                continue
        target, args, kwargs = operation(node)
        args, kwargs = map_arg((args, kwargs), env.__getitem__)
        env[node] = graph.call_function(target, args, kwargs)
    graph.output(tuple(env[n] for n in wanted))
    graph.eliminate_dead_code()
    return GraphModule(torch.nn.Module(), graph)


def _is_given(node: Node) -> bool:
    """Return True if a tensor is an input of the graph, a view of one, or made of numbers."""
    while getattr(node.target, "is_view", False):
        node = node.all_input_nodes[0]
    return not node.all_input_nodes


def _wide(a: Any) -> Any:
    """Return float64 for a floating dtype, anything else as it is."""
    return torch.float64 if isinstance(a, torch.dtype) and a.is_floating_point else a


def not_in_wider(target: Any) -> str:
    """Return the reason why an operation, done in a wider dtype, is another; empty if it is not."""
    if getattr(target, "namespace", "aten") not in ("aten", "prims"):
        return f"{target} is not done twice"
    if draws(target):
        return f"{target} draws random numbers"
    return f"{target} takes a tensor for its bits" if target is aten.view.dtype else ""


def operation(node: Node) -> tuple[Any, Any, Any]:
    """Return the operation of a node in float64, its arguments, and those by name.

    Raises NotExact if doing it again makes something else.
    """
    target: Any = node.target
    if node.op != "call_function":
        raise NotExact(f"{target} is a constant of the graph")
    if target is low_word:
        raise NotExact("a residual has no value by itself")
    if why := not_in_wider(target):
        raise NotExact(why)
    args, kwargs = map_aggregate((node.args, node.kwargs), _wide)
    return target, args, kwargs


def _mapped(args: Any, value: Callable[[Node], Any]) -> Any:
    """Return arguments with values in the place of nodes: a faster `map_arg`."""
    if isinstance(args, list | tuple):
        return [value(a) if isinstance(a, Node) else _mapped(a, value) for a in args]
    if isinstance(args, dict):
        return {k: value(a) if isinstance(a, Node) else _mapped(a, value) for k, a in args.items()}
    return args


def _copy(t: Tensor) -> Tensor:
    """Return a copy, made by this thread alone: a pool of threads on a busy CPU takes longer."""
    if not t.is_cpu or not aten.is_non_overlapping_and_dense(t):
        return t.clone()
    new = torch.empty_like(t)
    ctypes.memmove(new.data_ptr(), t.data_ptr(), t.nbytes)
    return new
