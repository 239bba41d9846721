"""Steps that are done again as the last one was: the same kernels over the same tensors.

A step of three hundred parameters looks at some thousands of tensors in Python: by guards, for
residuals that do not belong to their tensors any more, for the addresses that kernels are given.
Where nothing has changed since the last step, compiled code sees that in a fraction of the time,
and the kernels are called from here. What the compiled code does not see, such as another global
state, is asked for beside it. Whatever has changed, the step is done as any other.
"""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from collage_fx.binding.bound_graph import Calls
from collage_fx.binding.bound_kernels import BoundKernels, current_residuals, keep_versions
from collage_fx.binding.launches import Unrepeatable
from collage_fx.compilation.layout_guards import guards_of, is_plain
from collage_fx.compilation.residual_binding import Gathered
from collage_fx.compilation.side_inputs import Code, Noted, Observed
from collage_fx.hooks.nested_compile import GlobalState
from collage_fx.hooks.optimizer_hooks import has_foreign_hooks
from collage_fx.optimizer.ownership import params_of
from collage_fx.record.steps import Steps
from collage_fx.runtime.kernels import left_out
from collage_fx.runtime.kernels.tensor_snapshot import ANYTHING, NUMBER, Contents
from collage_fx.runtime.residuals.dtensor import is_sharded, shard_of
from collage_fx.runtime.residuals.residual import Residual
from collage_fx.runtime.residuals.store import STORE
from collage_fx.segments.segment_graph import number_tensor
from collage_fx.stand_in.alike import is_constant
from collage_fx.stand_in.stand_ins import StandIns

_FLOAT = re.compile(r"L\['self'\]\.param_groups\[(\d+)\]\['(\w+)'\]")
"""Dynamo's name for a number of a parameter group; see `name_of_number`."""


class RepeatedStep:
    """One step of an optimizer, to be done again as long as nothing has changed."""

    def __init__(
        self, optimizer: Optimizer, stand_ins: StandIns, noted: Noted, steps: Steps
    ) -> None:
        """Take up what the last step has done.

        Args:
            optimizer: whose step it was.
            stand_ins: by which it was done, as all of the step.
            noted: what its graph was given.
            steps: keeps the record.

        Raises Unrepeatable, or whatever compiling the comparison raises.
        """
        code, args = stand_ins.code, noted.args
        assert code is not None and args is not None
        self.steps, self.globals = steps, GlobalState()
        self.generation = STORE.generation
        known = [call.residuals for call in code.begin(args)]
        current = current_residuals(known)
        taken = args if code.parts else noted.calls[0].inputs
        numbers = numbers_taken(optimizer, stand_ins.sources, args, taken)
        self.numbers = list(numbers.values())
        """The group and the key of each float that the graph takes."""
        contents = _contents(optimizer, stand_ins, current, self.numbers)
        self.runs: _ByCalls | _ByKernels
        if code.parts:
            self.runs = _ByCalls(code, args, known, contents, list(numbers))
        else:
            self.runs = _ByKernels(code, noted.calls[0], contents, list(numbers))
        keep_versions([residual for _, residual in current.values()], self.runs.snapshot)

    def run(self, optimizer: Optimizer) -> bool:
        """Do the step; return False, with nothing done, if something has changed."""
        runs, groups = self.runs, optimizer.param_groups
        if not self._allowed(optimizer):
            return False
        grads = runs.snapshot.unchanged(vars(optimizer))
        if not grads or not runs.fit():
            return False
        found: list[Any] = [groups[g][key] for g, key in self.numbers]
        if not all(map(math.isfinite, found)):
            return False
        runs.run(grads, list(map(number_tensor, found)))
        self.steps.repeated()
        return True

    def _allowed(self, optimizer: Optimizer) -> bool:
        """Tell whether all that is no part of the optimizer is as it was."""
        return bool(
            self.generation == STORE.generation
            and self.steps.compiles
            and self.globals.same()
            and not left_out.is_open()
            and not has_foreign_hooks(optimizer)
        )


class _ByKernels:
    """A step that is done by kernels."""

    def __init__(
        self, code: Code, observed: Observed, contents: Contents, numbers: list[int]
    ) -> None:
        if code.direct is None or not code.direct.only_kernels:
            raise Unrepeatable("its graph returns values")
        given = {id(t): t for t in observed.args}
        self.bound = BoundKernels(code, observed, contents, [given[n] for n in numbers])
        self.snapshot, self.fit = self.bound.snapshot, self.bound.fit
        low = {id(c) for c in contents.others}
        written = (i for call in code.direct.calls for i in call.operands[0])
        tensors = [observed.inputs[i] for i in written if i < len(observed.inputs)]
        self.written = [*(t for t in tensors if id(t) not in low), *contents.sharded]

    def run(self, grads: Sequence[Tensor], numbers: Sequence[Tensor]) -> None:
        self.bound.run(grads, numbers, self.written)


