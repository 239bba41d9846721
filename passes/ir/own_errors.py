"""Rounding errors that a step computes itself, as Kahan's summation and error feedback do."""

import contextlib
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from collage_fx.passes.ir.exact import NotExact, operation
from collage_fx.passes.ir.program import LOW_PRECISION, Slice, is_tensor, value_of
from collage_fx.runtime.torch_private import _disable_current_modes

aten = torch.ops.aten

_ADDING = (aten.add.Tensor, aten.sub.Tensor)
_ELEMENTS, _SIZES = 16, 6
_NOTHING = 2.0**-40


def roundings_for_errors(part: Slice, whole: set[Node]) -> set[Node]:
    """Return the values in 16 bits whose roundings a slice computes the errors of.

    A sum or difference that is nothing where nothing is rounded, and something where all is, is
    such an error: of g * n and of its rounding, say, where the step keeps both. Without the
    rounding it would be zero, and lost.

    Args:
        part: the slice.
        whole: new values of states with residuals, which hold the errors themselves: these, and
            what is computed of them, count without their rounding.
    """
    behind: dict[Node, set[Node]] = {}
    candidates = {}
    inputs = set(part.inputs)
    for node in part.nodes:
        of = [behind.get(n, {n}) for n in node.all_input_nodes]
        behind[node] = {node}.union(*of)
        if node.target in _ADDING and len(of) == 2 and of[0] & of[1]:
            apart = {n for n in (of[0] ^ of[1]) - inputs if _is_low(n)}
            if apart := {n for n in apart if behind[n].isdisjoint(whole)}:
                candidates[node] = apart
    if not candidates:
        return set()
    with _disable_current_modes(), torch.no_grad():
        exact, rounded = (_Values(part, rounds=rounds).found for rounds in (False, True))
        errors = [n for n in candidates if _is_zero(n, exact) and not _is_zero(n, rounded)]
    return set().union(*(candidates[node] for node in errors))


def _is_low(node: Node) -> bool:
    return value_of(node).dtype in LOW_PRECISION


class _Values:
    """Values of the nodes of a slice in float64, on random inputs; a node that fails has none."""

    def __init__(self, part: Slice, *, rounds: bool) -> None:
        """Compute them.

        Args:
            part: the slice.
            rounds: whether values in 16 bits are rounded, as inputs are in any case.
        """
        self.rounds = rounds
        self.generator = torch.Generator().manual_seed(0)
        self.found: dict[Node, Any] = {}
        for node in part.inputs:
            self._add_input(node)
        for node in part.nodes:
            self._add(node)

    def _add_input(self, node: Node) -> None:
        """Add an input; a number is computed, so that what is computed twice is the same."""
        of = node.all_input_nodes
        if of and all(is_tensor(n) and value_of(n).dim() == 0 for n in (node, *of)):
            for n in of:
                if n not in self.found:
                    self._add_input(n)
            self._add(node)
        self.found.setdefault(node, self._drawn(value_of(node)))

    def _drawn(self, of: Tensor) -> Tensor:
        shape = () if of.dim() == 0 else (_ELEMENTS,)
        size = torch.randint(-_SIZES, _SIZES, shape, generator=self.generator)
        x = torch.randn(shape, dtype=torch.float64, generator=self.generator) * 2.0**size
        if of.dtype in LOW_PRECISION:
            return x.to(of.dtype).double()
        return x if of.dtype.is_floating_point else (x > 0).to(of.dtype)

    def _add(self, node: Node) -> None:
        dtype = value_of(node).dtype
        with contextlib.suppress(NotExact, KeyError, RuntimeError, TypeError):  # it has no value
            target, *given = operation(node)
            args, kwargs = map_arg(given, self.found.__getitem__)
            x = target(*args, **kwargs)
            rounded = self.rounds and dtype in LOW_PRECISION
            self.found[node] = x.to(dtype).double() if rounded else x


def _is_zero(node: Node, values: dict[Node, Tensor]) -> bool:
    """Return True if a sum of floats is nothing, though what it adds up is something."""
    terms = [values.get(n) for n in node.all_input_nodes]
    found = values.get(node)
    if found is None or not all(t is not None and t.is_floating_point() for t in (*terms, found)):
        return False
    size = torch.maximum(*(t.abs() for t in terms if t is not None))
    known = found.isfinite() & size.isfinite() & (size > 0)
    return bool(known.any()) and bool((found.abs() <= _NOTHING * size)[known].all())
