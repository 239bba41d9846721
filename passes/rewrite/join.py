"""Pass 9: do the whole graph on joined values, where slices would lose a part of a state."""

import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_aggregate, map_arg

from collage_fx.passes.analysis.plan import storage_of
from collage_fx.passes.frontend.capture import not_held
from collage_fx.passes.frontend.whole_reads import readable_whole
from collage_fx.passes.ir.exact import not_in_wider
from collage_fx.passes.ir.graph_memory import fake_mode_of, mutations
from collage_fx.passes.ir.program import (
    CONVERT,
    LOW_PRECISION,
    SAME_VALUE,
    Carried,
    Program,
    StatePlan,
    Unlike,
    compensable_in,
    is_tensor,
    value_of,
)
from collage_fx.passes.ir.verdict import UNKNOWN, Change, Verdict, VerdictKind
from collage_fx.passes.rewrite.residual_inputs import add_members, add_residuals
from collage_fx.passes.rewrite.roundings import keep_roundings
from collage_fx.passes.rewrite.wider import on_wider
from collage_fx.runtime.expansion.eft import FP8, wider_dtypes
from collage_fx.runtime.storage.registry import (
    STORAGES,
    compensable_dtypes,
    is_by_chance,
    join_in,
    refusal,
    split_into,
)
from collage_fx.runtime.torch_private import (
    select_decomp_table,
)

aten = torch.ops.aten


def join(program: Program) -> None:
    """Make the graph that Inductor compiles, if slices would lose what joined values keep.

    That is so where a state would be refused, where `escape` has found a loss, where a parameter is
    computed anew, and where a gradient has a residual, or another state that is only read and of
    which the low word matters; if slices can read all these whole, the passes are to begin again,
    with `Program.wholes` in them. Each expansion enters the graph as the number that it is, in fp32
    (float64 with arithmetic `eft`), the operations are done on these as they stand, without a
    rounding in between, and new values are split when they are stored: no operation needs a rule.
    Every state that may have a residual has one. There are no classes then.

    Before::

        amax = aten.amax.default(arg0_1, [1])
        copy_ = aten.copy_.default(arg0_1, ...)

    After::

        joined = aten.add.Tensor(hi32, lo32)        # of arg0_1 and arg0_1_lo
        amax = aten.amax.default(joined, [1])
        copy_ = aten.copy_.default(arg0_1, hi)
        copy__1 = aten.copy_.default(arg0_1_lo, lo)
    """
    read = _read(program)
    anew = [c for c in read.values() if c.index not in program.read_whole]
    needed = [c for c in anew if c.index in program.reads or c.gradient]
    whole = readable_whole(program, needed)
    if needed and whole.issuperset(c.index for c in needed):
        program.wholes = program.read_whole | whole
        return
    # With takers the graph is compiled again, with residuals for these.
    if not program.joins or (program.takers and not program.keep):
        return
    why = _loss(program) or next((f"{c.name} is read, and has a residual" for c in needed), "")
    if why and program.copies and not program.called:
        program.unlike = Unlike(f"the graph is done on joined values, as {why}")
    elif why and not _obstacle(program, read):
        _Joiner(program, read, why).run()


def _loss(program: Program) -> str:
    """Return the loss that slices would have; empty if none."""
    params = {c.index for c in program.carried if c.owner == "param"}
    for state in (s for s in program.plan if s.compensable):
        if state.refused:
            return f"{state.name}: {state.reason}"
        anew = program.is_step and state.index in params and state.computed_anew
        if anew and not state.compensated:
            return f"{state.name} is computed anew, and not added to"
    return program.lost[0] if program.lost else ""


def _read(program: Program) -> dict[Node, Carried]:
    """Return the states that the graph only reads, and that have a residual.

    A gradient that it overwrites with zeros counts among these.
    Of those that members left out read in their places, the first is in the graph.
    """
    inputs = dict(enumerate(program.source.graph.find_nodes(op="placeholder")))
    low = {i for i, n in inputs.items() if is_tensor(n) and value_of(n).dtype in LOW_PRECISION}
    compensated = {s.index for s in program.plan if s.compensated}
    written = {c.index for c in program.carried if not c.gradient or c.index in compensated}
    found = {inputs[i]: program.describe(i, inputs[i]) for i in low - written}
    return {node: carried for node, carried in found.items() if carried.present}


