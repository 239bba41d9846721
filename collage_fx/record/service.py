"""Accounts of how each state is written, in a step and in all of them, and the warnings of it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from collage_fx.compilation.session import Session
from collage_fx.optimizer.discovery import FunctionStates
from collage_fx.optimizer.ownership import Owned, live_optimizers, owners_of
from collage_fx.optimizer.served import RETURNED, Served, left_by_level, nothing_compensated
from collage_fx.passes.ir.program import StatePlan
from collage_fx.passes.ir.verdict import Verdict, VerdictKind
from collage_fx.runtime.errors import listed
from collage_fx.runtime.residuals.residual import version
from collage_fx.runtime.residuals.store import STORE
from collage_fx.runtime.storage.registry import STORAGES, compensable_dtypes, refusal
from collage_fx.segments.memory import memory_key
from collage_fx.segments.trie import layout_of

TRIED = 2
"""Steps after which it is known what becomes of the states."""
_PLAIN = Verdict(VerdictKind.PLAIN, "plain")
_NOT_JUDGED = Verdict(VerdictKind.COMPENSATED, "not judged: done on whole values")


@dataclass(eq=False)
class _Account:
    """One state in a step."""

    served: Served
    """Counts of all steps."""
    version: int | None
    """Version at the beginning of the step; None for a state that was not there."""
    memory: int | None = None
    """The key of the state's storage at the beginning of the step."""


