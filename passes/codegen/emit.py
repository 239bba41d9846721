"""Pass 12: put the lowered slices into one graph for Inductor, with residuals as inputs."""

import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from collage_fx.passes.analysis.affine import LERP
from collage_fx.passes.analysis.plan import in_order
from collage_fx.passes.codegen.inductor_lowering import register_region
from collage_fx.passes.codegen.multi_tensor_kernel import (
    MULTI_TENSOR_KERNELS,
    Readers,
    conflicts,
    obstacle,
    readers_of,
    register_multi_tensor,
    register_scalar_kernel,
    unprintable,
)
from collage_fx.passes.codegen.replicas import LeftOutMember, LeftOutMembers
from collage_fx.passes.codegen.scalar_kernel import Scalars, scalars_of
from collage_fx.passes.frontend.decompose import like
from collage_fx.passes.frontend.slice import inverse
from collage_fx.passes.ir.graph_memory import draws, fake_mode_of, mutations
from collage_fx.passes.ir.program import (
    Carried,
    Program,
    Rewritten,
    Slice,
    Unlike,
    graph_of,
    low_word,
    other_outputs,
    value_of,
)
from collage_fx.passes.rewrite.residual_inputs import add_residuals
from collage_fx.passes.rewrite.roundings import keep_shared_roundings
from collage_fx.runtime.ops import JOINS, collage
from collage_fx.runtime.storage import changed_bits, nibbles
from collage_fx.runtime.storage.positions import positions
from collage_fx.runtime.storage.registry import Storage
from collage_fx.runtime.torch_private import select_decomp_table

aten = torch.ops.aten


def emit(program: Program) -> None:
    """Make the graph that Inductor compiles.

    Each member of a class becomes one `collage::region` node; what is in no rewritten slice is
    copied. The residual of each compensated state is an input after the graph's own inputs, and is
    overwritten at the end like the states themselves.

    After::

        region = collage.region([arg0_1, arg1_1, arg0_1_lo], "5f0c...")
        hi, lo = region[0], region[1]
        copy_ = aten.copy_.default(arg0_1, hi)        # as before
        copy__1 = aten.copy_.default(arg0_1_lo, lo)   # new

    A class of many members that do nothing but update or make states, each in one flat walk over
    its memory, becomes one `collage::multi_tensor` node instead (see `multi_tensor_kernel.py`), and
    no copies. What its members compute from 0-d tensors becomes another one before it (see
    `scalar_kernel.py`).

    A member whose slice a reduction leaves and enters again (a norm of the update that scales the
    update) becomes several regions, each as soon as its inputs are there.
    """
    _Emitter(program).run()


@dataclass
class _Stamp:
    """Member of a class on its way into the graph."""

    rewritten: Rewritten
    member: Slice
    residuals: list[Node]
    """Inputs of the graph, as memory holds them."""
    others: list[LeftOutMember]
    """The members for which it stands."""
    chance: list[Node] = field(default_factory=list)
    """The seed, and positions unless a kernel counts them, if it takes these."""
    lows: list[Node] = field(default_factory=list)
    """The residuals as a region takes them: of the shape of their states."""
    made: dict[int, Node] = field(default_factory=dict)
    """Positions of the lowered graph's results -> those of them that are in the graph."""

    @property
    def state(self) -> Carried:
        """A compensated state of it, by whose place elements are numbered: no 0-d one if it can."""
        found = [self.member.states[i][0] for i in self.rewritten.storages]
        return next((c for c in found if c.val.dim()), found[0])

    @property
    def kinds(self) -> list[tuple[Carried, Storage | None]]:
        """For each residual the state and the storage that it is of; None for bits of changes."""
        states = self.member.states
        return [(states[i][0], storage) for i, storage in self.rewritten.residual_storages]

    @property
    def pending(self) -> list[int]:
        """The positions of the results that are not in the graph yet."""
        count = len(self.member.outputs) + len(self.residuals)
        return [i for i in range(count) if i not in self.made]