def _obstacle(program: Program, read: dict[Node, Carried]) -> str:
    """Return the reason why a graph cannot be done on joined values; empty if it can."""
    graph = program.source.graph
    inputs = graph.find_nodes(op="placeholder")
    choice = program.settings.storage
    if program.settings.stochastic_rounding or any(
        is_by_chance(compensable_in(c, choice)) for c in program.carried
    ):
        return "states are rounded by chance"
    written = mutations(graph)
    results = [n for n in graph.output_node().all_input_nodes if n not in written.values()]
    states = {inputs[c.index] for c in program.carried} | read.keys()
    made = [value_of(n) for n in results if is_tensor(n) and not _is_copy(n, states)]
    # Of a step a 0-d one of 16 bits may become a state; of a function it is a loss, say.
    held = LOW_PRECISION if program.is_step else ()
    if any(v.is_floating_point() and (v.dim() or v.dtype in held) for v in made):
        return "a result would be rounded for what goes on with it"
    if any(value_of(n).dtype in FP8 for n in filter(is_tensor, inputs)):
        return "fp8 is not rounded by the compiler"
    for carried in program.carried:
        if why := not_held(inputs[carried.index], carried):
            return why
        storage = compensable_in(carried, program.settings.storage)
        if storage and (why := refusal(carried.val.dtype, storage, carried.name)):
            return why
    targets = {n.target for n in graph.nodes if n.op == "call_function"}
    if any("_fused_" in str(target) for target in targets):
        return "an operation is fused, in the dtypes of the step"
    return next(filter(None, map(not_in_wider, targets)), "")


def _is_copy(node: Node, states: set[Node]) -> bool:
    """Return True if a result is the value of an input that is no state: it has no low word."""
    while node.target in SAME_VALUE:
        (operand,) = node.all_input_nodes
        if value_of(operand).dtype != value_of(node).dtype:
            break
        node = operand
    return node.op == "placeholder" and node not in states


