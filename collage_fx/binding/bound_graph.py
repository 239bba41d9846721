"""A graph of Dynamo's bound to the tensors of a call: what does a step like the last one.

Dynamo guards what a step of arbitrary Python may read. Behind its guards the arguments of the
graph, and the tensors that are attributes of it, are all that a call depends on.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from collage_fx.binding.bound_kernels import BoundKernels
from collage_fx.binding.launches import Unrepeatable
from collage_fx.compilation.layout_guards import guards_of, is_plain
from collage_fx.compilation.side_inputs import Code, Observed
from collage_fx.runtime.kernels.tensor_snapshot import Contents
from collage_fx.runtime.residuals.store import STORE


class BoundGraph:
    """A compiled graph, for calls with the states that one call had, and with any gradients."""

    def __init__(
        self, graph: Any, code: Code, observed: Observed, counted_up: Sequence[Tensor]
    ) -> None:
        """Bind the graph to what a call has given it.

        Args:
            graph: what Dynamo calls.
            code: what it was compiled to.
            observed: what its kernels were given.
            counted_up: the tensors whose versions the call has counted up.

        Raises Unrepeatable, or whatever compiling the comparison raises.
        """
        self.graph, self.code, self.counted_up = graph, code, counted_up
        fixed = [
            *counted_up,
            *(t for t, _ in (*observed.residuals.current, *code.written(observed.args))),
        ]
        fixed += [t for find, _ in code.reads if (t := find(observed.args)) is not None]
        contents, self.values = _contents(code, observed, {id(t) for t in fixed})
        self.given = contents.given_arguments
        values = [observed.args[i] for i in self.values]
        self.kinds = [_kind(value) for value in values]
        self.bound = BoundKernels(code, observed, contents, values)

    def run(self, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Do what the graph does; return its results, or None, with nothing done, if it cannot."""
        bound = self.bound
        if bound.generation != STORE.generation or not bound.snapshot.holds(args):
            return None
        values = [args[i] for i in self.values]
        if not bound.fit() or [_kind(value) for value in values] != self.kinds:
            return None
        results = bound.run([args[i] for i in self.given], values, self.counted_up)
        side = self.code.side
        if side is not None and side.members is not None:
            return side.members.results(results, args)
        return tuple(results)


def _contents(code: Code, observed: Observed, fixed: set[int]) -> tuple[Contents, list[int]]:
    """Return what has to be as it was, and which arguments are other numbers in each call.

    Args:
        code: the compiled graph.
        observed: what its kernels were given.
        fixed: the ids of the tensors that no other may take the place of.
    """
    args, current = observed.args, observed.residuals.current
    low = [c for _, r in current for c in r.components]
    lows = {id(c) for c in low}
    taken = {id(x): x for x in observed.inputs if id(x) not in lows}
    place = {id(x): i for i, x in reversed(list(enumerate(args)))}
    tensors = [t for t in taken.values() if isinstance(t, Tensor)]
    guarded = [t for t in tensors if id(t) in fixed or id(t) not in place]
    free = sorted(place[id(t)] for t in {*tensors} - {*guarded})
    direct, side = code.direct, code.side
    on_host = direct is None or all(call.device.type == "cpu" for call in direct.calls)
    chosen = (
        range(len(args)) if side is None or side.members is None else side.members.narrow.inputs
    )
    values = [i for i in chosen if not isinstance(args[i], Tensor)]
    values += [i for i in free if not on_host and _is_number(args[i])]
    given = [i for i in free if i not in {*values}]
    present = [args[i] for i in given]
    if not all(map(is_plain, tensors)) or any(t.is_inference() for t in tensors):
        raise Unrepeatable("there are tensors of classes with code of their own, or no versions")
    contents = Contents(
        guarded=guarded,
        others=low,
        written=[t for t, _ in current],
        given=present,
        arguments=[place.get(id(t), -1) for t in guarded],
        given_arguments=given,
        alike=guards_of([*guarded, *present]).check,
    )
    return contents, values


def _is_number(value: Tensor) -> bool:
    """Tell whether a tensor is a number of the host, as Dynamo hands over floats."""
    return value.dim() == 0 and value.is_cpu


def _kind(value: Any) -> torch.dtype | type:
    return value.dtype if isinstance(value, Tensor) else type(value)