class _Emitter:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.canonical = graph_of(program.canonical)
        self.graph = Graph()
        self.env: dict[Node, Node] = {}
        self.stamps: list[_Stamp] = []
        self.together: dict[Rewritten, list[_Stamp]] = {}
        """Classes that run as one operation."""
        self.scalars: dict[Rewritten, Scalars] = {}
        """0-d work of the members, for those that have some."""
        self.needs = functools.cache(_needs)
        self.region = functools.cache(_region_of)
        self.others = LeftOutMembers(program, self.graph)
        self.seeds: dict[torch.device, Node] = {}
        self.lows: list[Node] = []
        """Nodes that stand for residuals of states that the graph only reads."""

    def run(self) -> None:
        """Fill in `result` and `residual_inputs` of the program; or nothing, if it is `unlike`."""
        nodes = list(self.canonical.graph.nodes)
        placeholders = [n for n in nodes if n.op == "placeholder"]
        with fake_mode_of(placeholders):
            for node in placeholders:
                self._copy(node)
            self.others.add_inputs(self.env)
            if any(self.others.mixes(m) for r in self.program.rewritten for m in r.members):
                return
            self.lows = [n for n in nodes if n.target is low_word]
            self._choose()
            updated = [s.member for stamps in self.together.values() for s in stamps]
            updated += [m for scalars in self.scalars.values() for m in scalars.members]
            replaced = {n for s in self.stamps for n in s.member.nodes}
            replaced |= {n for member in updated for n in member.nodes}
            last = [n for n in nodes if n.op == "output" or n.target is aten.copy_.default]
            rest = set(nodes) - replaced - {*last, *placeholders, *self.lows}
            self._interleave([n for n in nodes if n in rest])
            vectors = {r: self._vectors(one, self.together[r]) for r, one in self.scalars.items()}
            for rewritten, stamps in self.together.items():
                self._multi_tensor(rewritten, stamps, vectors.get(rewritten, {}))
            done = {member.inputs[at] for member in updated for _, at, _ in member.states}
            for node in last[:-1]:
                if node.args[0] in done:
                    self.env[node] = self.env[node.args[0]]
                else:
                    self._copy(node)
            self._write_residuals()
            self._copy(last[-1])
            self.others.add_results(last[-1])
        self.others.check()
        if self.program.unlike is None:
            self.graph.lint()
            self.program.result = GraphModule(self.canonical, self.graph)
            keep_shared_roundings(self.program.result)

    def _copy(self, node: Node) -> None:
        if node.target in LERP:
            self.env[node] = self._polyfilled_lerp(node)
        elif node.target in JOINS:
            join: Any = node.target
            words = map(self.env.__getitem__, node.all_input_nodes)
            self.env[node] = self._traced(join, *words)
        else:
            self.env[node] = self.graph.node_copy(node, lambda n: self.env[n])

    def _read_whole(self, stamps: Sequence[_Stamp]) -> None:
        """Append the residuals of states that the graph only reads, for what stands for them."""
        add = functools.partial(add_residuals, self.program, self.graph)
        place = {node: index for index, node in enumerate(self.env)}
        made: dict[Any, tuple[list[Node], list[list[Node]]]] = {}
        for low in self.lows:
            state: Any
            k: Any
            state, k = low.args
            if state not in made:
                carried = self.program.describe(place[state], state)
                ours = add(carried, f"{state.name}_lo", carried.present)
                others = self.others.instead_of(carried.index)
                name = f"{state.name}_other"
                made[state] = ours, [add(c, f"{name}{c.index}_lo", c.present) for c in others]
            self.env[low] = made[state][0][k]
        for stamp in stamps:
            for state in made.keys() & stamp.member.inputs:
                ours, theirs = made[state]
                for other, its in zip(stamp.others if theirs else (), theirs, strict=True):
                    other.instead |= dict(zip(ours, its, strict=True))

    def _polyfilled_lerp(self, node: Node) -> Node:
        """Return lerp as Dynamo had it before `canonicalize`; Inductor has no lowering for it."""
        start, end, weight = torch.fx.node.map_arg(node.args, lambda n: self.env[n])
        difference = self.graph.call_function(aten.sub.Tensor, (end, start))
        step = self.graph.call_function(aten.mul.Tensor, (difference, weight))
        result = self.graph.call_function(aten.add.Tensor, (start, step))
        for new in (difference, step, result):
            new.meta = dict(node.meta)
        return result

    def _choose(self) -> None:
        """Divide the classes into those whose members share a kernel and the others."""
        classes = self.program.rewritten
        for rewritten in classes:
            device = value_of(rewritten.model.nodes[0]).device
            if rewritten.marked and unprintable(rewritten, device):
                _unmark(rewritten)
            rewritten.apart = self._obstacle(rewritten)
        members = [m for r in classes if not r.apart for m in r.members]
        readers = readers_of(self.canonical.graph)
        conflicting = conflicts(readers, members)
        for rewritten in classes:
            if not rewritten.apart and conflicting.intersection(rewritten.members):
                rewritten.apart = "a state of a member is read elsewhere, or through a view"
        together = [r for r in classes if not r.apart]
        self.scalars = self._scalars(together, readers)
        for rewritten in classes:
            stamps = [self._stamp(rewritten, member) for member in rewritten.members]
            if rewritten.apart:
                self.stamps += stamps
            else:
                self.together[rewritten] = stamps
        every = list(itertools.chain(self.stamps, *self.together.values()))
        self._read_whole(every)
        # The last inputs, behind all residuals.
        for stamp in every:
            if stamp.rewritten.by_chance:
                stamp.chance = [self._seed(stamp.state.val.device)]
        for stamp in self.stamps:
            if stamp.rewritten.by_chance:
                stamp.chance.append(self._positions(stamp.state))
            stamp.lows = list(map(self._unpacked, stamp.residuals, stamp.kinds))

    def _positions(self, state: Carried) -> Node:
        """Append the operations that number the elements of a state."""
        like = _whole_like(state)
        return self._traced(lambda: positions(like, state.place))

    def _unpacked(self, residual: Node, kind: tuple[Carried, Storage | None]) -> Node:
        """Return a residual in the shape of its state; bits of changes, which are not read."""
        state, storage = kind
        if storage is None or not storage.packed:
            return residual
        like = _whole_like(state)
        return self._traced(lambda bytes_: nibbles.unpacked(bytes_, like), residual)

    def _traced(self, function: Callable[..., Tensor], *operands: Node) -> Node:
        """Append the operations of a function of tensors."""
        own = [torch.empty_like(value_of(n)) for n in operands]
        traced = make_fx(function, decomposition_table=select_decomp_table())(*own).graph
        env = dict(zip(traced.find_nodes(op="placeholder"), operands, strict=True))
        made: Any = self.graph.graph_copy(traced, env)
        node: Node = made
        return node

    def _seed(self, device: torch.device) -> Node:
        """Return the input that is the seed on a device."""
        if device not in self.seeds:
            node = self.seeds[device] = self.graph.placeholder(f"seed{len(self.seeds) or ''}")
            node.meta["val"] = torch.empty((), dtype=torch.int32, device=device)
            self.program.seeds.append(device)
        return self.seeds[device]

    def _obstacle(self, rewritten: Rewritten) -> str:
        """Return the reason why the members of a class do not share a kernel; empty if they do."""
        settings = self.program.settings
        if not settings.multi_tensor:
            return "multi_tensor=False"
        rewritten.left_out = sum(len(self.others.of(member)) for member in rewritten.members)
        if self.program.called:
            return "they are calls of one compiled graph"
        return obstacle(rewritten, settings)

    def _scalars(self, together: list[Rewritten], readers: Readers) -> dict[Rewritten, Scalars]:
        """Return the 0-d work of each class that can have a kernel of its own."""
        graph = self.canonical.graph
        placeholders = graph.find_nodes(op="placeholder")
        states = {placeholders[c.index]: c for c in self.program.carried if c.val.dim() == 0}
        slices = [m for r in self.program.rewritten for m in r.members]
        inside = {n for m in slices for n in m.nodes}
        stored = inverse(mutations(graph))
        alone = self.others.taken_alone
        every = {r: scalars_of(r, states, stored, inside, alone) for r in together}
        found = {r: scalars for r, scalars in every.items() if scalars}
        parts = [m for scalars in found.values() for m in scalars.members]
        conflicting = conflicts(readers, [*parts, *(m for r in together for m in r.members)])
        return {r: s for r, s in found.items() if not conflicting.intersection(s.members)}

    def _multi_tensor(
        self, rewritten: Rewritten, stamps: list[_Stamp], vectors: dict[int, Node]
    ) -> None:
        """Append one operation that updates all members of a class in place.

        After all else, so that whatever reads an old value comes before.

        Args:
            rewritten: the class.
            stamps: its members.
            vectors: inputs of their slices that come as one vector for all members.
        """
        key = rewritten.multi_tensor = register_multi_tensor(rewritten, list(vectors))
        calls, starts = [], list[int]()
        positions: list[Any] = [None] * bool(rewritten.by_chance)
        for stamp in stamps:
            if positions:
                starts += self._starts(stamp.state)
            new = other_outputs(stamp.member)
            memory = [self._memory(value_of(n)) for n in new]
            self.env |= dict(zip(new, memory, strict=True))
            inputs = [self.env.get(n, n) for n in stamp.member.inputs]
            inputs += [*stamp.residuals, *stamp.chance, *positions, *memory]
            for other in stamp.others:
                for n, mine in zip(new, memory, strict=True):
                    its = self._memory(like(other.like, value_of(n).dtype))
                    other.instead[mine] = its
                    self.others.made.setdefault(n, []).append(its)
            calls.append((inputs, stamp.others))
        self._call(key, calls, list(vectors.values()), starts)

    def _starts(self, state: Carried) -> list[int]:
        """Return the positions of the first elements of a member and of those it stands for."""
        found = [in_order(c) for c in self.program.alike(state)]
        if None in found:
            self.others.note(Unlike("the elements of a member do not lie in order"))
        return [start or 0 for start in found]

    def _call(
        self,
        key: str,
        calls: list[tuple[list[Node], list[LeftOutMember]]],
        vectors: list[Node],
        starts: Sequence[int] = (),
    ) -> None:
        """Append the operation that runs a kernel.

        Args:
            key: the kernel's.
            calls: for each member in the graph its inputs of the kernel, and whom it stands for.
            vectors: those that the kernel reads or makes.
            starts: positions of the first elements of all members, if the kernel takes these.
        """
        kernel = MULTI_TENSOR_KERNELS[key]
        written: list[Node] = []
        read: list[Node] = []
        for inputs, others in calls:
            for other in others:
                self.others.note(other.unlike(inputs, kernel.written, kernel.read))
            for own in (inputs, *(other.operands(inputs) for other in others)):
                written += [own[i] for i in kernel.written]
                read += [own[i] for i in kernel.read]
        operands = (written, read, vectors, list(starts), key)
        node = self.graph.call_function(collage.multi_tensor.default, operands)
        node.meta["val"] = None

    def _vectors(self, scalars: Scalars, stamps: list[_Stamp]) -> dict[int, Node]:
        """Append the operation that does the 0-d work of all members.

        Return the inputs of their slices that it makes, a vector each.
        """
        key = register_scalar_kernel(scalars)
        kernel = MULTI_TENSOR_KERNELS[key]
        count = sum(1 + len(stamp.others) for stamp in stamps)
        device = value_of(scalars.members[0].outputs[0]).device
        vectors = [
            self._memory(torch.empty(count, dtype=kernel.dtypes[i], device=device))
            for i in kernel.vectors
        ]
        inputs = [[self.env[n] for n in part.inputs] for part in scalars.members]
        self._call(key, list(zip(inputs, (s.others for s in stamps), strict=True)), vectors)
        return {i: vectors[k] for i, k in scalars.feeds.items()}

    def _memory(self, like: Tensor) -> Node:
        """Append an operation that allocates a tensor; return it."""
        options: dict[str, Any] = {"dtype": like.dtype, "device": like.device}
        layout = (list(like.shape), list(like.stride()))
        node = self.graph.call_function(aten.empty_strided.default, layout, options)
        node.meta["val"] = like
        return node

    def _stamp(self, rewritten: Rewritten, member: Slice) -> _Stamp:
        residuals, bits = list[Node](), list[Node]()
        others = self.others.of(member)
        for i in rewritten.storages:
            carried, at, _ = member.states[i]
            name, marked = f"{member.inputs[at].name}_lo", i in rewritten.marked
            add = functools.partial(add_residuals, self.program, self.graph, marked=marked)
            ours = add(carried, name, rewritten.storages[i])
            its = self.program.others.get(carried.index, [])
            for other, c in zip(others, its, strict=True):
                if marked and not c.val.is_contiguous():
                    self.others.note(Unlike("the elements of a member do not lie in order"))
                lows = add(c, f"{name}_other{c.index}_", rewritten.storages[i])
                other.instead |= dict(zip(ours, lows, strict=True))
            residuals += ours[: len(ours) - marked]
            bits += ours[len(ours) - marked :]
        return _Stamp(rewritten, member, residuals + bits, others)

    def _interleave(self, rest: list[Node]) -> None:
        """Append other nodes and regions in turn, each when its inputs are there.

        Random numbers are drawn in the order of the step.
        """
        stamps = list(self.stamps)
        while rest or stamps:
            before, waiting, drawn = len(self.graph.nodes), [], True
            for node in rest:
                random = draws(node.target)
                if all(a in self.env for a in node.all_input_nodes) and (drawn or not random):
                    self._copy(node)
                else:
                    waiting.append(node)
                    drawn &= not random
            rest = waiting
            for stamp in stamps:
                self._regions(stamp)
            stamps = [s for s in stamps if s.pending]
            assert len(self.graph.nodes) > before, "nodes and regions wait for each other"

    def _regions(self, stamp: _Stamp) -> None:
        """Append one region for all pending results of a member whose inputs are there."""
        outputs = stamp.member.outputs
        sources = [self.env.get(n) for n in stamp.member.inputs] + stamp.lows + stamp.chance
        have = {i for i, n in enumerate(sources) if n is not None}
        needs = self.needs(stamp.rewritten)
        ready = tuple(i for i in stamp.pending if needs[i] <= have)
        if not ready:
            return
        taken, key = self.region(stamp.rewritten, ready)
        inputs = [n for i in taken if (n := sources[i]) is not None]
        region = self.graph.call_function(collage.region.default, (inputs, key))
        region.meta["val"] = collage.region.default([value_of(n) for n in inputs], key)
        for k, i in enumerate(ready):
            item = stamp.made[i] = self.graph.call_function(operator.getitem, (region, k))
            item.meta["val"] = region.meta["val"][k]
            if i < len(outputs):
                self.env[outputs[i]] = item
                item.meta["stack_trace"] = outputs[i].meta.get("stack_trace")

    def _write_residuals(self) -> None:
        for stamp in self.stamps:
            pairs = zip(stamp.residuals, stamp.kinds, strict=True)
            for i, (lo, (_, storage)) in enumerate(pairs, len(stamp.member.outputs)):
                new = stamp.made[i]
                if storage is None:
                    new = self._traced(lambda old, x: old | changed_bits.packed(x), lo, new)
                elif storage.packed:
                    new = self._traced(nibbles.packed, new)
                node = self.graph.call_function(aten.copy_.default, (lo, new))
                node.meta["val"] = lo.meta["val"]


