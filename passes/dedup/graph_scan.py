"""Scan of a Dynamo graph: what each operation reads and overwrites, and which are connected."""

import functools
import operator
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate

from collage_fx.passes.ir.graph_memory import Connected, OpOverload, draws
from collage_fx.passes.rewrite.op_schema import written as overwritten
from collage_fx.runtime.torch_private import _set_grad_enabled
from collage_fx.runtime.trees import tree_leaves


class UnknownOperation(Exception):
    """The graph has an operation of which it is not known what it reads and writes."""


@dataclass(eq=False, slots=True)
class Atom:
    """An input, an operation, or what a foreach operation does to one tensor of its lists."""

    node: Node
    at: int
    """The position in the lists of a foreach operation; -1 otherwise."""
    args: Any = ()
    operands: list["Atom"] = field(default_factory=list)
    value: Tensor | None = None
    same: "Atom | None" = None
    """The input that it is, if it returns what it has overwritten."""
    bound: bool = False
    """True if it is in memory that the graph overwrites, or reads such memory."""
    odd: bool = False
    """True if it cannot be part of a member that leaves the graph."""
    graded: bool = True
    """True if gradients are recorded where it runs."""
    home: "Atom | None" = None
    """One that is bound and belongs to the same part."""
    part: "Part | None" = None
    others: bool = False
    """True if it is read by what belongs to several parts or to none."""

    @property
    def is_input(self) -> bool:
        """True for an input of the graph."""
        return self.node.op in ("placeholder", "get_attr")


@dataclass(eq=False)
class Part:
    """A member: what is connected by tensors that the graph overwrites or only it uses."""

    atoms: list[Atom] = field(default_factory=list)
    """Operations in the order of the graph, without inputs."""
    inputs: list[Atom] = field(default_factory=list)
    """Inputs that no other part uses, in the order of their first use."""
    results: list[int] = field(default_factory=list)
    """Positions among the results of the graph, in the order in which they are made."""


_SCALAR_MODULES = ("_operator", "math", "builtins", "torch.fx.experimental.sym_node")


def _is_of_numbers(target: Any) -> bool:
    """Return True if a function computes with Python numbers or symbols, as `torch.sym_max`."""
    name = getattr(target, "__name__", "").lstrip("_")
    return getattr(target, "__module__", None) in _SCALAR_MODULES or name.startswith("sym_")


