"""Pass 10: rewrite the representative of each class on expansions."""

import operator
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from collage_fx.passes.analysis.affine import LERP
from collage_fx.passes.analysis.carried_path import eft_storage, stored_wider
from collage_fx.passes.ir.graph_memory import note_origin
from collage_fx.passes.ir.own_errors import roundings_for_errors
from collage_fx.passes.ir.program import (
    CASTS,
    CONVERT,
    Carried,
    OnUnsupported,
    Program,
    Rewritten,
    value_of,
)
from collage_fx.passes.rules import RULES
from collage_fx.passes.rules.builder import Builder, Call, Components, Decayed, Expanded
from collage_fx.passes.rules.join_split import join_op_split
from collage_fx.runtime.errors import RuleError, UnsupportedError, own_name
from collage_fx.runtime.expansion.eft import WIDER, computed_in
from collage_fx.runtime.ops import JOIN, JOINS, SPLIT, SPLIT_BY_CHANCE, collage

aten = torch.ops.aten

_getitem = operator.getitem
_COPIES = {aten.clone.default, aten.alias.default}
"""Operations whose result is their operand, perhaps laid out otherwise in memory."""


def expand(program: Program) -> None:
    """Make the expanded graph of each class: the one that a person reads.

    Arithmetic `eft`: operations on a carried path become collage:: operations by the rules, all
    others stay as they are, in the dtype they had; an expansion that leaves its own carried path is
    read whole, joined in the wide dtype, and the result of that operation rounded once: a
    difference of old and new value would be nothing in the high words. Run eagerly, this graph is
    the reference for the compiled step.

    Before (beta2 = 0.999)::

        mul = aten.mul.Tensor(exp_avg_sq, 0.999)
        add = aten.add.Tensor(mul, square)

    After::

        mul = collage.mul.constant(exp_avg_sq, exp_avg_sq_lo, 1.0, -0.000999451)
        grow = collage.grow(mul[0], mul[1], square)

    Arithmetic `wide`: compensated states are joined, everything is computed in fp32 without
    rounding in between, but for those whose errors the step computes, and new values are split (or
    rounded, where the state is plain) at the end, with `stochastic_rounding` by chance.
    So are slices whose states have a storage without transformations, fp8 ones, or not all the same
    storage, and those that store in fp32 what they compute on a carried path. Slices with an fp32
    state that is compensated are computed in float64.
    """
    wider = stored_wider(program)
    for rewritten in program.rewritten:
        storage, reason = eft_storage(program, rewritten, wider)
        if reason:
            rewritten.joined.append(reason)
        on_paths = program.settings.on_unsupported
        expander = Eft(rewritten, storage, on_paths) if storage else _Wide(rewritten)
        rewritten.expanded = expander.run()


class _Expander:
    """Base of both arithmetics: inputs, outputs and appending operations."""

    def __init__(self, rewritten: Rewritten) -> None:
        self.rewritten = rewritten
        self.part = rewritten.model
        self.graph = Graph()
        self.env: dict[Node, Any] = {}
        self.highs: dict[int, Node] = {}
        """Position of a marked state -> its high word before the step."""
        self.origin: Node | None = None

    def op(self, target: Any, *args: Any, dtype: torch.dtype, **kwargs: Any) -> Node:
        """Append an operation with one result of this dtype."""
        kwargs.pop("memory_format", None)  # the slice is traced on tensors of one dimension
        node = self.graph.call_function(target, args, kwargs)
        node.meta["dtype"] = dtype
        node.meta["scalar"] = all(n.meta["scalar"] for n in node.all_input_nodes)
        note_origin(node, self.origin)
        return node

    def several(self, target: Any, *args: Any, dtypes: tuple[torch.dtype, ...]) -> Components:
        """Append an operation that returns values of these dtypes, or one as it is."""
        if len(dtypes) == 1:
            return (self.op(target, *args, dtype=dtypes[0]),)
        all_ = self.op(target, *args, dtype=dtypes[0])
        return tuple(self.op(_getitem, all_, i, dtype=dtype) for i, dtype in enumerate(dtypes))

    def convert(self, x: Node, dtype: torch.dtype) -> Node:
        """Return x in dtype."""
        return x if x.meta["dtype"] == dtype else self.op(CONVERT, x, dtype, dtype=dtype)

    def placeholders(self) -> dict[Node, list[Node]]:
        """Append the inputs; return each old value in the slice with its residual placeholders."""
        names = {at: _short(c) for c, at, _ in self.part.states}
        for at, node in enumerate(self.part.inputs):
            self.env[node] = self._placeholder(names.get(at, f"in{at}"), value_of(node).dtype, node)
        olds = {self.part.old(i): self.rewritten.residuals(i) for i in self.rewritten.storages}
        lows = {
            old: [self._placeholder(f"{self.env[old].target}_lo", d, old) for d in dtypes]
            for old, dtypes in olds.items()
        }
        for i in self.rewritten.marked:
            old = self.part.old(i)
            self.highs[i] = self.env[old]
            self._placeholder(f"{self.env[old].target}_changed", torch.bool, old)
        return lows

    def _placeholder(self, name: str, dtype: torch.dtype, origin: Node) -> Node:
        """Append an input of the shape of a node of the slice."""
        new = self.graph.placeholder(name)
        new.target = new.name  # which is another one where that is taken
        new.meta.update(dtype=dtype, scalar=value_of(origin).dim() == 0)
        note_origin(new, origin)
        return new

    def finish(self, outputs: list[Node], words: Callable[[Node], Sequence[Node]]) -> GraphModule:
        """Append the output and return the graph as a module.

        Args:
            outputs: those of the slice.
            words: returns the words of the new value of a compensated state.
        """
        new = {i: self.part.states[i][2] for i in self.rewritten.storages}
        outputs = outputs + [lo for n in new.values() for lo in words(n)[1:]]
        for i, high in self.highs.items():
            self.origin = new[i]
            both = high, words(new[i])[0]
            outputs.append(self.op(collage.changed.default, *both, dtype=torch.bool))
        self.graph.output(tuple(outputs))
        self.graph.eliminate_dead_code()
        self.graph.lint()
        return GraphModule(torch.nn.Module(), self.graph)


