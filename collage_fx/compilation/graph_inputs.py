"""Inputs of graphs of Dynamo and AOTAutograd: owner, name, and how to find each at a call."""

import functools
import operator
import re
import weakref
from collections.abc import Hashable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor
from torch.fx import GraphModule, Node
from torch.nn import Parameter

from collage_fx.compilation.residual_binding import Locate
from collage_fx.compilation.side_inputs import Members
from collage_fx.optimizer.ownership import Owned, is_buffer, owner_of, pretty, source_name
from collage_fx.passes.analysis.plan import is_named
from collage_fx.passes.dedup.deduplicate import Narrow
from collage_fx.passes.ir.program import (
    LOW_PRECISION,
    NUMBER,
    Carried,
    Copies,
    Owner,
    Program,
    Settings,
    Unlike,
    compensable_in,
)
from collage_fx.runtime.residuals.dtensor import place_of
from collage_fx.runtime.residuals.memory import has_memory
from collage_fx.runtime.residuals.store import STORE
from collage_fx.runtime.storage.state_name import StateName
from collage_fx.runtime.torch_private import (
    PlainAOTInput,
    SubclassGetAttrAOTInput,
    TracingContext,
)
from collage_fx.runtime.trees import tree_leaves

_PLAIN = (Tensor, Parameter)
"""The tensors of PyTorch's own, which are no subclass's with parts."""


class Recorded(NamedTuple):
    """The source of an input of a recorded graph, where a traced graph has one of Dynamo."""

    name: str
    state_name: StateName | None
    """Name of a state; None for other tensors."""


class Part(NamedTuple):
    """A tensor that a subclass is made of, such as the shard of a DTensor."""

    whole: int | str
    path: tuple[str, ...]
    """The attributes that lead to it."""

    def of(self, whole: Any) -> Any:
        """Return this part of the tensor itself."""
        return functools.reduce(getattr, self.path, whole)


@dataclass(frozen=True, eq=False)
class AbsentInput:
    """A tensor that Dynamo has not seen, being one of a parameter that another one stands for."""

    find: Locate
    """Function that finds the tensor, whatever the arguments: the graph does not keep it alive."""
    static: bool
    """True if it is the same tensor in each call; see `Carried.static`."""
    val: Tensor
    """A fake tensor like it."""
    name: str


Source: TypeAlias = int | str | Part | AbsentInput
"""The position of a placeholder, the name of an attribute (a tensor that Dynamo guards), ..."""