class Scan:
    """Reads and writes of each operation of a graph, and its connected parts."""

    def __init__(self, gm: GraphModule) -> None:
        self.gm = gm
        self.inputs: list[Atom] = []
        self.atoms: list[Atom] = []
        self.atom_of: dict[Node, Atom] = {}
        self.lists: dict[Node, list[Atom]] = {}
        """Foreach operation -> its atoms."""
        self.scalars: dict[Node, str] = {}
        """Value that is no tensor and depends on none -> how it is computed."""
        self.numbers: dict[str, str] = {}
        self.numbers_read: list[Atom] = []
        """The inputs of which the graph takes the value as a number."""
        self.graded = True
        self.together: Connected[Atom] = Connected()
        self.written: set[int] = set()
        """The memory that the graph overwrites."""
        for node in gm.graph.nodes:
            self._visit(node)
        if any(memory_of(x.value) in self.written for x in self.numbers_read):
            raise UnknownOperation
        output: Any = gm.graph.output_node().args[0]
        if not isinstance(output, tuple | list):
            raise UnknownOperation
        self.results = [self.atom_of.get(n) if isinstance(n, Node) else None for n in output]
        self.returned: dict[int, Node] = {}
        """Position among the results -> the input that it is."""
        for k, result in enumerate(self.results):
            same = result if result is None or result.is_input else result.same
            if same is not None:
                self.returned[k] = same.node
        self._connect()

    def _visit(self, node: Node) -> None:
        value = node.meta.get("example_value")
        if node.op == "output":
            return
        if node.op in ("placeholder", "get_attr"):
            if isinstance(value, Tensor):
                atom = self.atom_of[node] = Atom(node, -1, value=value)
                self.inputs.append(atom)
            elif node.op == "placeholder":
                self.scalars[node] = node.name
            else:
                raise UnknownOperation
        elif node.target is _set_grad_enabled:
            self.graded = bool(node.args[0])
        elif node.target is operator.getitem and node.args[0] in self.lists:
            self.atom_of[node] = self.lists[node.args[0]][node.args[1]]  # type: ignore[index]
        elif is_foreach(node):
            self._foreach(node)
        elif any(a in self.lists for a in node.all_input_nodes):
            raise UnknownOperation  # a whole list
        elif node.target == "item" and (read := self._input(node.args[0])) is not None:
            # As Dynamo hands in a number that changes from step to step.
            self.scalars[node] = f"number in {read.node}"
            self.numbers_read.append(read)
        elif isinstance(value, Tensor) or any(a in self.atom_of for a in node.all_input_nodes):
            self.atom_of[node] = self._atom(node, -1, (node.args, node.kwargs), value)
        else:
            self._scalar(node)

    def _input(self, a: Any) -> Atom | None:
        atom = self.atom_of.get(a)
        return atom if atom is not None and atom.is_input else None

    def _foreach(self, node: Node) -> None:
        values = node.meta.get("example_value")
        if not isinstance(values, list | tuple) or len(values) != len(_list_of(node)):
            raise UnknownOperation
        self.lists[node] = []
        for i, value in enumerate(values):
            args = _each(node.args, i, len(values)), _each(node.kwargs, i, len(values))
            self.lists[node].append(self._atom(node, i, args, value))

    def _atom(self, node: Node, at: int, args: Any, value: Any) -> Atom:
        given: Any = node.kwargs.get("out")
        out = self.atom_of.get(given)
        operands: dict[Atom, None] = {} if out is None else {out: None}

        def note(a: Any) -> Any:
            if isinstance(a, Node) and a in self.atom_of:
                operands[self.atom_of[a]] = None
            return a

        map_aggregate(args, note)
        tensor = value if isinstance(value, Tensor) else None
        writes, plain = overwrites(node), _can_leave(node)
        # A number to which a tensor is added is not overwritten.
        writes &= isinstance(first := next(iter(args[0]), None), Node) and first in self.atom_of
        writes |= out is not None
        odd = not plain or tensor is None
        for x in list(operands)[: None if odd else int(writes)]:
            self.written.add(memory_of(x.value))
        atom = Atom(node, at, args, list(operands), tensor, odd=odd, graded=self.graded)
        if writes and not odd:
            own = atom.operands[0]
            atom.same = own if own.is_input else own.same
        self.atoms.append(atom)
        return atom

    def _scalar(self, node: Node) -> None:
        """Name a value that is no tensor, the same name for what is computed in the same way."""
        if not _is_of_numbers(node.target):
            raise UnknownOperation
        text = repr(map_aggregate((node.args, node.kwargs), self._name))
        line = f"{node.target} {text}"
        self.scalars[node] = self.numbers.setdefault(line, f"scalar{len(self.numbers)}")

    def _name(self, a: Any) -> str:
        if isinstance(a, Node):
            if a not in self.scalars:
                raise UnknownOperation
            return self.scalars[a]
        return repr(a)

    def _connect(self) -> None:
        """Find out what belongs together: what meets in memory that the graph overwrites."""
        memory: dict[int, Atom] = {}
        for x in self.inputs:
            other = memory.setdefault(memory_of(x.value), x)
            if other is not x and memory_of(x.value) in self.written:
                x.odd = other.odd = True  # they may overlap; gradients in one buffer are only read
        for atom in (*self.inputs, *self.atoms):
            for x in (atom, *atom.operands):
                where = memory_of(x.value)
                if where in self.written or (x.odd and not x.is_input):
                    atom.bound = True
                    self.together.join(atom, memory.setdefault(where, x))
        self._assign()

    def _assign(self) -> None:
        """Add to each part what only it uses, and join parts of which one alone uses the other."""
        users: dict[Atom, list[Atom | None]] = {}
        for atom in reversed(self.atoms):
            parts = {self.together.root(u) if u else None for u in users.get(atom, [])}
            only = next(iter(parts)) if len(parts) == 1 else None
            if not atom.bound:
                atom.home = only
            else:
                atom.home = atom
                if only is not None:
                    self.together.join(only, atom)
                elif parts - {self.together.root(atom)}:
                    atom.odd = True
            for x in atom.operands:
                users.setdefault(x, []).append(atom.home)
        parts_of: dict[Atom, Part] = {}
        for x in self.inputs:
            homes = {self.together.root(u) if u else None for u in users.get(x, [])}
            x.others = None in homes
            homes -= {None}
            x.home = x if x.bound else next(iter(homes)) if len(homes) == 1 else None
        for x in (*self.inputs, *self.atoms):
            x.part = parts_of.setdefault(self.together.root(x.home), Part()) if x.home else None

    def parts(self) -> Iterable[Part]:
        """Return the parts, with what is in each."""
        found: dict[Part, dict[Atom, None]] = {}
        for atom in self.atoms:
            if atom.part is not None:
                atom.part.atoms.append(atom)
                taken = found.setdefault(atom.part, {})
                taken.update((x, None) for x in atom.operands if x.is_input and x.part is atom.part)
        inputs = {memory_of(x.value) for x in self.inputs}
        for k, result in enumerate(self.results):
            if result is not None and result.part is not None and k not in self.returned:
                result.odd |= memory_of(result.value) in inputs  # a view
                result.part.results.append(k)
        place = {a: i for i, a in enumerate(self.atoms)}
        for part, taken in found.items():
            part.inputs = list(taken)
            part.results.sort(key=lambda k: place.get(self.results[k], -1))  # type: ignore[arg-type]
        return found


def is_full(x: Atom) -> bool:
    """Return True if an atom is a tensor with dimensions."""
    return x.value is not None and x.value.dim() > 0


