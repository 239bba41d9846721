"""Which states that the eager engine writes keep a residual: by the verdicts of the graphs."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from collage_fx.config import CollageConfig
from collage_fx.eager.memory_map import MemoryMap, MemoryRecord
from collage_fx.eager.operands import Write
from collage_fx.optimizer.ownership import Owned
from collage_fx.passes.analysis.affine import FREE, Form
from collage_fx.passes.analysis.coupled import joint_recurrences
from collage_fx.passes.analysis.criticality import critical
from collage_fx.passes.analysis.plan import enters, verdict
from collage_fx.passes.analysis.recurrence import recurrence_of
from collage_fx.passes.ir.program import Carried, Recurrence
from collage_fx.runtime.residuals.store import STORE
from collage_fx.runtime.storage.registry import refusal

TRIED = 2
"""Steps in which a state has a residual until its recurrence has shown whether it needs one. Later
its recurrence is followed all the same: a coefficient may come near one as training goes on."""


class Verdicts:
    """Judges states by the recurrences that their updates have shown."""

    def __init__(
        self,
        config: CollageConfig,
        served: WeakIdKeyDictionary,
        states: dict[Any, tuple[Owned, Write]],
        memory: MemoryMap,
        warn: Callable[[str], None],
    ) -> None:
        self.config = config
        self.warn = warn
        self.served = served
        self.states = states
        self.memory = memory
        self.cycles: dict[Any, Recurrence] = {}
        """Place of a state -> what its step does to it together with others."""
        self.feeding: set[Any] = set()
        """Places of the states of which a parameter is computed anew at each step."""

    def decide(self, owned: Owned, write: Write, record: MemoryRecord) -> None:
        """Decide whether a state that the engine wrote keeps its residual; settle it."""
        tensor, served = owned.tensor, self.served[write.tensor]
        if not served.compensated:
            served.judged += 1
            found = recurrence_of(record.forms.get(write, FREE))
            has_param = any(o.owner == "param" for o, _ in self.states.values())
            carried = Carried(-1, owned.name, owned.owner, False, tensor)
            carried.feeds_parameter = owned.place in self.feeding
            cycle = self.cycles.get(owned.place)
            if cycle is not None and found.kind in ("overwritten", "linear"):
                found = cycle
            keep, reason = verdict(carried, found, self.config.level, has_param)
            source = self._source(write, record)
            if not keep and source:
                keep, reason = True, f"takes over the value of {source}"
            if not keep and owned.owner == "param" and self._precise(tensor, record):
                keep, reason = True, "computed anew from states that are compensated"
            if keep and (why := refusal(tensor.dtype, write.storage.name, owned.name)):
                keep, reason = False, why
                self.warn(f"not compensated: {why}")
            served.compensated, served.reason, served.recurrence = keep, reason, found.text
            if not keep and owned.owner == "state":
                self._keep_for_now(owned, write, record)
        if served.compensated:
            lows = record.low(tensor)
            residual = STORE.get(tensor)
            if residual is None or (lows is not None and residual.components[0] is not lows[0]):
                STORE.adopt(tensor, lows, write.storage.name, owned.name)
                if owned.owner == "tensor":
                    STORE.share_by_memory(tensor)
            else:
                residual.settle(tensor)

    def _keep_for_now(self, owned: Owned, write: Write, record: MemoryRecord) -> None:
        """Let a state keep its low word until a second step has been seen.

        Of a state that the first step makes, say of a parameter, only the second shows whether the
        parameter is computed from it, or takes it over.
        """
        tensor, lows = owned.tensor, record.low(owned.tensor)
        residual = STORE.get(tensor)
        if self.served[write.tensor].judged < TRIED and _any(lows):
            STORE.adopt(tensor, lows, write.storage.name, owned.name).provisional = True
        elif residual is not None and residual.provisional:
            STORE.drop(tensor)

    def judge_made(self, owned: Owned, write: Write, made: MemoryRecord) -> None:
        """Decide whether a state that the step has made keeps the low word it was made with.

        What it was computed from may have been judged before, and is not followed any more. A graph
        that updates the state later sees its recurrence, and judges it anew.
        """
        precise = self._precise(owned.tensor, made)
        if precise:
            served = self.served[write.tensor]
            served.compensated, served.reason = True, "made from states that are compensated"
        self.decide(owned, write, made)
        residual = STORE.get(owned.tensor)
        if precise and residual is not None:
            residual.provisional = True

    def _precise(self, tensor: Tensor, record: MemoryRecord) -> bool:
        """Tell whether what was written has more bits than the tensor."""
        return self.config.level != "light" and _any(record.low(tensor))

    def find_cycles(self, present: list[Owned]) -> None:
        """Find, by place, the recurrences of states that only together keep what they hold."""
        writes = {w: place for place, (_, w) in self.states.items()}
        forms: dict[Any, dict[Any, Form]] = {}
        for owned in present:
            place, record = owned.place, self.memory.find(owned.tensor)
            state = self.states.get(place)
            if state is None or record is None:
                continue
            found = {writes[k]: f for k, f in record.forms.items() if k in writes and f.carries}
            own = found.get(place, FREE)
            anew = not critical(recurrence_of(own), record.dtype, "auto")[0]
            if found and anew and not self.served[state[1].tensor].compensated:
                forms[place] = found
            if owned.owner == "param":
                others = {k: f for k, f in found.items() if k != place}
                self.feeding |= {k for k, f in others.items() if enters(f, own, anew=anew)}
        together = any(k != place for place, found in forms.items() for k in found)
        names = {p: self.states[p][0].name for p in forms}
        self.cycles = joint_recurrences(forms, names) if together else {}

    def _source(self, write: Write, record: MemoryRecord) -> str:
        """Return the name of a compensated state whose value this one has taken over."""
        for origin, form in record.forms.items():
            if origin is not write and form.carries and self.served[origin.tensor].compensated:
                return str(self.served[origin.tensor].name)
        return ""


def _any(lows: Sequence[Tensor] | None) -> bool:
    """Tell whether a low word is other than zero anywhere."""
    return any(bool(lo.any()) for lo in lows or ())
