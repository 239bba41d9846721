"""Steps that are done again as the last one was: the same kernels over the same tensors.

A step of three hundred parameters looks at some thousands of tensors in Python: by guards, for
residuals that do not belong to their tensors any more, for the addresses that kernels are given.
Where nothing has changed since the last step, compiled code sees that in a fraction of the time,
and the kernels are called from here. What the compiled code does not see, such as another global
state, is asked for beside it. Whatever has changed, the step is done as any other.
"""

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from collage_fx.binding.bound_kernels import BoundKernels, current_residuals, keep_versions
from collage_fx.binding.launches import Unrepeatable
from collage_fx.compilation.layout_guards import guards_of, is_plain
from collage_fx.compilation.side_inputs import Observed
from collage_fx.hooks.nested_compile import GlobalState
from collage_fx.hooks.optimizer_hooks import has_foreign_hooks
from collage_fx.optimizer.ownership import params_of
from collage_fx.record.steps import Steps
from collage_fx.runtime.kernels.tensor_snapshot import ANYTHING, NUMBER, Contents
from collage_fx.runtime.residuals.dtensor import is_sharded, shard_of
from collage_fx.runtime.residuals.store import STORE
from collage_fx.segments.segment_graph import number_tensor
from collage_fx.stand_in.alike import is_constant
from collage_fx.stand_in.stand_ins import StandIns

_FLOAT = re.compile(r"L\['self'\]\.param_groups\[(\d+)\]\['(\w+)'\]")
"""Dynamo's name for a number of a parameter group; see `name_of_number`."""


class RepeatedStep:
    """One step of an optimizer, to be done again as long as nothing has changed."""

    def __init__(
        self, optimizer: Optimizer, stand_ins: StandIns, observed: Observed, steps: Steps
    ) -> None:
        """Take up what the last step has done.

        Args:
            optimizer: whose step it was.
            stand_ins: by which it was done, as all of the step.
            observed: what its graph was given.
            steps: keeps the record.

        Raises Unrepeatable, or whatever compiling the comparison raises.
        """
        code = stand_ins.code
        assert code is not None
        self.steps, self.globals = steps, GlobalState()
        if code.direct is None or not code.direct.only_kernels:
            raise Unrepeatable("its graph returns values")
        current_residuals([observed.residuals])
        numbers = numbers_taken(optimizer, stand_ins.sources, observed)
        self.numbers = list(numbers.values())
        """The group and the key of each float that the graph takes."""
        contents = _contents(optimizer, stand_ins, observed, self.numbers)
        given = {id(t): t for t in observed.args}
        self.generation = STORE.generation
        self.bound = BoundKernels(code, observed, contents, [given[n] for n in numbers])
        keep_versions(self.bound.residuals, self.bound.snapshot)
        low = {id(c) for r in self.bound.residuals for c in r.components}
        written = (i for call in code.direct.calls for i in call.operands[0])
        tensors = [observed.inputs[i] for i in written if i < len(observed.inputs)]
        self.written = [*(t for t in tensors if id(t) not in low), *contents.sharded]

    def run(self, optimizer: Optimizer) -> bool:
        """Do the step; return False, with nothing done, if something has changed."""
        bound, groups = self.bound, optimizer.param_groups
        if not self._allowed(optimizer):
            return False
        grads = bound.snapshot.unchanged(vars(optimizer))
        if not grads or not bound.fit():
            return False
        found: list[Any] = [groups[g][key] for g, key in self.numbers]
        if not all(map(math.isfinite, found)):
            return False
        bound.run(grads, list(map(number_tensor, found)), self.written)
        self.steps.repeated()
        return True

    def _allowed(self, optimizer: Optimizer) -> bool:
        """Tell whether all that is no part of the optimizer is as it was."""
        return bool(
            self.generation == STORE.generation
            and self.steps.compiles
            and self.globals.same()
            and not has_foreign_hooks(optimizer)
        )


def name_of_number(group: int, key: str) -> str:
    """Return Dynamo's name for a number of a parameter group."""
    return f"L['self'].param_groups[{group}]['{key}']"


def numbers_taken(
    optimizer: Optimizer, sources: Sequence[str], observed: Observed
) -> dict[int, tuple[int, str]]:
    """Return, by the ids of the tensors that Dynamo made of them, where floats come from."""
    found = {}
    for t, source in zip(observed.args, sources, strict=False):
        if (place := _FLOAT.fullmatch(source)) is not None:
            group, key = int(place[1]), place[2]
            if type(optimizer.param_groups[group].get(key)) is float:
                found[id(t)] = group, key
    taken = {id(t) for t in observed.inputs}
    return {number: place for number, place in found.items() if number in taken}


def _contents(
    optimizer: Optimizer,
    stand_ins: StandIns,
    observed: Observed,
    numbers: Sequence[tuple[int, str]],
) -> Contents:
    """Return what has to be as it was."""
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
    low = [c for _, r in observed.residuals.current for c in r.components]
    return Contents(
        attributes=list(_items(attributes)),
        containers=containers,
        guarded=guarded,
        others=low,
        written=[t for t, _ in observed.residuals.current],
        params=stand_ins.params,
        without=stand_ins.without,
        given=grads,
        sharded=[t for t in wholes.values() if is_sharded(t)],
        alike=guards_of([*guarded, *grads]).check,
    )


def _items(one: dict[Any, Any]) -> Iterator[Any]:
    for pair in one.items():
        yield from pair