def with_counters(parts: Iterable[Part], stands: Callable[[Node], int | None]) -> list[Part]:
    """Return the parts of a graph, counters with that of their parameter, if that is one.

    A counter that no update reads would be a part of 0-d tensors alone.

    Args:
        parts: those that are connected.
        stands: the number of the parameter to which an input belongs; None for others.
    """
    owned = [(p, {stands(x.node) for x in p.inputs} - {None}) for p in parts]
    full: dict[int | None, list[Part]] = {}
    for part, owners in owned:
        for owner in owners if any(map(is_full, part.inputs)) else ():
            full.setdefault(owner, []).append(part)
    found = []
    for part, owners in owned:
        of = [one for owner in owners for one in full.get(owner, [])]
        if len(owners) == len(of) == 1 and of[0] is not part:
            of[0].atoms += part.atoms
            of[0].inputs += part.inputs
            for atom in (*part.atoms, *part.inputs):
                atom.part = of[0]
        else:
            found.append(part)
    return found


def memory_of(value: Tensor | None) -> int:
    """Return the id of a fake tensor's memory; 0 for none."""
    return value.untyped_storage()._cdata if value is not None else 0


def is_foreach(node: Node) -> bool:
    """Return True if an operation of a Dynamo graph does one for each tensor of a list."""
    name = getattr(node.target, "__name__", "")
    return node.op == "call_function" and name.startswith("_foreach_")


def _list_of(node: Node) -> Any:
    """Return the first list of tensors among the operands of a foreach operation."""
    return next(
        (a for a in node.args if isinstance(a, list | tuple) and isinstance(a[0], Node)), ()
    )


def _each(args: Any, i: int, count: int) -> Any:
    """Return the arguments of a foreach operation for one tensor of its lists."""

    def one(a: Any) -> Any:
        if not isinstance(a, list | tuple):
            return a
        if len(a) != count:
            raise UnknownOperation
        return a[i]

    return {k: one(a) for k, a in args.items()} if isinstance(args, dict) else tuple(map(one, args))


_IN_PLACE = [f"i{name}" for name in ("add", "sub", "mul", "truediv", "pow", "and", "or", "xor")]
_IN_PLACE += ["ifloordiv", "imod", "ilshift", "irshift", "iconcat", "imatmul", "setitem"]
_DUNDERS = {f"__{name}__" for name in _IN_PLACE}
_VIEWS = {"T", "mT", "H", "mH", "real", "imag"}
"""Attributes of tensors that are views of them."""
_DTYPES = {"float", "double", "half", "bfloat16", "int", "long", "bool"}
_PYTHONS = {"to", "type", "type_as", "_get_data_attr", *_DTYPES}
"""Names under which Python has operations of PyTorch."""
_BUILTIN = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)


def overwrites(node: Node) -> bool:
    """Return True if an operation of a Dynamo graph overwrites its first operand."""
    if isinstance(node.target, OpOverload):
        return bool(node.target._schema.is_mutable)
    name = name_of(node)
    return name in _IN_PLACE or name in _DUNDERS or (name[-1:] == "_" and name[-2:] != "__")


def written_by(node: Node) -> list[Node]:
    """Return the operands that an operation of a Dynamo graph overwrites, those in lists too."""
    given = (node.args[:1] if overwrites(node) else (), node.kwargs.get("out"))
    return [n for n in tree_leaves(given) if isinstance(n, Node)]


def name_of(node: Node) -> str:
    """Return the name of what a node of a Dynamo graph calls."""
    target: Any = node.target
    return target if node.op == "call_method" else getattr(target, "__name__", "")


@functools.cache
def overloads_of(name: str) -> list[OpOverload]:
    """Return the operators of ATen that have a name."""
    packet = getattr(torch.ops.aten, name, None)
    return [getattr(packet, o) for o in packet.overloads()] if packet is not None else []


def _can_leave(node: Node) -> bool:
    """Return True if an operation can leave the graph.

    Of one that cannot, nothing is known: it may overwrite whatever it takes.
    """
    target: Any = node.target
    if target is getattr:
        return node.args[1] in _VIEWS
    if isinstance(target, OpOverload):
        mutable, first = target._schema.is_mutable, [a.name for a in target._schema.arguments[:1]]
        return not draws(target) and (not mutable or list(overwritten(target)) == first)
    name = name_of(node)
    plain = node.op == "call_method" or isinstance(target, _BUILTIN)
    plain |= getattr(target, "__module__", "") == torch.functional.__name__  # torch.norm, say
    # PyTorch's functions take `out` by that name only.
    return plain and _repeatable(target, name) and isinstance(node.kwargs.get("out"), Node | None)


@functools.cache
def _repeatable(target: Any, name: str) -> bool:
    """Return True if a function is known to give the same for the same operands."""
    if name in _PYTHONS or name.startswith("__") or getattr(operator, name, None) is target:
        return True
    overloads = overloads_of(name)
    return bool(overloads) and not any(map(draws, overloads))
