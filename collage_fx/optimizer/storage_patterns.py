"""Warnings of patterns in `storage=` and `states=` that fit no state, or decide for none."""

from collections.abc import Iterable
from typing import Any

from collage_fx.optimizer.discovery import FunctionStates
from collage_fx.passes.analysis.plan import is_named
from collage_fx.passes.ir.program import Program
from collage_fx.runtime.errors import Warn, WarningName, listed, meant, warn
from collage_fx.runtime.storage.registry import Choice, fits
from collage_fx.runtime.storage.state_name import StateName

_SHOWN = 8


class Patterns:
    """The patterns that a user has given, until all states have been looked at."""

    def __init__(self, storage: Choice, states: Iterable[str] = ()) -> None:
        self.storage = [] if isinstance(storage, str) else [pattern for pattern, _ in storage]
        self.states = tuple(states)
        # `*` is for the rest, of which there may be none.
        self.idle = {("storage", p) for p in self.storage if p.strip("*")}
        self.idle |= {("states", p) for p in self.states if p.strip("*")}
        """Patterns that have decided for no state yet, with their options."""
        self.late: set[str] = set()
        """Patterns for storages that fit a state which an earlier one had decided for."""
        self.kinds: dict[str, None] = {}
        self.names: dict[str, None] = {}
        self.count: int | None = None
        """Number of states after the last step."""
        self.ran: set[int] = set()
        """The ids of the graphs that have run."""

    def see(self, name: StateName) -> None:
        """Note a state of this name."""
        text = str(name)
        self.kinds[name.kind] = self.names[text] = None
        fitting = [pattern for pattern in self.storage if fits(pattern, name)]
        self.late.update(fitting[1:])
        self.idle.discard(("storage", fitting[0] if fitting else ""))
        self.idle -= {("states", p) for p in self.states if is_named(text, (p,))}

    def see_graph(self, program: Program) -> None:
        """Note the states that a graph updates."""
        if self.idle:
            others = [program.others.get(carried.index, []) for carried in program.carried]
            for carried in (*program.carried, *(one for row in others for one in row)):
                self.see(carried.state_name)

    def after_step(self, held: FunctionStates, warn: Warn) -> None:
        """Note the states after a step; speak up if it was one that has made none."""
        if self.idle:
            for owned in held.all():
                self.see(owned.state_name)
            before, self.count = self.count, held.count()
            if before == self.count:
                self.conclude(warn)

    def after_graph(self, graph: Any, warn: Warn) -> None:
        """Note a graph that has run; warn if it has before, so that all have been compiled."""
        if self.idle:
            if id(graph) in self.ran:
                self.conclude(warn)
            self.ran.add(id(graph))

    def conclude(self, warn: Warn) -> None:
        """Warn of the patterns that decide for no state, the states being known now."""
        for option, pattern in sorted(self.idle):
            there = [*self.kinds, *self.names] if option == "storage" else list(self.names)
            names = [*self.kinds] if option == "storage" else []
            names += [name for name in self.names if name not in names]
            why = f"fits no state{meant(pattern, there) or ';'} there are {listed(names, _SHOWN)}"
            if option == "storage" and pattern in self.late:
                why = "decides for no state: patterns before it fit all that it fits; put it first"
            warn("pattern", f"{option}: the pattern {pattern!r} {why}")
        self.idle.clear()


def warn_now(name: WarningName, message: str) -> None:
    """Warn in the name of collage_fx."""
    warn(name, message, stacklevel=4)