def _short(carried: Carried) -> str:
    return re.sub(r"\W+", "_", carried.kind).strip("_") or "state"


class Eft(_Expander, Builder):
    """Every operation in the storage dtype, those on carried paths with their error caught."""

    def __init__(self, rewritten: Rewritten, storage: str, on_unsupported: OnUnsupported) -> None:
        super().__init__(rewritten)
        self.storage = storage
        self.on_unsupported = on_unsupported

    def run(self) -> GraphModule:
        """Return the expanded graph."""
        for old, lows in self.placeholders().items():
            self.env[old] = (self.env[old], *lows)
        before: dict[Node, Node] = {}
        for i in self.rewritten.storages:
            before |= self.rewritten.recurrences[i].steps(self.part.old(i))
        for node in self.part.nodes:
            self.origin = node
            self.env[node] = (
                self._on_path(node, before[node]) if node in before else self._plain_op(node)
            )
        outputs = []
        for node in self.part.outputs:
            self.origin = node
            outputs.append(self.plain(node))
        return self.finish(outputs, self.settled)

    def components(self, target: Any, *args: Any, dtype: torch.dtype) -> Components:
        """Append an operation that returns an expansion of this dtype."""
        return self.several(target, *args, dtypes=(dtype,) * self.count)

    def _on_path(self, node: Node, previous: Node) -> Expanded:
        x: Expanded = self.env[previous]
        self.dtype = (x.pair if isinstance(x, Decayed) else x)[0].meta["dtype"]
        at = node.args.index(previous)
        rule = RULES.get(node.target)
        if rule is None and self.on_unsupported == "error":
            raise UnsupportedError(f"{node.target} has no rule: {self._facts(node)}. {WAY_OUT}")
        try:
            return (rule or join_op_split)(self, node, x, at)
        except Exception as error:
            raise RuleError(
                f"the rule of {node.target} failed with {type(error).__name__}: {error}; "
                f"{self._facts(node)}. Please report this; arithmetic='wide' needs no rules"
            ) from error

    def _facts(self, node: Node) -> str:
        """Describe a node: its name, its carried path, and its line in the user's code."""
        states = [
            self.part.states[i][0].name
            for i in self.rewritten.storages
            if node in self.rewritten.recurrences[i].carried_path
        ]
        trace = node.meta.get("stack_trace") or "unknown: it has no stack trace"
        return f"node {node.name}, on the path of {', '.join(states)}; written at {_line_of(trace)}"

    def _plain_op(self, node: Node) -> Any:
        dtype = value_of(node).dtype
        if node.target in _COPIES:
            (of,) = node.all_input_nodes
            return self.settled(of) if isinstance(self.env[of], Decayed) else self.env[of]
        whole = [a for a in node.all_input_nodes if isinstance(self.env[a], tuple | Decayed)]
        if whole:
            self.dtype = self.settled(whole[0])[0].meta["dtype"]
        read = self.widened if whole else self.plain
        wide = computed_in(dtype)
        if node.target in LERP:
            start, end = (self.convert(read(a), wide) for a in node.args[:2])
            return self.convert(lerp(self, start, end, self.plain(node.args[2]), wide), dtype)
        args = [torch.fx.node.map_arg(a, read) for a in node.args]
        if not whole or node.target is CONVERT:
            return self.again(node, args, dtype)
        return self.convert(self.again(node, args, wide), dtype)

    def joined(self, node: Call) -> None:
        """Note a node that ran as join - op - split."""
        self.rewritten.joined.append(str(node.target))


WAY_OUT = (
    "on_unsupported='join' applies it in fp32 to the whole value, arithmetic='wide' does so for "
    "the whole step; or write the update with operations that collage_fx.passes.rules.RULES lists"
)


