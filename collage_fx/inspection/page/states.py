"""The verdicts by class and layer, as few rows as say something different."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from collage_fx.inspection.page.operations import dtype_name
from collage_fx.optimizer.state_table import PARAMETER
from collage_fx.passes.ir.program import Rewritten, StatePlan

if TYPE_CHECKING:
    from collage_fx.inspection.explanation import Explanation

PLAIN = -1
"""The number of what is in no class that was rewritten."""


@dataclass(frozen=True)
class Place:
    """Where a state is: in which class, and what it is."""

    number: int
    name: str
    """That of the optimizer, whatever the plan calls it."""
    is_param: bool


@dataclass
class Row:
    """States that have everything in common but the layer."""

    number: int
    """Of the class."""
    kind: str
    dtype: str
    recurrence: str
    verdict: str
    reason: str
    storage: str
    keeps: str
    engine: str
    residual_bytes: int = 0
    names: list[str] = field(default_factory=list)
    """What the optimizer calls them."""
    layers: list[tuple[int, str]] = field(default_factory=list)
    """For each of them the number of its layer, and its shape."""


@dataclass
class States:
    """All verdicts."""

    rows: list[Row]
    layers: list[str]
    """Names of parameters, in order."""

    def of(self, number: int) -> list[Row]:
        """Return the rows of a class."""
        return [row for row in self.rows if row.number == number]

    @property
    def data(self) -> dict[str, Any]:
        """What the page's script shows and searches, as small as it is in JSON."""
        return {
            "layers": self.layers,
            "rows": [
                [r.number, r.kind, r.verdict, r.reason, [i for i, _ in r.layers], _runs(r)]
                for r in self.rows
            ],
        }


def _runs(row: Row) -> list[Any]:
    """Return the shapes of a row: each once, with how many states in turn have it."""
    found: list[Any] = []
    for _, shape in row.layers:
        if found and found[-1][0] == shape:
            found[-1][1] += 1
        else:
            found.append([shape, 1])
    return found


def states_of(explanation: "Explanation", classes: list[Rewritten]) -> States:
    """Return the verdicts of an explanation.

    Args:
        explanation: what was found out.
        classes: those of the page, in order.
    """
    places = _Places(explanation, classes)
    rows: dict[tuple[Any, ...], Row] = {}
    layers: dict[str, int] = {}
    for state in explanation.plan:
        place = places.of(state)
        first, _, owner = state.name.partition(" of ")
        layer = owner or (first if place.is_param else "")
        kind = first if owner or not place.is_param else PARAMETER
        engine = explanation.engine.get(state.name, explanation.engine.get(place.name, "graph"))
        dtype, recurrence, verdict, reason, storage, keeps = _facts(state)
        row = Row(place.number, kind, dtype, recurrence, verdict, reason, storage, keeps, engine)
        key = tuple(v for v in vars(row).values() if not isinstance(v, list))
        row = rows.setdefault(key, row)
        row.names.append(place.name)
        row.residual_bytes += state.residual_bytes
        row.layers.append((layers.setdefault(layer, len(layers)), _shape(state.shape)))
    order = {PLAIN: len(classes)}
    found = sorted(rows.values(), key=lambda r: (order.get(r.number, r.number), -len(r.names)))
    return States(found, list(layers))


def _shape(shape: Iterable[int]) -> str:
    return " x ".join(str(s) for s in shape) or "0-d"


def _facts(state: StatePlan) -> tuple[str, str, str, str, str, str]:
    """Return dtype, recurrence, verdict, reason, storage and what it keeps, in words."""
    keeps = "" if state.keeps is None else f"{state.keeps:.1e}"
    dtype = dtype_name(state.dtype)
    return dtype, state.recurrence, state.verdict, state.reason, state.storage, keeps


class _Places:
    """Knows the class of each state."""

    def __init__(self, explanation: "Explanation", classes: list[Rewritten]) -> None:
        self.by_identity: dict[int, Place] = {}
        self.by_name: dict[str, Place] = {}
        self.by_index: dict[int, Place] = {}
        self.alone = len(explanation.compiled) == 1
        for one in explanation.compiled:
            program = one.program
            number: dict[int, int] = {}
            carried = [*program.carried, *(c for cs in program.others.values() for c in cs)]
            for rewritten in (r for r in program.rewritten if r in classes):
                for member in rewritten.members:
                    for state, _, _ in member.states:
                        others = program.others.get(state.index, [])
                        for c in (state, *others):
                            number[c.index] = classes.index(rewritten)
            known = {
                c.index: Place(number.get(c.index, PLAIN), c.name, c.owner == "param")
                for c in carried
            }
            self.by_index |= known
            self.by_name |= {place.name: place for place in known.values()}
            self.by_identity |= {id(s): known[s.index] for s in program.plan if s.index in known}

    def of(self, state: StatePlan) -> Place:
        """Return where a state is; names of the model may stand in the plan for the optimizer's."""
        found = self.by_identity.get(id(state)) or self.by_name.get(state.name)
        if found is None and self.alone:
            found = self.by_index.get(state.index)
        return found or Place(PLAIN, state.name, " of " not in state.name)
