"""Representative parameters, traced in place of all of their classes, and their checks."""

import contextlib
import itertools
import operator
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.optim import Optimizer

from collage_fx.compilation.graph_inputs import AbsentInput, Inputs
from collage_fx.compilation.layout_guards import guards_of, is_plain
from collage_fx.compilation.session import Outcome, Session
from collage_fx.compilation.side_inputs import Code
from collage_fx.hooks.step_substitution import codes
from collage_fx.optimizer.ownership import STAND_IN, params_of
from collage_fx.passes.codegen.multi_tensor_kernel import least_members
from collage_fx.passes.dedup.deduplicate import Group, Narrow, represented
from collage_fx.passes.dedup.independent_parts import LEAST
from collage_fx.passes.ir.program import Settings, Unlike
from collage_fx.runtime.residuals.dtensor import is_sharded, shard_of, sharded_like, shards_of
from collage_fx.runtime.residuals.memory import empty_as, overlapping
from collage_fx.runtime.storage.registry import compensable_dtypes
from collage_fx.stand_in.group_numbers import Condition
from collage_fx.stand_in.members import GRAD, NO_STATE, Member
from collage_fx.stand_in.torch_steps import copy_of_step, of_one_shape


class StandIn:
    """An optimizer that has some of another's parameters, and shares their states.

    In the place of DTensors it has their shards, which share memory with them.
    """

    def __init__(
        self, optimizer: Optimizer, wanted: Callable[[Tensor], bool], sharded: Sequence[Tensor]
    ) -> None:
        """Take over parameters.

        Args:
            optimizer: whose they are.
            wanted: which of them.
            sharded: those DTensors of them of which it has the shards.
        """
        few: Optimizer = object.__new__(type(optimizer))
        few.__dict__[STAND_IN] = True
        self.shards = {p: shard_of(p) for p in sharded if wanted(p)}
        few.param_groups = [
            {"params": [self.shards.get(p, p) for p in group["params"] if wanted(p)]}
            for group in optimizer.param_groups
        ]
        few.state = defaultdict(dict)
        few.state.update((p, optimizer.state[p]) for p in params_of(few) if p in optimizer.state)
        for p, shard in self.shards.items():
            few.state[shard] = {k: shard_of(v) for k, v in optimizer.state.get(p, {}).items()}
        self.optimizer = few

    @contextlib.contextmanager
    def of(self, optimizer: Optimizer) -> Iterator[None]:
        """Lend it the optimizer's other attributes, rates and so on, within this context."""
        few = self.optimizer
        own = {k: vars(few)[k] for k in (STAND_IN, "param_groups", "state")}
        few.__dict__.update({k: v for k, v in vars(optimizer).items() if k not in (*own, "step")})
        groups = list(zip(few.param_groups, optimizer.param_groups, strict=True))
        for mine, group in groups:
            params = mine["params"]
            mine.clear()
            mine.update({**group, "params": params})
        for p, shard in self.shards.items():
            shard.grad = shard_of(p.grad)
        try:
            yield
        finally:
            self._return_shards(optimizer)
            for mine, group in groups:
                group.update((k, v) for k, v in mine.items() if k != "params")
                params = mine["params"]
                mine.clear()  # what the user replaces is let go of
                mine["params"] = params
            shards = {*self.shards.values()}
            for p, state in few.state.items():
                if p not in shards:
                    optimizer.state.setdefault(p, state)
            few.__dict__.clear()
            few.__dict__.update(own)

    def _return_shards(self, optimizer: Optimizer) -> None:
        """Let go of gradients, and hand on the states that a step has made or replaced."""
        for p, shard in self.shards.items():
            shard.grad = None
            state = optimizer.state[p]
            for key, value in self.optimizer.state[shard].items():
                if key not in state or shard_of(state[key]) is not value:
                    full = isinstance(value, Tensor) and value.dim() > 0
                    state[key] = sharded_like(value, p) if full else value

    def shares(self, optimizer: Optimizer) -> bool:
        """Return True if the states of its parameters are still the optimizer's."""
        mine, its = self.optimizer.state, optimizer.state
        shards = {*self.shards.values()}
        return all(mine.get(p) is its.get(p) for p in params_of(self.optimizer) if p not in shards)