def _line_of(trace: str) -> str:
    """Return the innermost line of a stack trace and its text, as one line."""
    lines = [own_name(line.strip()) for line in trace.strip().splitlines()]
    starts = [i for i, line in enumerate(lines) if line.startswith("File ")]
    return ": ".join(lines[starts[-1] : starts[-1] + 2]) if starts else lines[-1]


class _Wide(_Expander):
    """Everything in fp32, or float64 for states of fp32; split or rounded once at the end."""

    def __init__(self, rewritten: Rewritten) -> None:
        super().__init__(rewritten)
        dtypes = (self.part.states[i][0].val.dtype for i in rewritten.storages)
        self.double = any(WIDER[dtype] == torch.float64 for dtype in dtypes)
        self.words: dict[Node, Node] = {}
        """Inputs as they are given, for operations that join them."""

    def _wide(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which values of a dtype are computed."""
        return torch.float64 if self.double and dtype.is_floating_point else computed_in(dtype)

    def run(self) -> GraphModule:
        """Return the expanded graph."""
        residuals = self.placeholders()
        storages = dict(zip(residuals, self.rewritten.storages.values(), strict=True))
        for node in self.part.inputs:
            self.origin, new = node, self.env[node]
            dtype, self.words[node] = new.meta["dtype"], new
            if node in residuals:
                join = JOIN[storages[node]]
                new = self.op(join, new, *residuals[node], dtype=WIDER[dtype])
            self.env[node] = self.convert(new, self._wide(dtype))
        chance = self._chance()
        compensated = {self.part.states[i][2] for i in self.rewritten.storages}
        rounded = roundings_for_errors(self.part, compensated)
        for node in self.part.nodes:
            self.origin = node
            x = self._wide_op(node)
            if node in rounded:
                x = self.convert(self.convert(x, value_of(node).dtype), x.meta["dtype"])
            self.env[node] = x
        return self._outputs(chance)

    def _chance(self) -> list[Node]:
        """Append the inputs by which values are rounded by chance: a seed, and positions."""
        if not self.rewritten.by_chance:
            return []
        states = (self.part.states[i][0].val for i in self.rewritten.storages)
        scalar = {"seed": True, "position": not any(val.dim() for val in states)}
        made = []
        for name, is_scalar in scalar.items():
            made.append(self.graph.placeholder(name))
            made[-1].meta.update(dtype=torch.int32, scalar=is_scalar)
        return made

    def _wide_op(self, node: Node) -> Node:
        dtype = value_of(node).dtype
        if node.target in CASTS and dtype.is_floating_point:
            x: Node = self.env[node.args[0]]  # type: ignore[index]
            if x.meta["dtype"].is_floating_point and self._wide(dtype) != dtype:
                # A number stays as exact as it is; beside it a tensor decides in which dtype.
                return x if x.meta["scalar"] else self.convert(x, self._wide(dtype))
            return self.convert(x, self._wide(dtype))
        wide = self._wide(dtype)
        if node.target in JOINS:
            words = map(self.words.__getitem__, node.all_input_nodes)
            return self.convert(self.op(node.target, *words, dtype=dtype), wide)
        taken: Any = torch.fx.node.map_arg((node.args, dict(node.kwargs)), self.env.__getitem__)
        args, kwargs = taken
        if node.target in LERP:
            start, end, weight = args
            return lerp(self, start, end, weight, wide)
        return self.op(node.target, *args, dtype=wide, **kwargs)

    def _outputs(self, chance: list[Node]) -> GraphModule:
        whole = {}
        for i, storage in self.rewritten.storages.items():
            self.origin = new = self.part.states[i][2]
            dtype = value_of(new).dtype
            dtypes = (dtype, *self.rewritten.residuals(i))
            value = self.convert(self.env[new], WIDER[dtype])
            by_chance = storage in self.rewritten.by_chance
            split = SPLIT_BY_CHANCE[storage] if by_chance else SPLIT[storage]
            given = chance if by_chance else ()
            whole[new] = self.several(split, value, dtype, *given, dtypes=dtypes)
        outputs = []
        for n in self.part.outputs:
            self.origin = n
            plain = None if n in whole else self.convert(self.env[n], value_of(n).dtype)
            outputs.append(plain or whole[n][0])
        return self.finish(outputs, whole.__getitem__)


def lerp(b: _Expander, start: Node, end: Node, weight: Any, dtype: torch.dtype) -> Node:
    """Return lerp as ATen computes it: from the nearer end, if the weight is known."""
    difference = b.op(aten.sub.Tensor, end, start, dtype=dtype)
    if isinstance(weight, Node) or weight < 0.5:
        step = b.op(aten.mul.Tensor, difference, weight, dtype=dtype)
        return b.op(aten.add.Tensor, start, step, dtype=dtype)
    step = b.op(aten.mul.Tensor, difference, 1 - weight, dtype=dtype)
    return b.op(aten.sub.Tensor, end, step, dtype=dtype)
