"""Repeated steps: the kernels of the last step, run again over the same tensors.

A step of three hundred parameters looks at some thousands of tensors in Python: by guards, for
residuals that do not belong to their tensors any more, for the addresses that kernels are given.
Where nothing has changed since the last step, compiled code sees that in a fraction of the time,
and the kernels are called from here. What the compiled code does not see, such as another global
state, is asked for beside it. Whatever has changed, the step is done as any other, or bound anew
where only tensors are others (`SharedGraph.repeated`).
"""

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from collage_fx.binding.bound_graph import Calls
from collage_fx.binding.bound_kernels import BoundKernels, current_residuals
from collage_fx.binding.launches import Unrepeatable
from collage_fx.binding.read_gradients import Pairs, ReadGradients, components_of
from collage_fx.compilation.layout_guards import guards_of, is_plain
from collage_fx.compilation.partition import Direct
from collage_fx.compilation.residual_binding import Gathered
from collage_fx.compilation.side_inputs import Code, Noted, Observed
from collage_fx.gradients.multiplied import FACTOR
from collage_fx.hooks.nested_compile import GlobalState
from collage_fx.hooks.optimizer_hooks import has_foreign_hooks
from collage_fx.optimizer.ownership import params_of
from collage_fx.record.steps import Steps
from collage_fx.runtime.expansion.stochastic import Seeds
from collage_fx.runtime.kernels import left_out
from collage_fx.runtime.kernels.tensor_snapshot import ANYTHING, NUMBER, Contents
from collage_fx.runtime.residuals.dtensor import shards_of
from collage_fx.runtime.residuals.residual import Residual, keep_versions, memory_of
from collage_fx.runtime.residuals.store import STORE
from collage_fx.segments.segment_graph import number_tensor
from collage_fx.stand_in.alike import constants
from collage_fx.stand_in.group_numbers import GroupNumbers, numbers_taken
from collage_fx.stand_in.stand_ins import StandIns


class RepeatedStep:
    """One step of an optimizer, to be done again as long as nothing has changed."""

    def __init__(
        self,
        runs: "_ByCalls | ByKernels",
        numbers: GroupNumbers,
        residuals: Iterable[Residual],
        gradients: ReadGradients,
        steps: Steps,
    ) -> None:
        """Bind it to the state of now of all that it depends on.

        Args:
            runs: do it.
            numbers: the floats of groups that its graph takes.
            residuals: those that it writes.
            gradients: finds those that it reads with residuals.
            steps: keeps the record.
        """
        self.runs, self.numbers, self.steps = runs, numbers, steps
        self.gradients = gradients
        self.globals, self.generation = GlobalState(), STORE.generation
        keep_versions(residuals, runs.snapshot.versions)

    @classmethod
    def of(
        cls, optimizer: Optimizer, stand_ins: StandIns, noted: Noted, steps: Steps
    ) -> "RepeatedStep":
        """Return the step that does the last one again.

        Args:
            optimizer: whose step it was.
            stand_ins: by which it was done, as all of the step.
            noted: what its graph was given.
            steps: keeps the record.

        Raises Unrepeatable, or whatever compiling the comparison raises.
        """
        code, args = stand_ins.code, noted.args
        assert code is not None and args is not None
        known = [call.residuals for call in code.begin(args)]
        current = current_residuals(known)
        read = [pair for one in known for pair in one.read]
        if not all([r.of_gradient for _, r in read]):
            raise Unrepeatable("it reads states that others write")
        taken = args if code.parts else noted.calls[0].inputs
        sources, condition = stand_ins.sources, stand_ins.condition()
        ids, numbers = numbers_taken(optimizer, sources, condition, args, taken)
        of_all = steps.session.shared_numbers()
        states = list(current.values())
        contents = contents_of(optimizer, stand_ins.params, states, numbers, of_all, read)
        runs: _ByCalls | ByKernels
        if code.parts:
            runs = _ByCalls(code, args, known, contents, ids, read)
        else:
            seeds = code.new_seeds()
            runs = ByKernels(code.direct, seeds, noted.calls[0], contents, ids)
        written = [residual for _, residual in current.values()]
        gradients = ReadGradients(read, contents.given[: len(contents.params)])
        return cls(runs, numbers, written, gradients, steps)

    def run(self, optimizer: Optimizer) -> bool:
        """Do the step; return False, with nothing done, if something has changed."""
        runs = self.runs
        if not self._allowed(optimizer):
            return False
        read = self._read()
        if read is None:
            return False
        given = runs.snapshot.unchanged(vars(optimizer), components_of(read))
        if not given or not runs.fit():
            return False
        found = self.numbers.read(optimizer.param_groups)
        if found is None:
            return False
        runs.run(given, list(map(number_tensor, found)), read)
        self.steps.repeated()
        return True

    def _read(self) -> Pairs | None:
        """Return the gradients that it reads with their residuals; None if these are others."""
        if not self.gradients.may_be:
            return []
        grads = [p.grad for p in self.runs.snapshot.params]
        found = any([g is None for g in grads])
        return None if found else self.gradients.find(shards_of(grads))

    def _allowed(self, optimizer: Optimizer) -> bool:
        """Return True if all that is no part of the optimizer is as it was."""
        return bool(
            self.generation == STORE.generation
            and self.steps.compiles
            and self.globals.same()
            and not left_out.is_open()
            and not has_foreign_hooks(optimizer)
        )


