"""`Program`: the graph of one optimizer step, and what the passes have found out about it."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, NamedTuple, NoReturn, TypeAlias

import sympy
import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from collage_fx.passes.ir.verdict import Change, Judged
from collage_fx.runtime.expansion.eft import LOW_PRECISION as LOW_PRECISION
from collage_fx.runtime.storage.positions import Place
from collage_fx.runtime.storage.registry import (
    EXPANSIONS,
    STORAGES,
    Choice,
    Initial,
    Storage,
    Unnamed,
    chosen,
    is_alone,
    kept,
    named_in,
)
from collage_fx.runtime.storage.state_name import Named, StateName

Level = Literal["light", "plus", "auto", "all"]
Arithmetic = Literal["eft", "wide"]
OnUnsupported = Literal["join", "error"]
Owner = Literal["param", "state", "tensor", "buffer"]
Coefficient: TypeAlias = sympy.Expr | float
NUMBER = "collage_number"
"""The key by which the meta of an input has the number that it is now."""
CONVERT = torch.ops.prims.convert_element_type.default
CASTS = frozenset({CONVERT, torch.ops.aten._to_copy.default})
"""The operations whose result is the value of their operand in another dtype."""
SAME_VALUE = CASTS | {torch.ops.aten.clone.default}
"""Casts and copies: what a value depends on is the same before and after."""
OPTIONAL = (
    *("denominator", "deduplicate", "escape", "join"),
    *("moves", "numbers", "reductions", "repeat", "share"),
)
"""Names for `without`, for debugging: three passes before AOTAutograd, four after it, `repeat`,
which does a step again without looking at each tensor in Python, and `share`, by which optimizers
that are alike use what was compiled for one of them."""


@dataclass(frozen=True)
class Settings:
    """The part of the user's configuration that the passes need; `CollageConfig` says more."""

    level: Level = "auto"
    arithmetic: Arithmetic = "eft"
    storage: Choice = "mcf2"
    on_unsupported: OnUnsupported = "join"
    states: tuple[str, ...] = ()
    multi_tensor: bool | Literal["auto"] = "auto"
    stochastic_rounding: bool = False
    changed: bool = field(default=False, kw_only=True)
    """True if kernels note which elements of parameters a step changes."""
    without: tuple[str, ...] = field(default=(), kw_only=True)
    """Passes that are left out, for debugging; see OPTIONAL."""

    def __post_init__(self) -> None:
        """Take arithmetic `wide` where a storage has no other."""
        if not all(name in EXPANSIONS for name in named_in(self.storage)):
            object.__setattr__(self, "arithmetic", "wide")


@dataclass
class Carried(Named):
    """A carried state: a tensor input of the graph that the graph overwrites."""

    index: int
    """Position of its placeholder among the inputs of the graph."""
    state_name: StateName
    owner: Owner
    static: bool
    """True if Dynamo guards its identity, so that the graph always sees the same tensor."""
    val: Tensor
    """A fake tensor of its shape and dtype."""
    keeps_residual: bool = False
    """True if it has a residual already, which no later graph may drop."""
    refusal: str = ""
    """Reason why it cannot be compensated; empty if it can."""
    owned: bool = False
    """True if a torch.optim.Optimizer holds it."""
    gradient: bool = False
    """True if the input is a gradient, by its source in Dynamo."""
    left_alone: str = ""
    """Reason why it is left alone though it could be compensated; see `plan.leave_alone`."""
    present: str = ""
    """The storage of the residual that it has, in which it goes on unless one is named."""
    always_plain: bool = False
    """True if it is updated in a slice of others and never compensated, being in fp32 say."""
    takes_over: bool = False
    """True if it takes over the value of a state that is compensated."""
    place: Place | None = None
    """The place in the whole tensor, if it is a shard."""
    marked: bool = False
    """True if the graph takes bits too, beside the residuals, and notes in them which of its
    elements change."""
    feeds_parameter: bool = False
    """True if it holds what a parameter is, which keeps too little of itself: see `feeding`."""

    @property
    def kind(self) -> str:
        """Name that it has in every slice of its class."""
        return self.state_name.kind


class Branch(NamedTuple):
    """One of the values that a selection may choose: a*x, or a*x + B if it adds."""

    a: Coefficient
    adds: bool


