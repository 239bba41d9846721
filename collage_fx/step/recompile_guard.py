"""Guard against recompiling without end: a step that needs a new graph at each call is recorded.

A Python number that changes makes Dynamo trace again. Most enter the next graph as a symbol; those
that cannot make a graph for each value.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from collage_fx.dynamo.backend import Backend
from collage_fx.record.mode import Cause
from collage_fx.record.steps import Steps

ROW = 5
"""Calls in a row that each made a new graph, after which a step is not compiled any more.

The first calls differ by nature: states are made, a changed learning rate becomes an input.
"""
_SETTLING = 2
_MANY = 12
"""Graphs of one step; with so many, the second call in a row that makes another is one too many."""


class RecompileGuard:
    """Counter of the calls in a row that compiled something."""

    def __init__(self, session: Backend, steps: Steps) -> None:
        self.session = session
        self.steps = steps
        self.calls = 0
        self.row = 0

    @contextmanager
    def watch(self) -> Iterator[bool]:
        """Watch one call; whether it should be compiled."""
        before = self._compilations()
        yield self.steps.traces
        self.calls += 1
        self.session.patterns.after_step(self.steps.discovery, self.session.warn_once)
        compiled = self._compilations() > before
        self.row = self.row + 1 if compiled and self.calls > _SETTLING else 0
        many = self.row > 1 and self.session.graphs >= _MANY
        if (self.row >= ROW or many) and self.steps.traces:
            self.steps.enter(Cause.NEW_GRAPHS)
            self.session.warn_once(
                "new-graphs",
                f"the step makes a new graph at each call ({self.session.graphs} so far): a Python "
                "number that changes enters its arithmetic as a constant, or Dynamo guards tensors "
                "that are new each time (TORCH_LOGS=recompiles says which). The steps are recorded "
                "from now on, which is slower for many small tensors, and as precise",
            )

    def _compilations(self) -> int:
        """Return the number of graphs of the step that Dynamo has made, or failed to."""
        return self.session.graphs + self.steps.failures.count
