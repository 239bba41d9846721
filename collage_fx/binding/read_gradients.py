"""Residuals of the gradients that a bound graph reads, found anew at each call."""

from collections.abc import Sequence
from typing import TypeAlias

from torch import Tensor

from collage_fx.passes.ir.program import LOW_PRECISION
from collage_fx.runtime.residuals.memory import has_memory
from collage_fx.runtime.residuals.residual import Residual
from collage_fx.runtime.residuals.store import STORE

Pairs: TypeAlias = list[tuple[Tensor, Residual]]


class ReadGradients:
    """Gradients with residuals, as `accumulate` sums them: other tensors in each step."""

    def __init__(self, read: Pairs, given: Sequence[Tensor], *, looks: bool = False) -> None:
        """Note which of the tensors of a call are such gradients, and which have no residual.

        Args:
            read: the gradients with their residuals.
            given: the tensors that may be others in each call.
            looks: whether others than gradients may have a residual among them.
        """
        at = dict(zip(map(id, given), range(len(given)), strict=True))
        self.read = [(at[id(t)], t.dtype, r.storage, r.name) for t, r in read]
        """Positions and dtypes of these gradients, storages and names of their residuals."""
        others = {*at.values()}.difference(k for k, *_ in self.read)
        self.plain = [k for k in others if given[k].dtype in LOW_PRECISION]
        """The positions of tensors that have no residual."""
        self.looks = looks or bool(read)

    @property
    def may_be(self) -> bool:
        """True if any of these tensors may have a residual."""
        return self.looks or bool(STORE.gradients)

    def find(self, given: Sequence[Tensor]) -> Pairs | None:
        """Return the gradients of a call with their residuals; None if these are other ones.

        Their layouts are not looked at.
        """
        if not self.may_be:
            return []
        if any(STORE.of([given[k] for k in self.plain])):
            return None
        tensors = [given[k] for k, *_ in self.read]
        pairs: Pairs = []
        found = zip(self.read, tensors, STORE.of(tensors), strict=True)
        for (_, dtype, storage, name), t, r in found:
            if r is None:  # of one backward pass only
                if t.dtype is not dtype or not has_memory(t):
                    return None
                r = Residual.of_none(t, storage, name)
            if r.storage != storage or r.expected is not None or not r.belongs(t):
                return None
            pairs.append((t, r))
        return pairs


def components_of(pairs: Pairs) -> list[Tensor]:
    """Return the components of residuals, one after another."""
    return [c for _, r in pairs for c in r.components]
