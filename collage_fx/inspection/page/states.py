"""Verdicts by class and layer, in as few rows as say something different."""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain, groupby
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
    """Place of a state on the page: its class, and its name."""

    number: int
    name: str
    """Name in the optimizer, whatever the plan calls it."""


@dataclass
class Row:
    """States that have everything in common but the layer."""

    number: int
    """Number of the class."""
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
    """Names in the optimizer."""
    layers: list[tuple[int, str]] = field(default_factory=list)
    """Number of the layer and shape, for each of them."""


@dataclass
class States:
    """The table of verdicts on the page."""

    rows: list[Row]
    layers: list[str]
    """Names of parameters, in order."""

    def of(self, number: int) -> list[Row]:
        """Return the rows of a class."""
        return [row for row in self.rows if row.number == number]

    @property
    def data(self) -> dict[str, Any]:
        """Data that the page's script shows and searches, as small as it is in JSON."""
        return {
            "layers": self.layers,
            "rows": [
                [r.number, r.kind, r.verdict, r.reason, [i for i, _ in r.layers], _runs(r)]
                for r in self.rows
            ],
        }


def _runs(row: Row) -> list[Any]:
    """Return the shapes of a row: each once, with how many states in turn have it."""
    return [[shape, len(list(same))] for shape, same in groupby(shape for _, shape in row.layers)]


def states_of(explanation: "Explanation", classes: list[Rewritten]) -> States:
    """Return the verdicts of an explanation.

    Args:
        explanation: what was found out.
        classes: those of the page, in order.
    """
    place_of = _places(explanation, classes)
    rows: dict[tuple[Any, ...], Row] = {}
    layers: dict[str, int] = {}
    for state in explanation.plan:
        place = place_of(state)
        own, layer = state.state_name.own, state.state_name.parameter
        engine = explanation.engine.get(state.name, explanation.engine.get(place.name, "graph"))
        row = Row(
            number=place.number,
            kind=PARAMETER if own is None else own,
            dtype=dtype_name(state.dtype),
            recurrence=state.recurrence,
            verdict=state.verdict,
            reason=state.reason,
            storage=state.storage,
            keeps="" if state.keeps is None else f"{state.keeps:.1e}",
            engine=engine,
        )
        key = tuple(v for v in vars(row).values() if not isinstance(v, list))
        row = rows.setdefault(key, row)
        row.names.append(place.name)
        row.residual_bytes += state.residual_bytes
        shape = " x ".join(map(str, state.shape)) or "0-d"
        row.layers.append((layers.setdefault(layer, len(layers)), shape))
    order = {PLAIN: len(classes)}
    found = sorted(rows.values(), key=lambda r: (order.get(r.number, r.number), -len(r.names)))
    return States(found, list(layers))


def _places(explanation: "Explanation", classes: list[Rewritten]) -> Callable[[StatePlan], Place]:
    """Return a function from a state to its place."""
    by_identity: dict[int, Place] = {}
    by_name: dict[str, Place] = {}
    by_index: dict[int, Place] = {}
    for program in (one.program for one in explanation.compiled):
        number: dict[int, int] = {}
        for rewritten in (r for r in program.rewritten if r in classes):
            for state in (s for member in rewritten.members for s, _, _ in member.states):
                for c in (state, *program.others.get(state.index, [])):
                    number[c.index] = classes.index(rewritten)
        known = {
            c.index: Place(number.get(c.index, PLAIN), c.name)
            for c in (*program.carried, *chain.from_iterable(program.others.values()))
        }
        by_index |= known
        by_name |= {place.name: place for place in known.values()}
        by_identity |= {id(s): known[s.index] for s in program.plan if s.index in known}

    def place_of(state: StatePlan) -> Place:
        # Names of the model may stand in the plan for the optimizer's.
        found = by_identity.get(id(state)) or by_name.get(state.name)
        if found is None and len(explanation.compiled) == 1:
            found = by_index.get(state.index)
        return found or Place(PLAIN, state.name)

    return place_of
