"""Symbolic numbers of a Dynamo graph, for when it is compiled again.

A Python number that changes from step to step (a step count, a size) is a symbol in the graph, and
Dynamo's guards say for which values the graph holds. Compiled again from the arguments of one call
the graph would have the numbers of that call for ever.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node

from collage_fx.compilation.graph_inputs import sources_of
from collage_fx.passes.codegen.inductor_compile import fake_mode_of
from collage_fx.passes.dedup.graph_scan import written_by
from collage_fx.runtime.torch_private import TracingContext, tracing
from collage_fx.stand_in.group_numbers import ALWAYS, Condition


class Symbols:
    """The symbolic numbers of one graph, and their values at a call."""

    def __init__(self, gm: GraphModule) -> None:
        self.examples = [n.meta.get("example_value") for n in gm.graph.find_nodes(op="placeholder")]
        memos = ((i, getattr(x, "item_memo", None)) for i, x in enumerate(self.examples))
        self.items = {i: memo for i, memo in memos if memo is not None}
        """Position of a 0-d tensor, as which Dynamo hands in a float -> the symbol of its value."""
        self.sources = sources_of(gm)
        """Source of each argument, as Dynamo names it."""
        # Dynamo's own, not the one that it begins for a backend: that has not seen these tensors.
        self.fake_mode = fake_mode_of(self.examples)
        self.assumed: list[sympy.Expr] = []
        """Assumptions about the symbols, beyond Dynamo's guards, made by compiling it again."""

    def condition(self) -> Condition | None:
        """Return the condition on the numbers for which the graph holds, as far as is known here.

        None if it is none of numbers that Dynamo hands in, or cannot be asked for values.
        """
        env = getattr(self.fake_mode, "shape_env", None)
        guards = [*self.assumed, *(guard.expr for guard in (env.guards if env is not None else ()))]
        if not guards:
            return ALWAYS
        numbers = {m.node.expr: (self.sources[i], m.node.hint) for i, m in self.items.items()}
        used = sorted({s for expr in guards for s in expr.free_symbols}, key=str)
        if not numbers.keys() >= {*used}:
            return None
        holds = sympy.lambdify(used, sympy.And(*guards), modules="math")
        try:
            known = bool(holds(*(numbers[s][1] for s in used)))
        except Exception:  # a function of torch's own, of which sympy prints no code
            return None
        return Condition(tuple(numbers[s][0] for s in used), holds) if known else None

    @contextmanager
    def compiling_again(self, args: Sequence[Any]) -> Iterator[Sequence[Any]]:
        """Let the graph be compiled, within this context, as when Dynamo made it.

        Args:
            args: those of a call.

        Yields:
            The inputs to compile it for: fake tensors and symbols; args, if it has no symbol.
        """
        env = getattr(self.fake_mode, "shape_env", None)
        symbolic = self.items or any(map(_symbolic, self.examples))
        if env is None or not symbolic or any(x is None for x in self.examples):
            yield args
            return
        before, frozen = len(env.guards), env.frozen
        for i, memo in self.items.items():  # which has been forgotten, the graph having been traced
            self.examples[i].item_memo = memo
        env.frozen = False  # Dynamo froze it when it made its guards: later ones would be dropped
        try:
            with tracing(TracingContext(self.fake_mode)):
                yield self.examples
        finally:
            env.frozen = frozen
        self.assumed = [guard.expr for guard in env.guards[before:]]

    def hold(self, args: Sequence[Any]) -> bool:
        """Return True if what was assumed is so for the arguments of a call."""
        if not self.assumed:
            return True
        values = self._values(args)
        return all(expr.xreplace(values) == sympy.true for expr in self.assumed)

    def _values(self, args: Sequence[Any]) -> dict[sympy.Symbol, sympy.Expr]:
        """Return the values of the symbols in a call."""
        found: dict[sympy.Symbol, sympy.Expr] = {}
        for i, (example, arg) in enumerate(zip(self.examples, args, strict=True)):
            pairs = [(example, arg)]
            if isinstance(example, torch.Tensor):
                pairs = list(zip(example.shape, arg.shape, strict=True))
                if i in self.items:
                    pairs.append((self.items[i], arg.item()))
            for symbolic, value in pairs:
                if _symbolic(symbolic):
                    found[symbolic.node.expr] = sympy.sympify(value)
        return found


def _symbolic(example: Any) -> bool:
    if isinstance(example, torch.Tensor):
        sizes = (*example.shape, *example.stride()) if example.layout is torch.strided else ()
        return any(map(_symbolic, sizes))
    return isinstance(example, torch.SymInt | torch.SymFloat | torch.SymBool)


def writes_number(gm: GraphModule) -> bool:
    """Return True if a Dynamo graph overwrites an input that is a 0-d float64 tensor on a CPU.

    Dynamo takes such a tensor for a Python number when it traces again, and drops the write. See
    docs/stock-defects.md.
    """
    return any(map(_is_number, chain.from_iterable(map(written_by, gm.graph.nodes))))


def _is_number(node: Node) -> bool:
    if node.op not in ("placeholder", "get_attr"):
        return False
    x = node.meta.get("example_value")
    if not isinstance(x, torch.Tensor) or x.dim():
        return False
    return x.dtype == torch.float64 and x.device.type == "cpu"
