"""What served each state of an optimizer or function, and what is to be said of it."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from collage_fx.compilation.session import Session
from collage_fx.optimizer.discovery import FunctionStates
from collage_fx.optimizer.ownership import Owned
from collage_fx.optimizer.served import RETURNED, Served, left_by_level, nothing_compensated
from collage_fx.passes.ir.program import StatePlan
from collage_fx.runtime.errors import listed
from collage_fx.runtime.residuals.store import STORE
from collage_fx.runtime.storage.registry import STORAGES, compensable_dtypes, refusal

TRIED = 2
"""Steps after which it is known what becomes of the states."""


@dataclass(eq=False)
class Service:
    """Records what served each state, and warns of what is not compensated."""

    session: Session
    discovery: FunctionStates
    subject: str
    """Whose states they are, in words."""
    served: dict[Any, Served] = field(default_factory=dict)
    """Place of a state -> what became of it."""
    written: list[Served] = field(default_factory=list)
    """What the graphs of the last step wrote."""
    repeats: int = 0
    """How often that has been done again since."""

    def of(self, owned: Owned) -> Served:
        """Return the record of a state."""
        found = self.served.get(owned.place)
        if found is None:
            tensor = owned.tensor
            found = Served(owned.name, tensor.dtype, tuple(tensor.shape))
            self.served[owned.place] = found
        return found

    def unknown(self, tensor: Tensor, plan: StatePlan) -> Served:
        """Return the record of what a graph writes that is none of the states found."""
        return self.served.setdefault(plan.name, Served(plan.name, tensor.dtype, plan.shape))

    def count_graph(self, served: Served, plan: StatePlan) -> None:
        """Note that a compiled graph has written a state, in a step."""
        served.graph += 1
        served.judged += 1
        if served.reason is plan.reason and served.compensated is plan.compensated:
            return  # as mostly, and this is done for each state in each step
        served.compensated, served.reason = plan.compensated, plan.reason
        served.recurrence, served.refused = plan.recurrence, plan.refused
        if plan.refused:
            self.session.warn_once(f"not compensated: {plan.reason}")

    def count_repeats(self) -> None:
        """Note the steps that did what the last one did."""
        for served in self.written if self.repeats else ():
            served.graph += self.repeats
            served.judged += self.repeats
        self.repeats = 0

    def note(self, owned: Owned, plan: StatePlan | None) -> None:
        """Note that a segment has written a state: by the passes, with this verdict, or joined."""
        served, tensor = self.of(owned), owned.tensor
        if plan is not None:
            return self.count_graph(served, plan)
        served.joined += 1
        residual = STORE.get(tensor)
        if residual is not None and served.joined > 2 * TRIED and not served.judged:
            residual.provisional = False  # nobody will judge it
        if not served.judged or (residual is not None and not served.compensated):
            served.compensated = residual is not None
            served.reason = "not judged: done on whole values" if served.compensated else "plain"
        if owned.owner == "tensor" and residual is not None:
            STORE.share_by_memory(tensor)
        return None

    def warn_unaccounted(self, names: list[str]) -> None:
        """Warn of states that something has written which nobody has seen."""
        self.session.warn_once(
            f"{self.subject} wrote {listed(names)} in a way that neither a compiled "
            "graph nor PyTorch's dispatcher saw, so without compensation: with a kernel of its "
            "own; update it in place by PyTorch's operations. The steps are recorded whole from "
            "now on"
        )

    def say_what_level_leaves(self) -> None:
        """Warn, after the first step, of what level light leaves alone for want of a parameter.

        A graph with other numbers may judge otherwise, and too late.
        """
        reasons = {s.name: s.reason for s in self.served.values() if s.graph}
        if left_by_level(reasons, unknown=True):
            self.say_what_is_not_compensated()

    def say_what_is_not_compensated(self) -> None:
        """Warn if nothing is compensated, and of what a storage cannot hold."""
        warn, storage = self.session.warn_once, self.session.config.storage
        written = [s for s in self.served.values() if s.steps]
        named = storage in STORAGES
        for s in (s for s in written if named and s.joined >= TRIED and not s.judged):
            if why := refusal(s.dtype, str(storage), s.name):
                warn(f"not compensated: {why}")
        if RETURNED in self.session.warned:
            return
        dtypes = {o.tensor.dtype for o in self.discovery.all() if o.tensor.is_floating_point()}
        other = dtypes - set(compensable_dtypes(storage))
        reasons = {s.name: s.reason for s in written}
        if (other or written) and not any(s.compensated for s in written):
            warn(nothing_compensated(dtypes, reasons))
        elif left := left_by_level(reasons, unknown=True):
            warn(left)