@dataclass(frozen=True)
class Recurrence:
    """The change of a carried state: x' = a*x + B, B independent of x or not linear in x."""

    kind: Literal["overwritten", "unchanged", "linear", "selected", "nonlinear"]
    a: Coefficient
    text: str
    carried_path: tuple[Node, ...] = ()
    """The carried path: nodes of the slice from the old value (excluded) to the new one."""
    side: float = 0.0
    """Bound on how much of `a` comes to the new value by other ways than the carried path; 1 if x
    meets itself on that path otherwise than in a sum, infinity if it is not known."""
    branches: tuple[Branch, ...] = ()
    """Values that a selected value may be."""
    source: Node | None = None
    """Beginning of the carried path, if at the old value of another carried state."""
    together: str = ""
    """States with which this one is judged, if not by itself; `a` is then the common factor."""
    curved: bool = False
    """True if B has some of x in it, and is not linear in that."""

    @property
    def change(self) -> Change:
        """The kind and the text of the recurrence, without the graph."""
        factor = (
            float(self.a) if self.kind == "linear" and isinstance(self.a, int | float) else None
        )
        return Change(self.kind, self.text, factor)

    def steps(self, old: Node) -> dict[Node, Node]:
        """Return each node of the path of a state with this old value -> the node before it."""
        return {n: before for before, n in pairwise((self.source or old, *self.carried_path))}


@dataclass(eq=False)
class Slice:
    """The elementwise subgraph that updates one parameter and its states."""

    nodes: list[Node]
    inputs: list[Node]
    outputs: list[Node]
    states: list[tuple[Carried, int, Node]]
    """Each carried state, the position of its old value in `inputs`, and its new value."""
    key: str = ""
    """Equal for isomorphic slices: everything but shapes and tensors."""

    def old(self, i: int) -> Node:
        """Return the old value of state i."""
        return self.inputs[self.states[i][1]]


def other_outputs(part: Slice) -> list[Node]:
    """Return the outputs of a slice that are no state's new value, or are used besides."""
    new = {value for _, _, value in part.states}
    inside = set(part.nodes)
    copy = torch.ops.aten.copy_.default
    return [
        node
        for node in part.outputs
        if node not in new or any(u not in inside and u.target is not copy for u in node.users)
    ]


@dataclass
class StateClass:
    """Slices that are isomorphic but for shapes and tensors, with what they share."""

    members: list[Slice]
    recurrences: list[Recurrence] = field(default_factory=list)
    """One for each entry of `states` of a member."""

    @property
    def representative(self) -> Slice:
        """The member that stands for all in analysis and rewriting."""
        return self.members[0]


@dataclass
class StatePlan(Judged):
    """The verdict on one carried state."""

    storage: str = ""
    residual_bytes: int = 0
    index: int = -1
    """Position of its placeholder among the inputs of the graph."""
    compensable: bool = True
    """True if it may be compensated, by its dtype and the storage that was asked for."""

    @property
    def keeps(self) -> float | None:
        """The least change, relative to a value, that its storage keeps; None for wide dtypes."""
        low = self.dtype in LOW_PRECISION or self.compensated
        return kept(self.dtype, self.storage) if low else None


@dataclass(eq=False)
class Rewritten:
    """One class with one set of compensated states: rewritten once, applied to each member."""

    members: list[Slice]
    storages: dict[int, str]
    """Positions in `Slice.states` of the states that get residuals -> how their expansions are laid
    out."""
    recurrences: list[Recurrence]
    model: Slice
    """The slice of which the recurrences speak: the representative of the class."""
    marked: tuple[int, ...] = ()
    """Positions among these of the states of which it is noted which elements change."""
    by_chance: frozenset[str] = frozenset()
    """Storages that are rounded by chance, for which the step takes a seed and positions."""
    expanded: GraphModule | None = None
    """Inputs: those of the slice, then the residuals of the compensated states in order, then a
    truth for each marked state, which is not read, then the seed and the positions of elements if
    it has them. Outputs: those of the slice, then the new residuals in the same order, then the
    truth of each marked state: whether the element changes."""
    lowered: GraphModule | None = None
    """Lowered graph of the same signature; all 16-bit roundings are collage::round, else fp32."""
    joined: list[str] = field(default_factory=list)
    """Operations on a carried path that have no rule and ran as join - op - split."""
    multi_tensor: str = ""
    """The key of the kernel that updates all members at once; see `multi_tensor_kernel.py`."""
    apart: str = ""
    """Reason why each member has a kernel of its own instead."""
    left_out: int = 0
    """Number of members more, which are not in the graph."""

    @property
    def count(self) -> int:
        """Number of its members."""
        return len(self.members) + self.left_out

    def residuals(self, i: int) -> tuple[torch.dtype, ...]:
        """Return the dtypes of the residuals of state i, as they are computed with."""
        dtype = self.model.states[i][0].val.dtype
        return STORAGES[self.storages[i]].residuals[dtype]

    @property
    def residual_storages(self) -> list[tuple[int, Storage | None]]:
        """For each residual of a member the state that it is of, and how it is laid out.

        Behind them come the marked states, with None: one bit of each element is in memory.
        """
        found: list[tuple[int, Storage | None]]
        found = [(i, STORAGES[s]) for i, s in self.storages.items() for _ in self.residuals(i)]
        return found + [(i, None) for i in self.marked]

    @property
    def residual_count(self) -> int:
        """Number of residuals of a member, with the bits of its marked states."""
        return len(self.residual_storages)