class ByKernels:
    """A step that is done by kernels."""

    def __init__(
        self,
        direct: Direct | None,
        seeds: Seeds | None,
        observed: Observed,
        contents: Contents,
        numbers: list[int],
    ) -> None:
        """Bind kernels to what a step has given them, or would give them.

        Args:
            direct: the kernels of its graph, if these are all.
            seeds: what they take of these, if they round by chance.
            observed: what they are given.
            contents: what has to be as it was.
            numbers: the ids of the arguments of the graph that come of floats.

        Raises Unrepeatable.
        """
        if direct is None or not direct.only_kernels:
            raise Unrepeatable("its graph returns values")
        given = {id(t): t for t in observed.args}
        values = [given[n] for n in numbers]
        self.bound = BoundKernels(direct, seeds, observed, contents, values)
        self.snapshot, self.fit = self.bound.snapshot, self.bound.fit
        apart = {id(t) for t in (*contents.others, *contents.given)}
        written = [i for call in direct.calls for i in call.operands[0]]
        tensors = [observed.inputs[i] for i in written if i < len(observed.inputs)]
        reached = {id(t) for t in tensors}
        self.zeroed = [k for k, g in enumerate(contents.given) if id(g) in reached]
        """The positions of the gradients that it writes."""
        self.written = [*[t for t in tensors if id(t) not in apart], *contents.sharded]

    def run(self, given: Sequence[Tensor], numbers: Sequence[Tensor], read: Pairs) -> None:
        """Do the step with these gradients, the residuals of those that it reads, and numbers."""
        zeroed = [given[k] for k in self.zeroed]
        self.bound.run(given, numbers, [*self.written, *zeroed])


class _ByCalls:
    """A step of which the parts are called one after another, as where matrices are multiplied."""

    def __init__(
        self,
        code: Code,
        args: tuple[Any, ...],
        known: Sequence[Gathered],
        contents: Contents,
        numbers: list[int],
        read: Pairs,
    ) -> None:
        if code.returns_from_parts or contents.sharded:
            raise Unrepeatable("its graph returns values, or has DTensors")
        self.graph = Calls(code, known, contents, read)
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
    def run(self, given: Sequence[Tensor], numbers: Sequence[Tensor], read: Pairs) -> None:
        every, args = (*given, *numbers), self.args.copy()
        for i, k in self.places:
            args[i] = every[k]
        self.graph.run(tuple(args), read)


def contents_of(
    optimizer: Optimizer,
    params: Sequence[Tensor],
    current: Sequence[tuple[Tensor, Residual]],
    numbers: GroupNumbers,
    of_all: Sequence[Tensor],
    read: Pairs,
) -> Contents:
    """Return the contents that have to be unchanged for a step to be done again.

    Args:
        optimizer: whose step it is.
        params: the parameters that it updates.
        current: what has residuals that it writes, with these.
        numbers: floats of groups that may be others.
        of_all: further 0-d tensors that its graph reads.
        read: gradients that it reads with their residuals, with these.

    Raises Unrepeatable.
    """
    groups, state = optimizer.param_groups, optimizer.state
    # What refers to the optimizer is not to be kept: one that nobody needs is to go at once.
    own = vars(optimizer)
    fixed = zip(own.items(), constants(own.values()), strict=True)
    attributes = {k: v if constant else ANYTHING for (k, v), constant in fixed}
    attributes |= {"param_groups": groups, "state": state}
    known = [
        {k: _another(v) if (g, k) in numbers.taken else v for k, v in group.items()}
        for g, group in enumerate(groups)
    ]
    containers: list[tuple[Any, Iterable[Any]]] = [
        (groups, groups),
        (state, chain.from_iterable(state.items())),
        *[(one, chain.from_iterable(its.items())) for one, its in zip(groups, known, strict=True)],
        *[(group["params"], group["params"]) for group in groups],
        *[(one, chain.from_iterable(one.items())) for one in state.values()],
    ]
    held = [*state.values(), *[{k: v for k, v in g.items() if k != "params"} for g in groups]]
    others = [v for one in held for v in one.values() if isinstance(v, Tensor)]
    rest = [v for one in held for v in one.values() if not isinstance(v, Tensor)]
    if not all(constants(rest)):
        raise Unrepeatable("a group or a state has what can be changed in place")
    every = params_of(optimizer)
    wholes = list({id(t): t for t in (*every, *others, *of_all)}.values())
    guarded, grads = shards_of(wholes), shards_of([p.grad for p in params])
    memory = components_of(read) if read else []
    if not is_plain(*guarded, *grads):
        raise Unrepeatable("there are tensors of classes with code of their own")
    if any([t.is_inference() for t in guarded]):
        raise Unrepeatable("there are inference tensors, which count no versions")
    if any([isinstance(v, Tensor) and k != FACTOR for k, v in own.items()]):
        raise Unrepeatable("it has what torch.amp.GradScaler leaves there")
    if len({*map(id, grads)}) < len(grads):
        raise Unrepeatable("parameters share a gradient")
    return Contents(
        attributes=list(chain.from_iterable(attributes.items())),
        containers=containers,
        guarded=guarded,
        others=memory_of([r for _, r in current]),
        written=[t for t, _ in current],
        params=params,
        without=[p for p in every if p.grad is None],
        given=[*grads, *memory],
        sharded=[t for t, shard in zip(wholes, guarded, strict=True) if t is not shard],
        alike=guards_of([*guarded, *grads, *memory]).check,
    )


def _another(value: Any) -> Any:
    """Return the sign for a number that may be another, or a tuple that has one."""
    return NUMBER if type(value) is float else ANYTHING