class _Joiner:
    """Builder of the graph of joined values."""

    def __init__(self, program: Program, read: dict[Node, Carried], why: str) -> None:
        self.program = program
        self.read = read
        self.why = why
        self.source = program.source.graph
        self.graph = Graph()
        self.env: dict[Node, Any] = {}
        settings = program.settings
        self.wide, self.computed = wider_dtypes(
            compensable_dtypes(settings.storage), in_float64=settings.arithmetic == "eft"
        )
        inputs = self.inputs = self.source.find_nodes(op="placeholder")
        may = {s.index for s in program.plan if s.compensable}
        self.held = {
            inputs[c.index]: c for c in program.carried if c.index in may and not c.left_alone
        }
        self.storages = {n: storage_of(c, settings.storage) for n, c in self.held.items()}
        self.traced: dict[Any, Graph] = {}
        """Graphs that join or split tensors, by dtype, storage and kind."""

    def run(self) -> None:
        """Fill in `result` and `residual_inputs`, and make the verdicts those of this graph."""
        given = {node: self.graph.node_copy(node) for node in self.inputs}
        add_members(self.program, self.graph, self.inputs)
        joined = self.storages | {n: c.present for n, c in self.read.items()}
        # Those of states that are only read come last.
        lows = {n: self._residuals(n, c, joined[n]) for n, c in (self.held | self.read).items()}
        with fake_mode_of(self.inputs):
            for node in self.inputs:
                self.env[node] = self._entered(given[node], lows.get(node, ()), joined.get(node))
            for node in self.source.nodes:
                if node.op == "get_attr":
                    self.env[node] = self._entered(self.graph.node_copy(node), (), None)
                elif node.op == "call_function" and node.target is not aten.copy_.default:
                    self.env[node] = self._operation(node)
            for node, new in mutations(self.source).items():
                # The residual of a gradient that is zeroed is cleared by the caller.
                own = lows[node] if node in self.held else ()
                for to, word in zip([given[node], *own], self._stored(node, new), strict=True):
                    self._call(aten.copy_.default, to, word)
            self._results(given)
        self.graph.lint()
        self.program.result = GraphModule(self.program.source, self.graph)
        self.program.joined = True
        keep_roundings(self.program.result)
        verdicts = {
            c.index: (c, self.storages[node])
            for node, own in self.held.items()
            for c in self.program.alike(own)
        }
        self.program.plan = [
            self._verdict(state, *verdicts[state.index]) if state.index in verdicts else state
            for state in self.program.plan
        ]
        self.program.lost = []
        known = {carried.index for carried in self.read.values()}
        self.program.reads = {i: n for i, n in self.program.reads.items() if i not in known}

    def _residuals(self, node: Node, carried: Carried, storage: str) -> list[Node]:
        mine = add_residuals(self.program, self.graph, carried, f"{node.name}_lo", storage)
        for other in self.program.others.get(carried.index, []):
            name = f"{node.name}_other{other.index}_lo"
            add_residuals(self.program, self.graph, other, name, storage)
        return mine

    def _entered(self, x: Node, lows: Sequence[Node], storage: str | None) -> Node:
        """Return an input as it is computed with: joined, widened, or as it is."""
        if not is_tensor(x):
            return x
        dtype = value_of(x).dtype
        if storage:
            wide = self.wide[dtype]
            joined: Node = self._inlined(
                lambda *words: join_in(wide, storage, *words), ("join", wide, storage), [x, *lows]
            )
            return joined
        return self._converted(x, self.computed.get(dtype, dtype))

    def _operation(self, node: Node) -> Any:
        """Append an operation in the wider dtypes; return its result, a tuple if there are some."""
        of: Any = node.args[0] if node.args else None
        if node.target is operator.getitem and isinstance(self.env[of], tuple):
            return self.env[of][node.args[1]]
        dtype = value_of(of).dtype if isinstance(of, Node) and is_tensor(of) else None
        function = on_wider(node.target, dtype)
        if function is not node.target and all(map(is_tensor, node.all_input_nodes)):
            return self._on_wider(node, function)
        new = self.graph.node_copy(node, self.env.__getitem__)
        args, kwargs = map_aggregate(
            (new.args, new.kwargs),
            lambda a: self.computed.get(a, a) if isinstance(a, torch.dtype) else a,
        )
        new.args, new.kwargs = args, kwargs
        before = node.meta.get("val")
        if not isinstance(before, Tensor | list | tuple):
            return new  # a number
        args, kwargs = map_arg((new.args, new.kwargs), lambda n: n.meta["val"])
        target: Any = node.target
        new.meta["val"] = target(*args, **kwargs)
        if not isinstance(before, Tensor):
            return new  # a list, of which the items come next
        return self._converted(new, self.computed.get(before.dtype, before.dtype))

    def _on_wider(self, node: Node, function: Callable[..., Any]) -> Any:
        """Append what does an operation on wider values; return the result, or a tuple of them."""
        args, xs = map_arg(node.args, self.env.__getitem__), list[Node]()
        name = (node.target, str(getattr(function, "args", "")), str(map_arg(args, xs.append)))

        def done(*tensors: Tensor) -> Any:
            given = iter(tensors)
            made = function(*map_arg(args, lambda _: next(given)))
            return tuple(made) if isinstance(made, list) else made

        made, before = self._inlined(done, name, xs), node.meta["val"]
        if not isinstance(made, tuple):
            return self._converted(made, self.computed.get(before.dtype, before.dtype))
        dtypes = (self.computed.get(v.dtype, v.dtype) for v in before)
        return tuple(itertools.starmap(self._converted, zip(made, dtypes, strict=True)))

    def _stored(self, node: Node, new: Node) -> list[Node]:
        """Return the words of the new value of an input."""
        dtype, storage = value_of(node).dtype, self.storages.get(node)
        if storage is None:
            return [self._converted(self.env[new], dtype)]
        words: tuple[Node, ...] = self._inlined(
            lambda x: split_into(storage, x, dtype), ("split", dtype, storage), [self.env[new]]
        )
        return list(words)

    def _results(self, given: dict[Node, Node]) -> None:
        """Append the output of the graph."""
        written = mutations(self.source)

        def result(node: Node) -> Node:
            if node.target is aten.copy_.default:
                return given[node.args[0]]  # type: ignore[index]
            val = node.meta.get("val")
            new: Node = self.env[node]
            return self._converted(new, val.dtype) if isinstance(val, Tensor) else new

        assert not set(written).intersection(self.source.output_node().all_input_nodes)
        self.graph.output(map_arg(self.source.output_node().args[0], result))

    def _call(self, target: Any, *args: Any) -> Node:
        """Append an operation."""
        node = self.graph.call_function(target, args)
        node.meta["val"] = target(*map_arg(args, lambda n: n.meta["val"]))
        return node

    def _converted(self, x: Node, dtype: torch.dtype) -> Node:
        return x if value_of(x).dtype == dtype else self._call(CONVERT, x, dtype)

    def _inlined(
        self, function: Callable[..., Any], name: tuple[Any, ...], xs: Sequence[Node]
    ) -> Any:
        """Append what a function, of this name, does to values; return nodes as it does tensors."""
        vals = [value_of(x) for x in xs]
        key = (*name, *((v.shape, v.stride(), v.dtype, v.device) for v in vals))
        symbolic = any(isinstance(s, torch.SymInt) for v in vals for s in (*v.shape, *v.stride()))
        traced = None if symbolic else self.traced.get(key)
        if traced is None:
            # Tracing tells operands by the tensors, and `like` has one for all that are alike.
            own = [torch.empty_like(v) for v in vals]
            traced = make_fx(function, decomposition_table=select_decomp_table())(*own).graph
            if not symbolic:
                self.traced[key] = traced
        env = dict(zip(traced.find_nodes(op="placeholder"), xs, strict=True))
        return self.graph.graph_copy(traced, env)

    def _verdict(self, state: StatePlan, carried: Carried, storage: str) -> StatePlan:
        """Return the verdict on a state that has a residual in this graph."""
        joined = Verdict(VerdictKind.COMPENSATED, f"on joined values, since {self.why}")
        return replace(
            state,
            change=Change("nonlinear", "x' = f(x)") if state.change == UNKNOWN else state.change,
            decision=state.decision if state.compensated else joined,
            storage=storage,
            residual_bytes=STORAGES[storage].residual_bytes(carried.val),
        )
