"""Verdicts on states: a kind, by which code decides, and a cause, which is shown."""

import enum
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from collage_fx.runtime.storage.registry import is_alone
from collage_fx.runtime.storage.state_name import Named, StateName


class VerdictKind(enum.Enum):
    """The verdict that a state is compensated, or the reason that it is not."""

    COMPENSATED = enum.auto()
    BY_CHANCE = enum.auto()
    """A state without residuals that is rounded by chance, which keeps its updates on average."""
    REFUSED = enum.auto()
    """A state that should be compensated, and cannot be."""
    PLAIN = enum.auto()
    """A state whose dtype loses nothing of the updates, or that no storage holds."""
    ANEW = enum.auto()
    """A state computed by a function, no sum, of another state, which accumulates."""
    NO_STATE = enum.auto()
    """A tensor that is no state of an optimizer."""
    GRADIENT = enum.auto()
    """A gradient, which is no state either: a step may scale or clip it."""
    LEVEL = enum.auto()
    """A state that level `light` leaves alone, and level `auto` would compensate."""
    LEVEL_UNKNOWN = enum.auto()
    """A state at level light where no tensor is known to be a parameter, so that it may be one."""


@dataclass(frozen=True)
class Verdict:
    """The verdict on a state."""

    kind: VerdictKind
    cause: str

    @property
    def compensated(self) -> bool:
        """True if the state has residuals, or is rounded by chance."""
        return self.kind in (VerdictKind.COMPENSATED, VerdictKind.BY_CHANCE)

    def in_storage(self, name: str) -> "Verdict":
        """Return the same of a state that is compensated, in a storage."""
        return Verdict(VerdictKind.BY_CHANCE, self.cause) if is_alone(name) else self


class Change(NamedTuple):
    """The change of a state by a step: the kind of the recurrence and its text."""

    kind: Literal["unknown", "overwritten", "unchanged", "linear", "selected", "nonlinear"]
    text: str
    factor: float | None = None
    """The number a of x' = a*x + B; None if it is none."""


UNKNOWN = Change("unknown", "")
"""Change of a state in no class."""


@dataclass
class Judged(Named):
    """A state with the verdict on it, and both as text."""

    state_name: StateName
    dtype: torch.dtype
    shape: tuple[int, ...] = ()
    change: Change = UNKNOWN
    decision: Verdict = Verdict(VerdictKind.PLAIN, "")

    @property
    def recurrence(self) -> str:
        """The recurrence as text: x' = a*x + B; empty if there is none."""
        return self.change.text

    @property
    def reason(self) -> str:
        """The cause of the verdict."""
        return self.decision.cause

    @property
    def verdict(self) -> str:
        """`compensated`, `by chance` (without residuals), `plain`, or `refused`: what should be
        compensated and cannot be."""
        if self.decision.kind is VerdictKind.BY_CHANCE:
            return "by chance"
        return "compensated" if self.compensated else "refused" if self.refused else "plain"

    @property
    def compensated(self) -> bool:
        """True if it has residuals, or is rounded by chance."""
        return self.decision.compensated

    @property
    def refused(self) -> bool:
        """True if it should be compensated and cannot be."""
        return self.decision.kind is VerdictKind.REFUSED

    @property
    def replaced(self) -> bool:
        """True if the new value has nothing to do with the old one, as far as is known."""
        return self.change.kind in ("unknown", "overwritten")

    @property
    def computed_anew(self) -> bool:
        """True if the new value is made of others, with or without the old one among them."""
        return self.replaced or self.decision.kind is VerdictKind.ANEW