@dataclass(eq=False)
class Inputs:
    """The inputs of a graph that Dynamo made."""

    gm: GraphModule
    args: tuple[Any, ...]
    """The arguments of the call for which it is compiled."""
    owners: dict[int, tuple[Any, Owned]]
    """See `owners_of`."""
    elsewhere: frozenset[int]
    """See `kept_elsewhere`, of the optimizer whose step it is a part of."""
    _: KW_ONLY
    of_optimizer: bool
    """True if the graph is part of an optimizer's step."""
    again: bool
    """True if it is compiled anew, since an argument has a residual that it should use."""
    joins: bool
    """True if the graph may be done on joined values, see `passes/rewrite/join.py`."""

    def __post_init__(self) -> None:
        placeholders = self.gm.graph.find_nodes(op="placeholder")
        self.place = {node: i for i, node in enumerate(placeholders)}
        self.sources = sources_of(self.gm)
        found = (getattr(node, "_dynamo_source", None) for node in placeholders)
        self.recorded = {s.name: s.state_name for s in found if isinstance(s, Recorded)}
        """Names of states that were recorded by their text, as they stand among the sources."""
        numbers = ((i, node.meta.get(NUMBER)) for i, node in enumerate(placeholders))
        self.numbers: dict[Any, float] = {i: x for i, x in numbers if x is not None}
        """Position of a number that changes -> what it is now, where that is known."""

    @functools.cached_property
    def differentiates(self) -> bool:
        """True if a value in the graph, other than an input, has a gradient to be computed."""
        nodes = (n for n in self.gm.graph.nodes if n.op.startswith("call"))
        values = (v for n in nodes for v in tree_leaves(n.meta.get("example_value")))
        return any(isinstance(v, Tensor) and v.requires_grad for v in values)

    def share_memory_of_states(self) -> bool:
        """Return True if an input that is no state lies in memory of states, such as a flat buffer.

        A low word of its own would be lost to them.
        """
        nodes = (*self.place, *self.gm.graph.find_nodes(op="get_attr"))
        given = [t for t in (self.tensor(self.source_of(n)) for n in nodes) if _is_plain(t)]
        tensors = (owned.tensor for _, owned in self.owners.values())
        states = {t.untyped_storage()._cdata for t in tensors if _is_plain(t)}
        others = (t for t in given if id(t) not in self.owners)
        return any(t.untyped_storage()._cdata in states for t in others)

    def take_handed(self, count: int) -> None:
        """Number values behind the placeholders which graphs of parts are handed by others."""
        self.args += (None,) * count
        self.sources += [""] * count

    def release(self) -> None:
        """Let go of tensors and optimizers, which what is compiled must not keep alive."""
        self.args, self.owners = (), {}

    def source_of(self, node: Node | AbsentInput) -> Source:
        """Return the source of a node of Dynamo's graph, a placeholder or an attribute."""
        if isinstance(node, AbsentInput):
            return node
        return str(node.target) if node.op == "get_attr" else self.place[node]

    def tensor(self, source: Source) -> Any:
        """Return the argument that the call being compiled has for a source."""
        return self.locate(source)(self.args)

    def locate(self, source: Source) -> Locate:
        """Return the function that finds the tensor from the arguments of a call."""
        if isinstance(source, AbsentInput):
            return source.find
        if isinstance(source, Part):
            find = self.locate(source.whole)
            return lambda args: None if (whole := find(args)) is None else source.of(whole)
        return located(self.gm, source)

    def describe(self, index: int, source: Source, val: Tensor, called: str = "") -> Carried:
        """Describe an input as a carried state.

        Args:
            index: its position among the inputs of the graph in the passes.
            source: where it comes from.
            val: a fake tensor like it.
            called: its name where Dynamo has none.
        """
        whole = source.whole if isinstance(source, Part) else source
        static = whole.static if isinstance(whole, AbsentInput) else isinstance(whole, str)
        path = ""
        if isinstance(whole, int):
            path = self.sources[whole]
        elif isinstance(whole, str):
            known: Any = self.gm._param_name_to_source
            path = source_name(known.get(whole)) or whole
        tensor = self.tensor(source)
        carried = self._named(index, path, called, tensor, val)
        carried.static = static
        if carried.place is None and isinstance(source, Part):
            carried.place = place_of(self.tensor(source.whole))
        residual = STORE.get(tensor) if isinstance(tensor, Tensor) else None
        carried.present = "" if residual is None else residual.storage
        carried.gradient |= residual is not None and residual.of_gradient
        certain = residual is not None and not residual.provisional
        carried.keeps_residual = certain and (static or self.again)
        return carried

    def value(self, node: Node | AbsentInput) -> Any:
        """Return the fake tensor of an input of Dynamo's graph."""
        return node.val if isinstance(node, AbsentInput) else node.meta["example_value"]

    def fact(self, node: Node | AbsentInput, settings: Settings) -> Hashable | None:
        """Return in what else members of a class agree for this input; None: let it alone.

        That is what `plan` makes a difference by.
        """
        source = self.source_of(node)
        if type(self.tensor(source)) not in _PLAIN:
            return None
        c = self.describe(0, source, self.value(node), node.name)
        storage, named = compensable_in(c, settings.storage), is_named(c.name, settings.states)
        present = c.present if c.gradient else ""
        return c.owner, c.owned, c.static, c.keeps_residual, storage, named, present

    def label(self, source: Source | None) -> str:
        """Return `lr` for what is the `lr` of a parameter group; empty if there is no name."""
        path = self.sources[source] if isinstance(source, int) else ""
        words = re.findall(r"[A-Za-z_]\w*", path)
        return words[-1] if words else ""

    def _named(self, index: int, path: str, called: str, tensor: Any, val: Tensor) -> Carried:
        """Return a carried state by the name that its optimizer has for it, else by its source."""
        owned = self.owners.get(id(tensor))
        if owned is not None:
            one = owned[1]
            place = place_of(one.whole)
            return Carried(index, one.state_name, one.owner, False, val, owned=True, place=place)
        called = pretty(path) or called
        owner: Owner = "buffer" if is_buffer(path) else owner_of(tensor)
        if owner == "tensor" and id(tensor) in self.elsewhere:
            owner = "state"
        name = self.recorded.get(path) or StateName(called)
        if owner == "param":
            name = StateName(None, str(name))
        gradient = called.endswith(".grad")  # as Dynamo says where it comes from
        # Of the optimizer being compiled, though not in its state.
        own = self.of_optimizer and not (owner == "buffer" or gradient)
        return Carried(index, name, owner, False, val, owned=own, gradient=gradient)


def _is_plain(t: Any) -> bool:
    return type(t) in _PLAIN and has_memory(t)