class StandIns:
    """Representatives of the classes of parameters, as long as nothing of all that changes.

    To the compiler they are what `StandsForOthers` says.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        classes: list[list[Tensor]],
        session: Session,
        *,
        pooled: bool = False,
    ) -> None:
        """Note the parameters as they are now.

        Args:
            optimizer: whose they are.
            classes: parameters that are alike; the first of each stands for the others.
            session: compiles.
            pooled: whether optimizers that are alike will use what is compiled for them.
        """
        self.pooled = pooled
        self.classes = [[Member(p, optimizer) for p in one] for one in classes]
        absent = {id(m.whole) for one in self.classes for m in one[1:]}
        self.listed = [list(group["params"]) for group in optimizer.param_groups]
        params = list(itertools.chain.from_iterable(self.listed))
        self.params = [p for p in params if p.grad is not None]
        self.without = [p for p in params if p.grad is None]
        members = list(itertools.chain.from_iterable(self.classes))
        self.members = [m.whole for m in members]
        self.states = [m.state for m in members]
        self.tensors = list(_values(self.states))
        self.plain = [p for p in self.params if is_plain(shard_of(p)) and is_plain(_grad(p))]
        self.shards = shards_of([*self.plain, *self.tensors])
        self.sharded = [m for m in members if is_sharded(m.whole)]
        """The members that are DTensors: their shards stand for them."""
        whole = [m.whole for m in self.sharded]
        self.guards = guards_of([*self.shards, *map(_grad, self.plain)])
        self.few = StandIn(optimizer, lambda p: id(p) not in absent and p.grad is not None, whole)
        self.others = StandIn(optimizer, lambda p: id(p) in absent, whole)
        step = copy_of_step(optimizer, session)
        self.whole = codes(step)
        self.compiled = torch.compile(MethodType(step, self.few.optimizer), backend=session)
        self.outcome = Outcome.PARTS
        self.code: Code | None = None
        self.sources: list[str] = []
        self.condition: Callable[[], Condition | None] = lambda: None
        self.unlike: Unlike | None = None
        self.graph: Any = None
        """`SharedGraph` of the compiled code without the tensors, if there is one."""

    @classmethod
    def of(cls, optimizer: Optimizer, session: Session, alike: int = 1) -> "StandIns | None":
        """Return the stand-ins of an optimizer's parameters; None where none stands for others.

        Raises CollageError if a parameter has a gradient or a state of another size.

        Args:
            optimizer: whose they are.
            session: compiles.
            alike: how many optimizers will use what is compiled, itself among them.
        """
        classes: dict[tuple[torch.device, Hashable], dict[Hashable, list[Tensor]]] = {}
        empty: list[tuple[tuple[torch.device, Hashable], Tensor]] = []
        full: list[Tensor] = []
        held, shaped = compensable_dtypes(session.config.storage), of_one_shape(optimizer)
        for g, group in enumerate(optimizer.param_groups):
            for p in (p for p in group["params"] if p.grad is not None):
                member = Member(p, optimizer)
                if not shaped:
                    member.check()
                kind = member.kind(member.tensors(), held, shaped=shaped)
                at = p.device, (g, kind, member.storages())
                if kind is not None and not member.param.numel():
                    empty.append((at, p))
                elif kind is not None:
                    layout = tuple(n == 1 for n in member.param.shape)
                    classes.setdefault(at, {}).setdefault(layout, []).append(p)
                full += (t for t in member.tensors() if isinstance(t, Tensor))
        for key, p in empty:  # as shards may be: there is nothing of them to be laid out otherwise
            for same in list(classes.get(key, {}).values())[:1]:
                same.append(p)
        large = [
            one.values()
            for (device, _), one in classes.items()
            if alike * sum(map(len, one.values()))
            >= (LEAST if shaped else least_members(session.config, device))
        ]
        found = [same for one in large for same in one if len(same) > 1 or alike > 1]
        if not found or overlapping(full, by_address=True):
            return None
        return cls(optimizer, found, session, pooled=alike > 1)

    def step(self) -> None:
        """Do the step, `few` being what the optimizer is."""
        self.compiled()

    def count_versions(self) -> None:
        """Count up the versions of DTensors, as a step that overwrites their shards does not."""
        tensors = (t for m in self.sharded for t in (m.whole, *m.state.values()))
        torch.autograd.graph.increment_version([t for t in tensors if is_sharded(t)])

    def holds(self, optimizer: Optimizer) -> bool:
        """Return True if all parameters, gradients and states are as they were."""
        groups = optimizer.param_groups
        if len(groups) != len(self.listed) or any(p.grad is not None for p in self.without):
            return False
        if not all(_same(g["params"], one) for g, one in zip(groups, self.listed, strict=True)):
            return False
        if any(p.grad is None for p in self.params):
            return False
        if not self.has_states_of(optimizer) or not self.few.shares(optimizer):
            return False
        shards = shards_of([*self.plain, *self.tensors])
        if not _same(shards, self.shards) or not all(m.is_sharded_alike() for m in self.sharded):
            return False
        return bool(self.guards.check(*shards, *shards_of([p.grad for p in self.plain])))

    def has_states_of(self, optimizer: Optimizer) -> bool:
        """Return True if the states are still those of the optimizer."""
        states = [optimizer.state.get(p, NO_STATE) for p in self.members]
        return _same(states, self.states) and _same(list(_values(self.states)), self.tensors)

    def whole_graph(self, inputs: Inputs, settings: Settings) -> Narrow | Unlike:
        """See `StandsForOthers`: or say why it does not do to all what it does to the few."""
        known = {
            id(t): (k, at)
            for k, one in enumerate(self.classes)
            for at, t in enumerate(one[0].tensors())
        }

        def where(node: Node) -> tuple[int, int] | None:
            return known.get(id(inputs.tensor(inputs.source_of(node))))

        def stands(node: Node) -> int | None:
            return place[0] if (place := where(node)) is not None else None

        dtypes = compensable_dtypes(settings.storage)
        calls = of_one_shape(self.few.optimizer)
        found = represented(inputs.gm, stands, len(self.classes), dtypes, calls=calls)
        if isinstance(found, Unlike):
            return found
        fakes: dict[Any, Tensor] = {}
        groups = []
        for one in found.members:
            k, nodes = one.owner, one.inputs
            members: list[list[Any]] = [nodes]
            facts = [inputs.fact(node, settings) for node in nodes]
            places = [place[1] for node in nodes if (place := where(node)) is not None]
            assert len(places) == len(nodes)
            for member in self.classes[k][1:]:
                if len(member.tensors()) <= max(places):
                    return Unlike("a parameter got its states while the step was traced")
                pairs = zip(nodes, places, strict=True)
                row = [_absent(inputs, fakes, node, member, at) for node, at in pairs]
                if None in facts or [inputs.fact(one, settings) for one in row] != facts:
                    return Unlike("parameters of one shape are kept in different ways")
                members.append(row)
            groups.append(Group(members, [[] for _ in members], set()))
        return found.narrow(groups)


def _absent(
    inputs: Inputs, fakes: dict[Any, Tensor], node: Node, member: Member, at: int
) -> AbsentInput:
    """Return another member's tensor in the place of an input, one of a member's tensors.

    Args:
        inputs: those of the graph.
        fakes: the fake tensors that were made, one for each layout.
        node: the input.
        member: the other one.
        at: which of its tensors.
    """
    tensor = member.tensors()[at]
    key = tensor.shape, tensor.stride(), tensor.dtype, tensor.device
    if key not in fakes:
        with inputs.value(node).fake_mode:
            fakes[key] = empty_as(tensor)
    static = isinstance(inputs.source_of(node), str)
    _, param = inputs.owners[id(member.param)]
    name = f"{param.name}.grad" if at == GRAD else node.name
    return AbsentInput(member.finder(at), static, fakes[key], name)


def _same(found: list[Any], expected: list[Any]) -> bool:
    """Return True if two lists have the same objects."""
    return len(found) == len(expected) and all(map(operator.is_, found, expected))


def _values(states: Iterable[dict[str, Any]]) -> Iterable[Any]:
    return itertools.chain.from_iterable(map(dict.values, states))


def _grad(param: Tensor) -> Tensor:
    return shard_of(param.grad)  # type: ignore[return-value]  # it has one