def _unmark(rewritten: Rewritten) -> None:
    """Leave it to others to see what changes: Inductor has no bits in a kernel for a class."""
    count, first = len(rewritten.marked), len(rewritten.model.inputs) + rewritten.residual_count
    rewritten.marked = ()
    for module in (rewritten.expanded, rewritten.lowered):
        graph = graph_of(module).graph
        output = graph.output_node()
        results: Any = output.args[0]
        own = len(results) - count
        output.args = (results[:own],)
        graph.eliminate_dead_code()
        for node in list(graph.find_nodes(op="placeholder"))[first - count : first]:
            graph.erase_node(node)
        graph_of(module).recompile()


def _whole_like(state: Carried) -> Tensor:
    """Return a tensor of the shape of a state, without symbols."""
    return torch.empty([int(size) for size in state.val.shape], device=state.val.device)


def _region_of(rewritten: Rewritten, results: tuple[int, ...]) -> tuple[list[int], str]:
    """Make some results of a lowered graph a region of their own; return its inputs and its key."""
    graph = Graph()
    all_results: Any = graph.graph_copy(graph_of(rewritten.lowered).graph, {})
    graph.output(tuple(all_results[i] for i in results))
    graph.eliminate_dead_code()
    placeholders = list(graph.find_nodes(op="placeholder"))
    inputs = [i for i, n in enumerate(placeholders) if n.users]
    for node in placeholders:
        if not node.users:
            graph.erase_node(node)
    return inputs, register_region(GraphModule(torch.nn.Module(), graph))


def _needs(rewritten: Rewritten) -> list[set[int]]:
    """Return, for each result of the lowered graph, the positions of the inputs it depends on."""
    reach: dict[Node, set[int]] = {}
    lowered = graph_of(rewritten.lowered)
    for node in lowered.graph.nodes:
        if node.op == "placeholder":
            reach[node] = {len(reach)}
        elif node.op == "call_function":
            reach[node] = set().union(*(reach[a] for a in node.all_input_nodes))
    results: Any = lowered.graph.output_node().args[0]
    return [reach[n] for n in results]