@dataclass(eq=False)
class Copies:
    """Members of a class that `deduplicate` left out of the graph, where one like them stayed."""

    inputs: list[int]
    """The placeholders of that one."""
    others: list[list[Carried]]
    """Carried states in their places for each member left out; the indices go on behind those of
    the graph."""
    shared: set[int]
    """Indices of the placeholders that are read outside the member too."""
    called: bool = False
    """True if the graph is one member, and is called for each."""


@dataclass(frozen=True)
class Unlike:
    """The finding that one member of a class cannot stand for those that are not in the graph."""

    reason: str


@dataclass
class Program:
    """One graph on its way through the passes; each pass fills in the fields that it owns."""

    source: GraphModule
    """The functional aten graph as it came; mutations are trailing aten.copy_ onto placeholders."""
    settings: Settings
    describe: Callable[[int, Node], Carried]
    """Function that returns name, owner and identity of the carried state at a placeholder."""
    label: Callable[[Node], str] = lambda node: node.name
    """Function that returns the name of a 0-d input (a learning rate, say) in the recurrences."""
    is_step: bool = False
    """True if the graph is known to be a part of an optimizer's step."""
    copies: list[Copies] = field(default_factory=list)
    """Members that stand for more than one."""
    keep: frozenset[int] = frozenset()
    """Positions of the states that keep a residual whatever their own recurrence is."""
    read_whole: frozenset[int] = frozenset()
    """Positions of the states that slices read with their residuals, and do not write."""
    joins: bool = False
    """True if `join` may do the whole graph on joined values, which is left to a recorder else."""
    number: Callable[[Node], float | None] = lambda node: None
    """Function that returns the present value of a number that may change, if that is known."""
    carried: list[Carried] = field(default_factory=list)
    canonical: GraphModule | None = None
    classes: list[StateClass] = field(default_factory=list)
    plan: list[StatePlan] = field(default_factory=list)
    rewritten: list[Rewritten] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    """Losses: values of states that leave the graph with their high word only; see `escape`."""
    takers: frozenset[int] = frozenset()
    """Positions of the states which, given residuals, would remove every entry of `lost`."""
    reads: dict[int, str] = field(default_factory=dict)
    """Positions and names of states that the graph does not write, and of which it would need a
    low word."""
    wholes: frozenset[int] = frozenset()
    """Positions of the states which, read with their residuals, would make `join` unnecessary."""
    weighty: frozenset[int] = frozenset()
    """Positions of the states that enter the update of another with weight: each needs a low word
    whatever its own recurrence is, and may have one by now."""
    unlike: Unlike | None = None
    """Reason why members in the graph cannot stand for those left out, as `emit` finds; there is no
    `result` then."""
    joined: bool = False
    """True if `join` has made `result`."""
    result: GraphModule | None = None
    """Graph that Inductor compiles. Its inputs are those of the graph, those of the members left
    out, the residuals in the order of `residual_inputs`, and `seeds`."""
    residual_inputs: list[Carried] = field(default_factory=list)
    """The states whose residuals they are; each has as many as its storage says."""
    member_results: dict[int, list[int]] = field(default_factory=dict)
    """Result that a member makes which stands for others -> the results of `result` that these
    make."""
    residual_places: dict[int, list[int]] = field(default_factory=dict)
    """Position of a state -> those of its residuals among the inputs of `result`."""
    static_residuals: list[bool] = field(default_factory=list)
    """Flag of each of these placeholders: True if it is always the same tensor."""
    seeds: list[torch.device] = field(default_factory=list)
    """Devices of the seeds that come last: one of a call for each device, int32, 0-d."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Time spent in each pass."""
    snapshots: dict[str, str] = field(default_factory=dict)
    """Text of what each pass left, where that was asked for: `listing.snapshot`, or `unchanged`."""

    @property
    def called(self) -> bool:
        """True if the graph is one member of a class, and is called for each of them."""
        return any(copies.called for copies in self.copies)

    @functools.cached_property
    def others(self) -> dict[int, list[Carried]]:
        """Input of a member that stands for more -> what the members left out have instead."""
        return {
            index: [other[i] for other in copies.others]
            for copies in self.copies
            for i, index in enumerate(copies.inputs)
        }

    def alike(self, carried: Carried) -> list[Carried]:
        """Return a state of the graph, and those of members left out that are in its place."""
        return [carried, *self.others.get(carried.index, [])]

    def places(self, index: int) -> list[int]:
        """Return the position of an input of the graph, and those of members left out."""
        return [index, *(c.index for c in self.others.get(index, []))]

    def compensated(self) -> Iterator[tuple[Slice, int]]:
        """Yield each slice with the position of each of its states that get residuals."""
        for rewritten in self.rewritten:
            for part in rewritten.members:
                for i in rewritten.storages:
                    yield part, i