def sources_of(gm: GraphModule) -> list[str]:
    """Return the source of each argument of a Dynamo graph, as Dynamo names it."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    return [source_name(getattr(n, "_dynamo_source", None)) for n in placeholders]


def source_behind(descriptor: Any, placeholders: Sequence[int] | None) -> int | str | Part | None:
    """Return the source of an input of AOTAutograd; None if it is made of several.

    Args:
        descriptor: AOTAutograd's description of the input.
        placeholders: which placeholders of the whole graph its own are; None for all of them.
    """
    if isinstance(descriptor, SubclassGetAttrAOTInput):
        whole = source_behind(descriptor.base, placeholders)
        if isinstance(whole, int | str):
            whole = Part(whole, ())
        return Part(whole.whole, (*whole.path, descriptor.attr)) if whole is not None else None
    if isinstance(descriptor, PlainAOTInput):
        return descriptor.idx if placeholders is None else placeholders[descriptor.idx]
    return getattr(descriptor, "target", None)  # of what is a parameter, or a buffer, of the graph


def located(gm: GraphModule, source: int | str) -> Locate:
    """Return the function that finds an input of a Dynamo graph in the arguments of a call.

    Args:
        gm: the graph.
        source: the position among the arguments, or the name of an attribute of the graph.
    """
    if isinstance(source, str):
        attribute = functools.reduce(getattr, source.split("."), gm)
        guarded: Any = weakref.ref(attribute)  # which is not to be kept alive
        return lambda args: guarded()
    return operator.itemgetter(source)


class AotInputs:
    """Inputs of an AOTAutograd graph, whole or narrow, mapped to inputs of the Dynamo graph."""

    def __init__(self, whole: Inputs, narrowed: Narrow | None) -> None:
        self.whole = whole
        self.locate: dict[int, Locate] = {}
        """Position of a carried state -> how to find its tensor from the arguments of a call."""
        self.plain: set[int] = set()
        """The positions of 16-bit tensors among them that have no residual."""
        self.members: Members | None = None
        if narrowed is not None:
            outputs: Any = whole.gm.graph.output_node().args[0]
            self.members = Members(narrowed, len(outputs) + len(narrowed.handed))
            for k, node in narrowed.returned.items():
                self.members.returned[k] = whole.locate(whole.source_of(node))

    def describe(self, index: int, placeholder: Node) -> Carried:
        """Describe the tensor of a placeholder as a carried state."""
        source = self._source(placeholder)
        val = placeholder.meta["val"]
        if source is None:
            name = StateName(f"an input that overlaps others ({placeholder.name})")
            return Carried(index, name, "tensor", False, val)
        return self._described(index, source, val, placeholder.name)

    def _described(self, index: int, source: Source, val: Tensor, called: str) -> Carried:
        self.locate[index] = self.whole.locate(source)
        carried = self.whole.describe(index, source, val, called)
        if not carried.present and val.dtype in LOW_PRECISION:
            self.plain.add(index)
        return carried

    def label(self, placeholder: Node) -> str:
        """Return `lr` for a 0-d input that is the `lr` of a parameter group."""
        return self.whole.label(self._source(placeholder)) or placeholder.name

    def number(self, placeholder: Node) -> float | None:
        """Return the number that an input is now; None if it is none, or not known."""
        return self.whole.numbers.get(self._source(placeholder))

    def _source(self, placeholder: Node) -> Source | None:
        descriptor = placeholder.meta.get("desc")
        return source_behind(descriptor, self.members.narrow.inputs if self.members else None)

    def copies(self, gm: GraphModule) -> list[Copies] | Unlike:
        """Return the members that those of the graph stand for; note how to find their tensors."""
        if self.members is None:
            return []
        placeholders = list(gm.graph.find_nodes(op="placeholder"))
        place = {self._source(n): i for i, n in enumerate(placeholders)}
        self.members.written = []
        found = []
        metadata = aot_metadata()
        seen = set(metadata.mutated_graph_handled_indices_seen_by_autograd if metadata else ())
        for group in self.members.narrow.groups:
            stayed, *others = [[self.whole.source_of(n) for n in m] for m in group.inputs]
            if any(source not in place for source in stayed):
                return Unlike("an input of a member overlaps others")
            called = self.members.narrow.called
            copies = Copies([place[s] for s in stayed], [], group.shared, called)
            for nodes, sources in zip(group.inputs[1:], others, strict=True):
                row = []
                for node, source, at in zip(nodes, sources, copies.inputs, strict=True):
                    index = len(placeholders) + len(self.members.locate)
                    if at in seen:
                        self.members.written.append(len(self.members.locate))
                    # Where it is called for each: of the fake mode that it is compiled under.
                    like = placeholders[at].meta["val"] if called else self.whole.value(node)
                    row.append(self._described(index, source, like, node.name))
                    self.members.locate.append(self.locate[index])
                copies.others.append(row)
            found.append(copies)
        return found

    def note_results(self, program: Program, gm: GraphModule) -> Unlike | None:
        """Note the results of the whole graph that the members make which were left out of it.

        Return why that cannot be told, if it cannot.
        """
        if self.members is None or not self.members.narrow.groups:
            return None
        narrow = self.members.narrow
        if program.result is None:
            return Unlike("nothing of it is compensated")
        made = {k for group in narrow.groups for k in group.results[0]}
        outputs: Any = gm.graph.output_node().args[0]
        place = {k: i for i, k in enumerate(narrow.results)}
        if len(outputs) != len(place) or any(place[k] not in program.member_results for k in made):
            return Unlike("a result of a member is not one that its operation makes")
        for group in narrow.groups:
            for m, positions in enumerate(group.results[1:]):
                for k, first in zip(positions, group.results[0], strict=True):
                    self.members.made[k] = program.member_results[place[first]][m] - len(outputs)
        return None


def aot_metadata() -> Any:
    """Return AOTAutograd's metadata of the graph that it traces now; None if it traces none."""
    context = TracingContext.try_get()
    return context.fw_metadata if context is not None else None