@dataclass(eq=False)
class Service:
    """Accounts of how each state is written, with warnings of those that are not compensated.

    That is a Dynamo graph, a segment, or nobody knows what.
    """

    session: Session
    discovery: FunctionStates
    subject: str
    """Owner of the states, in words."""
    served: dict[Any, Served] = field(default_factory=dict)
    """Place of a state -> what became of it."""
    written: list[Served] = field(default_factory=list)
    """States that the graphs of the last step wrote."""
    repeats: int = 0
    """Number of times that the last step has been replayed since."""
    of_tensor: dict[int, _Account] = field(default_factory=dict)
    """The states of a step, by their tensors."""
    of_memory: dict[Any, _Account] = field(default_factory=dict)
    """Accounts by memory: a graph may write p.detach() in the place of p."""
    places: dict[Any, int] = field(default_factory=dict)
    """Places that had a state when the step began -> the id of its tensor."""
    elsewhere: set[Any] = field(default_factory=set)
    """The places of states that are in none that is looked at, and last from step to step."""
    by_graph: dict[int, tuple[Tensor, StatePlan]] = field(default_factory=dict)
    """Tensors that Dynamo graphs have written in this step, with their verdicts, by id."""

    # A step.

    def begin(self, states: Sequence[Owned]) -> None:
        """Begin a step with these states."""
        self.of_tensor = {
            id(o.tensor): _Account(self._served(o), version(o.tensor), memory_key(o.tensor))
            for o in states
        }
        self.places = {o.place: id(o.tensor) for o in states}

    def begin_again(self, states: Iterable[Tensor]) -> None:
        """Begin a step with the states of the last one."""
        for tensor in states:
            self.of_tensor[id(tensor)].version = version(tensor)

    def renew(self, new: Mapping[int, Tensor]) -> None:
        """Know tensors that have taken the places of states, by the ids of these."""
        accounts = {id(t): self.of_tensor.pop(i) for i, t in new.items() if i in self.of_tensor}
        self.of_tensor |= accounts

    def take_up(self, states: Sequence[Owned]) -> list[Owned]:
        """Know these states at the end of a step; return those that were not there before."""
        before = self.of_tensor
        new = [o for o in states if id(o.tensor) not in before]
        self.of_tensor = {
            id(o.tensor): before.get(id(o.tensor)) or _Account(self._served(o), None)
            for o in states
        }
        self.of_memory = {_memory(o.tensor): self.of_tensor[id(o.tensor)] for o in states}
        return new

    def not_by_graphs(self, states: Iterable[Owned]) -> list[Owned]:
        """Return the states that no graph has written in this step."""
        by_graph = {_memory(tensor) for tensor, _ in self.by_graph.values()}
        return [o for o in states if _memory(o.tensor) not in by_graph]

    def unaccounted(self, states: Iterable[Tensor], written: Iterable[Tensor] = ()) -> list[str]:
        """Count and name those of these states that something has written nevertheless.

        One that has other memory by now (`p.data = old`) is warned of, and loses its residual. One
        that shares its version counter with a tensor that was written, as slices of one buffer do,
        need not have been written itself.

        Args:
            states: those that no graph has written.
            written: tensors that were written, those of graphs aside.
        """
        names: list[str] = []
        moved: list[str] = []
        for tensor in states:
            account = self.of_tensor[id(tensor)]
            if account.version not in (None, version(tensor)) and not self._is_beside(
                tensor, written
            ):
                account.served.unaccounted += 1
                same = account.memory == memory_key(tensor)
                (names if same else moved).append(account.served.name)
                if not same and (residual := STORE.get(tensor)) is not None:
                    residual.begin_anew(tensor)
        if moved:
            self.session.warn_once(
                "memory-replaced",
                f"{self.subject} put other memory in the place of that of {listed(moved)}, as in "
                "p.data = old, and wrote it, which drops the low words: write p.copy_(old)",
            )
        return names

    def _is_beside(self, tensor: Tensor, written: Iterable[Tensor]) -> bool:
        """Return True if memory beside a tensor was written, and the tensor was not."""
        others = (*written, *(t for t, _ in self.by_graph.values()))
        residual, beside = STORE.get(tensor), memory_key(tensor) in map(memory_key, others)
        return beside and (residual is None or residual.is_present(tensor))

    def count_graphs(self) -> None:
        """Count what graphs have written in this step."""
        self.written = []
        for key, (tensor, plan) in self.by_graph.items():
            account = self.of_tensor.get(key) or self.of_memory.get(_memory(tensor))
            if account is not None:
                served = account.served
            else:  # none of the states found
                new = Served(plan.state_name, tensor.dtype, plan.shape)
                served = self.served.setdefault(plan.name, new)
            self.written.append(served)
            self._count_graph(served, plan)

    # All steps.

    def _served(self, owned: Owned) -> Served:
        """Return the record of a state."""
        found = self.served.get(owned.place)
        if found is None:
            new = Served(owned.state_name, owned.tensor.dtype, tuple(owned.tensor.shape))
            found = self.served[owned.place] = new
        return found

    def _count_graph(self, served: Served, plan: StatePlan) -> None:
        """Count a step in which a compiled graph has written a state."""
        served.graph += 1
        served.judged += 1
        if served.decision is plan.decision:
            return  # as mostly, and this is done for each state in each step
        served.decision, served.change = plan.decision, plan.change
        if plan.refused:
            self.session.warn_once("refused", f"not compensated: {plan.reason}")

    def count_repeats(self) -> None:
        """Note the steps that did what the last one did."""
        for served in self.written if self.repeats else ():
            served.graph += self.repeats
            served.judged += self.repeats
        self.repeats = 0

    def note(self, owned: Owned, plan: StatePlan | None) -> None:
        """Note a state that a segment has written: by the passes, with this verdict, or joined."""
        served, tensor = self._served(owned), owned.tensor
        if plan is not None:
            return self._count_graph(served, plan)
        served.joined += 1
        residual = STORE.get(tensor)
        if residual is not None and served.joined > 2 * TRIED and not served.judged:
            residual.provisional = False  # nobody will judge it
        if not served.judged or (residual is not None and not served.compensated):
            served.decision = (
                _PLAIN if residual is None else _NOT_JUDGED.in_storage(residual.storage)
            )
        if owned.owner == "tensor" and residual is not None:
            STORE.share_by_memory(tensor)
        return None

    def warn_unaccounted(self, names: list[str]) -> None:
        """Warn of states that something has written which nobody has seen."""
        self.session.warn_once(
            "unseen-write",
            f"{self.subject} wrote {listed(names)} in a way that neither a compiled "
            "graph nor PyTorch's dispatcher saw, so without compensation: with a kernel of its "
            "own, or in another thread; update it in place by PyTorch's operations, in the thread "
            "that takes the step. The steps are recorded whole from now on",
        )

    def warn_chained(self, name: str) -> None:
        """Warn of a state whose new value one compiled graph hands to another, rounded."""
        self.session.warn_once(
            "cut-state",
            f"{self.subject} computes the new value of {name} in one compiled graph and stores it "
            "in another, or not in place at all, which drops its low word in this step; the steps "
            "are recorded whole from now on. TORCH_LOGS=graph_breaks shows what cuts the step",
        )

    def note_replaced(self, name: str) -> None:
        """Note for the report that steps are recorded whole, as results become states."""
        self.session.notes.add(
            f"the steps are recorded whole, since they put a new tensor in the place of {name}, of "
            "which a graph has only the high word; update states in place"
        )

    def note_cut(self, where: str) -> None:
        """Note for the report that steps are recorded whole, as a graph ends where others go on."""
        self.session.notes.add(
            "the steps are recorded whole, which is slower for many small tensors, since Dynamo "
            f"cuts the step where values go on that its graphs would round: {where}"
        )

    def note_switch(self, breaks: Sequence[str]) -> None:
        """Note for the report that steps are recorded whole, as Dynamo traces a part only."""
        self.session.notes.add(
            "the steps are recorded whole from now on, since Dynamo traces only a part of what "
            "writes the states" + "".join(f": {reason}" for reason in breaks[:1])
        )

    def note_at_once(self, why: str) -> None:
        """Note for the report that nothing is put off any more, as others may read memory."""
        self.session.notes.add(
            "what is recorded is done operation by operation, as with record=False, which is "
            f"slower, since memory may be read in ways that PyTorch does not show: {why}"
        )

    def say_what_level_leaves(self) -> None:
        """Warn, after the first step, of what level light leaves alone for want of a parameter.

        A graph with other numbers may judge otherwise, and too late.
        """
        if left_by_level((s for s in self.served.values() if s.graph), unknown=True):
            self.say_what_is_not_compensated()

    def warn_elsewhere(self, lasting: Iterable[Owned]) -> None:
        """Warn once of states that are in no place that is looked at, if no optimizer has them."""
        new = [owned for owned in lasting if owned.place not in self.elsewhere]
        if new:
            self.elsewhere.update(owned.place for owned in new)
            owners = owners_of(live_optimizers())
            self.session.warn_ownerless([o.name for o in new if id(o.tensor) not in owners])

    def has_written(self) -> bool:
        """Return True if a step has written any state."""
        return any(s.steps for s in self.served.values() if not s.is_gradient)

    def say_what_is_not_compensated(self) -> None:
        """Warn if nothing is compensated, and of what a storage cannot hold."""
        warn, storage = self.session.warn_once, self.session.config.storage
        written = [s for s in self.served.values() if s.graph or s.joined]
        named = storage in STORAGES
        for s in (s for s in written if named and s.joined >= TRIED and not s.judged):
            if why := refusal(s.dtype, str(storage), s.name):
                warn("refused", f"not compensated: {why}")
        if RETURNED in self.session.warned:
            return
        dtypes = {o.tensor.dtype for o in self.discovery.all() if o.tensor.is_floating_point()}
        other = dtypes - set(compensable_dtypes(storage))
        if (other or written) and not any(s.compensated for s in written):
            warn("nothing-compensated", nothing_compensated(dtypes, written))
        elif left := left_by_level(written, unknown=True):
            warn("level-leaves", left)


def written_between_steps(states: Iterable[Owned]) -> list[str]:
    """Say of which states the bits are kept, since others have written them, and what was lost."""
    states = list(states)
    pairs = zip(states, STORE.of([o.tensor for o in states]), strict=True)
    found = [(o.name, r, r.kept) for o, r in pairs if r is not None and r.kept is not None]
    if not found:
        return []
    size, lost = sum(kept.nbytes for *_, kept in found), sum(int(r.lost) for _, r, _ in found)
    return [
        f"written from outside between steps: {listed([name for name, *_ in found])}. A copy of "
        f"the bits is kept, {size:,} bytes; {lost:,} elements have lost their residual since"
    ]


def _memory(tensor: Tensor) -> tuple[Any, ...]:
    return memory_key(tensor), layout_of(tensor)