class _ByCalls:
    """A step of which the parts are called one after another, as where matrices are multiplied."""

    def __init__(
        self,
        code: Code,
        args: tuple[Any, ...],
        known: Sequence[Gathered],
        contents: Contents,
        numbers: list[int],
    ) -> None:
        if code.returns_from_parts or contents.sharded:
            raise Unrepeatable("its graph returns values, or has DTensors")
        self.graph = Calls(code, known, contents)
        self.snapshot = self.graph.snapshot
        place = {number: k for k, number in enumerate([*map(id, contents.given), *numbers])}
        known_ids = place.keys() | {id(t) for t in contents.guarded}
        # Numbers that are none of those come of what is compared.
        if any(isinstance(x, Tensor) and x.dim() and id(x) not in known_ids for x in args):
            raise Unrepeatable("it takes other tensors than parameters, gradients and states")
        self.places = [(i, place[id(x)]) for i, x in enumerate(args) if id(x) in place]
        """The arguments that are others in each step, with which gradient or number each is."""
        self.args = [None if id(x) in place else x for x in args]

    def fit(self) -> bool:
        return True

    @torch.no_grad()
    def run(self, grads: Sequence[Tensor], numbers: Sequence[Tensor]) -> None:
        given, args = (*grads, *numbers), self.args.copy()
        for i, k in self.places:
            args[i] = given[k]
        self.graph.run(tuple(args))


def name_of_number(group: int, key: str) -> str:
    """Return Dynamo's name for a number of a parameter group."""
    return f"L['self'].param_groups[{group}]['{key}']"


def numbers_taken(
    optimizer: Optimizer,
    sources: Sequence[str],
    args: tuple[Any, ...],
    taken: Iterable[Any],
) -> dict[int, tuple[int, str]]:
    """Return, by the ids of the tensors that Dynamo made of them, where floats come from.

    Args:
        optimizer: whose groups have them.
        sources: Dynamo's names for the arguments of the graph.
        args: the arguments.
        taken: those, and whatever else, of which they are asked for.
    """
    found = {}
    for t, source in zip(args, sources, strict=False):
        if (place := _FLOAT.fullmatch(source)) is not None:
            group, key = int(place[1]), place[2]
            if type(optimizer.param_groups[group].get(key)) is float:
                found[id(t)] = group, key
    wanted = {*map(id, taken)}
    return {number: place for number, place in found.items() if number in wanted}


def _contents(
    optimizer: Optimizer,
    stand_ins: StandIns,
    current: dict[int, tuple[Tensor, Residual]],
    numbers: Sequence[tuple[int, str]],
) -> Contents:
    """Return what has to be as it was; `current` is what has residuals."""
    groups, state = optimizer.param_groups, optimizer.state
    # What refers to the optimizer is not to be kept: one that nobody needs is to go at once.
    attributes = {k: v if is_constant(v) else ANYTHING for k, v in vars(optimizer).items()}
    attributes |= {"param_groups": groups, "state": state}
    containers: list[tuple[Any, Sequence[Any]]] = [
        (groups, list(groups)),
        (state, list(_items(state))),
        *(
            (group, list(_items({k: NUMBER if (g, k) in numbers else v for k, v in group.items()})))
            for g, group in enumerate(groups)
        ),
        *((group["params"], list(group["params"])) for group in groups),
        *((one, list(_items(one))) for one in state.values()),
    ]
    held = [*state.values(), *({k: v for k, v in g.items() if k != "params"} for g in groups)]
    if not all(is_constant(v) or isinstance(v, Tensor) for one in held for v in one.values()):
        raise Unrepeatable("a group or a state has what can be changed in place")
    others = [v for one in held for v in one.values() if isinstance(v, Tensor)]
    wholes = {id(t): t for t in (*params_of(optimizer), *others)}
    guarded = list(map(shard_of, wholes.values()))
    if len(stand_ins.plain) != len(stand_ins.params) or not all(map(is_plain, guarded)):
        raise Unrepeatable("there are tensors of classes with code of their own")
    if any(t.is_inference() for t in guarded):
        raise Unrepeatable("there are inference tensors, which count no versions")
    if any(isinstance(v, Tensor) for v in vars(optimizer).values()):
        raise Unrepeatable("it has what torch.amp.GradScaler leaves there")
    grads = [shard_of(p.grad) for p in stand_ins.params]
    if len({id(g) for g in grads}) < len(grads):
        raise Unrepeatable("parameters share a gradient")
    low = [c for _, r in current.values() for c in r.components]
    return Contents(
        attributes=list(_items(attributes)),
        containers=containers,
        guarded=guarded,
        others=low,
        written=[t for t, _ in current.values()],
        params=stand_ins.params,
        without=stand_ins.without,
        given=grads,
        sharded=[t for t in wholes.values() if is_sharded(t)],
        alike=guards_of([*guarded, *grads]).check,
    )


def _items(one: dict[Any, Any]) -> Iterator[Any]:
    for pair in one.items():
        yield from pair
