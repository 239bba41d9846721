"""Prediction of the error that the storages of a budget make, as `explain` shows it."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from collage_fx.optimizer.parameter_names import renamed_state
from collage_fx.optimizer.state_table import grouped, table, wrapped
from collage_fx.runtime.storage.state_name import Named, StateName

PLANNED = 100
"""The step after which the storages are decided on."""


@dataclass(frozen=True)
class Predicted(Named):
    """The storage of a state, and the error that it makes."""

    state_name: StateName
    storage: str
    size: int
    """Bytes of the residual."""
    error: float
    """Error that the state makes in all parameters, relative to their way so far."""
    noise: float
    """Length of what storing an update adds to it, relative to that of the update."""

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON can hold it."""
        shown = {"name": self.name, "storage": self.storage, "residual_bytes": self.size}
        return {**shown, "error": self.error, "noise": self.noise}


@dataclass(frozen=True)
class Prediction:
    """The storages that were chosen for a budget, with the errors that are predicted of them."""

    budget: float | str
    per_element: float
    """Bytes of parameters, states and residuals for each element of the parameters."""
    planned: bool
    """True if the storages are decided on, and stay."""
    taken: int
    """Number of steps taken."""
    steps: int
    """Number of steps that it is about: from the first that was looked at to the last one."""
    states: Sequence[Predicted]

    @property
    def error(self) -> float:
        """The error of the parameters after these steps, relative to their way in them."""
        return _length(one.error for one in self.states)

    def renamed(self, names: dict[str, str]) -> "Prediction":
        """Return the same with other names of parameters."""
        states = [
            replace(one, state_name=renamed_state(one.state_name, names)) for one in self.states
        ]
        return replace(self, states=states)

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON can hold it."""
        about = {"budget": self.budget, "bytes_per_element": self.per_element}
        about |= {"planned": self.planned, "steps": self.steps, "error": self.error}
        return {**about, "states": [one.to_dict() for one in self.states]}

    def lines(self, width: int) -> Iterator[str]:
        """Yield the lines of a report: a table of the states, those alike in one row, below it all
        in a sentence."""
        if not self.taken:
            yield f"budget {self.budget}: storages are chosen in the first {PLANNED} steps"
            return
        until = "stays as it is" if self.planned else f"is made anew after step {PLANNED}"
        yield from wrapped(
            f"budget {self.budget}: parameters, states and residuals take {self.per_element:.4g} "
            f"bytes for each element of the parameters; this choice of storages {until}",
            width,
        )
        if not self.steps:
            return
        rows = [("state", "storage", "bytes", "error", "noise")]
        for group in grouped(self.states, lambda one: one.storage):
            found = group.states
            size, error = sum(one.size for one in found), _length(one.error for one in found)
            noise = _length(one.noise for one in found) / math.sqrt(len(found))
            rows.append(
                (group.label, found[0].storage, f"{size:,}", f"{error:.1e}", f"{noise:.1e}")
            )
        yield from table(rows, width, wraps={0: 16})
        yield from wrapped(
            f"predicted error of the parameters after {self.steps} steps: {self.error:.1e} of "
            "their way in these, beside that of fp32; noise is what storing adds to an update of a "
            "state, relative to it, which a monitor measures",
            width,
        )


def _length(numbers: Iterable[float]) -> float:
    return math.sqrt(sum(x * x for x in numbers))