def compensable_in(carried: Carried, choice: Choice) -> str:
    """Return the storage for a state, which may not be able to hold it; empty to leave it alone."""
    if goes_on(choice, carried.val.dtype, carried.present):
        return carried.present
    return chosen(choice, carried.state_name, carried.val.dtype, scalar=carried.val.dim() == 0)


def goes_on(choice: Choice, dtype: torch.dtype, present: str) -> bool:
    """Return True if a state of a dtype goes on in the storage of the residual that it has."""
    held = present in STORAGES and dtype in STORAGES[present].residuals  # it was cast, maybe
    if dtype not in LOW_PRECISION or not held or not isinstance(choice, Unnamed | Initial):
        return False
    # Where `eft` or chance was asked for, of which remainder16 has neither, it is converted.
    converts = isinstance(choice, Unnamed) and choice != "auto" and present == "remainder16"
    return not converts


def has_no_residual(carried: Carried, choice: Choice) -> bool:
    """Return True if the storage for a state has no residuals: it is rounded by chance."""
    return is_alone(compensable_in(carried, choice))


def graph_of(module: GraphModule | None) -> GraphModule:
    """Return module, which an earlier pass must have made."""
    if module is None:
        raise AssertionError("a pass ran before the one that makes its input")
    return module


def low_word(state: object, k: int) -> NoReturn:
    """Stand for component k of a state's residual in a graph, until `emit` has an input for it."""
    raise AssertionError("a graph with such a node is not run")


class Value:
    """A real tensor in the place of a graph node, where the passes' rules work without a graph."""

    __slots__ = ("meta",)
    name = "value"
    op = "call_function"
    target = None
    args: tuple[Any, ...] = ()

    def __init__(self, val: Tensor) -> None:
        self.meta = {"val": val, "dtype": val.dtype, "scalar": val.dim() == 0}


Operand = Node | Value


def is_value(x: object) -> bool:
    """Return True if x stands for a tensor, and is not a number."""
    return isinstance(x, Node | Value)


def value_of(node: Operand) -> Tensor:
    """Return the tensor, mostly a fake one, that node stands for."""
    val = node.meta["val"]
    assert isinstance(val, Tensor), f"{node} is not a tensor"
    return val


def is_tensor(node: object) -> bool:
    """Return True if node is a graph node that stands for one tensor."""
    return isinstance(node, Node) and isinstance(node.meta.get("val"), Tensor)


def is_float(node: Any) -> bool:
    """Return True if node is a graph node that stands for one tensor of floating-point numbers."""
    return is_tensor(node) and value_of(node).is_floating_point()


def is_scalar(node: Node) -> bool:
    """Return True if node stands for a 0-d tensor."""
    return is_tensor(node) and value_of(node).dim() == 0
