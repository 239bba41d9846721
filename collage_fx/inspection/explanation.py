"""`Explanation`: the verdicts, the graphs before and after, and the report of them."""

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

from torch.fx import GraphModule

from collage_fx.budget.prediction import Prediction
from collage_fx.compilation.session import Compiled
from collage_fx.config import CollageConfig
from collage_fx.inspection.replay import Replay
from collage_fx.optimizer.served import too_small
from collage_fx.optimizer.state_table import (
    columns,
    grouped,
    preformatted,
    shortened,
    table,
    terminal_width,
    wrapped,
)
from collage_fx.passes.ir.program import StatePlan
from collage_fx.runtime.storage.registry import kept


@dataclass(repr=False)
class Explanation:
    """The rewrite of a step: `str()` gives a report, `to_dict()` the same for machines.

    Examples:
        >>> explanation = collage_fx.explain(optimizer)
        >>> explanation.residual_bytes, len(explanation.kernels)
        (16384, 1)
        >>> print(str(explanation).splitlines()[0])
        collage_fx: AdamW, level=auto, arithmetic=wide, storage=auto
        >>> explanation.save("step.html")
        PosixPath('step.html')
    """

    subject: str
    config: CollageConfig
    plan: list[StatePlan]
    """The verdict on each carried state."""
    before: list[GraphModule]
    """The functional graphs as they came from Dynamo and AOTAutograd, which of the members of a
    class that one kernel updates had one."""
    expanded: list[GraphModule]
    """Graph of collage:: operations of each class of slices; run eagerly, the reference."""
    lowered: list[GraphModule]
    """Graph of fp32 operations and collage::round of each class."""
    after: list[GraphModule]
    """The graphs that Inductor compiled."""
    output_code: list[str]
    """Inductor's output code of each graph."""
    snapshots: list[dict[str, str]] = field(default_factory=list)
    """Text of what each pass left, for each graph; `unchanged` of a pass that did nothing."""
    seconds: list[dict[str, float]] = field(default_factory=list)
    """Seconds that each pass took, for each graph."""
    members: list[int] = field(default_factory=list)
    """Number of slices of each class."""
    kernels: list[str] = field(default_factory=list)
    """Source of the kernel that updates all members, for each class; empty if there is none."""
    apart: list[str] = field(default_factory=list)
    """Reason why each member has a kernel of its own, for each class; empty if they share one."""
    by_inductor: list[str] = field(default_factory=list)
    """Reason why a class's kernel on a CPU is Inductor's; empty if it is ours, or for a GPU."""
    joined: list[str] = field(default_factory=list)
    """Operations on carried paths that ran as join - op - split, for want of a rule."""
    notes: list[str] = field(default_factory=list)
    """The warnings that compiling the step gives."""
    remarks: list[str] = field(default_factory=list)
    """Reasons why a part of the step is not in compiled graphs, and what else is of note."""
    engine: dict[str, str] = field(default_factory=dict)
    """Name of a state -> what serves it: `graph`, `joined` or both."""
    verbose: bool = False
    """True if the report has a row for each state, though others say the same."""
    alike: str = ""
    """Text on the operations that the counts leave out."""
    updates: dict[str, float] = field(default_factory=dict)
    """Name of a parameter -> the median of its update relative to it, with the learning rate and
    the gradients of now, as it was stored: 0 if the storage loses most of it."""

    compiled: list[Compiled] = field(default_factory=list)
    """The graphs on their way through the passes."""
    memory: dict[str, int] = field(default_factory=dict)
    """Bytes of the optimizer's tensors by kind: parameters, gradients, and each kind of state."""
    budget: Prediction | None = None
    """The storages that were chosen for a budget so far, and the error that they make."""
    replayed: Replay | None = None
    """The error of plain and compensated steps on the same gradients, if that was asked for."""

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write all of it to one HTML file that needs no network; return where.

        A file that is there already is replaced at once, or, if writing fails, left as it is.

        Args:
            path: of the file.

        Raises:
            PageError: the file cannot be written.
        """
        from collage_fx.inspection.page.page import save  # with Jinja, which importing takes time

        return save(self, path)

    @property
    def residual_bytes(self) -> int:
        """Bytes of all residuals together."""
        return sum(state.residual_bytes for state in self.plan)

    @property
    def refused(self) -> list[StatePlan]:
        """The states that should be compensated and cannot be."""
        return [state for state in self.plan if state.refused]

    def _too_small(self) -> list[str]:
        """Return warnings of updates too small for their storage, and what keeps more."""
        measured = [s for s in self.plan if s.compensated and s.name in self.updates]
        to_nearest = [s for s in measured if not self.config.rounds_by_chance(s.storage)]
        losing = [s for s in to_nearest if self.updates[s.name] < kept(s.dtype, s.storage)]
        return list(too_small((s.dtype, s.storage, s.name) for s in losing))

    def to_dict(self) -> dict[str, Any]:
        """Return all but the graphs as values that JSON can hold, a row for each state."""
        return {
            "subject": self.subject,
            "config": {
                k: list(v) if isinstance(v, tuple) else v for k, v in vars(self.config).items()
            },
            "states": [self._row(state) for state in self.plan],
            "classes": [
                {"members": n, "one_kernel": not why, "why_not": why, "by_inductor": inductor}
                for n, why, inductor in self._classes()
            ],
            "operations_before": dict(_count(self.before)),
            "operations_after": dict(_count(self.lowered)),
            "residual_bytes": self.residual_bytes,
            "joined_operations": sorted(set(self.joined)),
            "budget": None if self.budget is None else self.budget.to_dict(),
            "too_small": self._too_small(),
            "remarks": self.remarks,
            "warnings": self.notes,
        }

    def _row(self, state: StatePlan) -> dict[str, Any]:
        kind, param = columns(state.state_name)
        return {
            "name": state.name,
            "kind": kind,
            "parameter": param,
            "dtype": str(state.dtype).removeprefix("torch."),
            "shape": list(state.shape),
            "recurrence": state.recurrence,
            "verdict": state.verdict,
            "reason": state.reason,
            "storage": state.storage,
            "keeps": state.keeps,
            "residual_bytes": state.residual_bytes,
            "served_by": self.engine.get(state.name, "graph"),
        }

    def _classes(self) -> Iterator[tuple[int, str, str]]:
        return zip(self.members, self.apart, self.by_inductor, strict=True)

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return preformatted(self)

    def __str__(self) -> str:
        width = terminal_width()
        head = (
            f"collage_fx: {self.subject}, level={self.config.level}, arithmetic="
            f"{self.config.arithmetic}, {_written(self.config)}"
        )
        lines = [*wrapped(head, width), "", *self._table(width), ""]
        if self.budget is not None:
            lines += [*self.budget.lines(width), ""]
        for line in self._below():
            lines += wrapped(line, width)
        return "\n".join(lines)

    def _table(self, width: int) -> list[str]:
        """Return the states, those of one kind of which all is the same as one row."""
        told = ("dtype", "recurrence", "verdict", "reason", "storage", "keeps", "served_by")
        says = itemgetter(*told, *(("name",) if self.verbose else ()))
        groups = grouped(self.plan, lambda state: says(self._row(state)))
        shown, more = shortened(groups, verbose=self.verbose)
        rows = [("state", "dtype", "recurrence", "verdict", "storage", "keeps", "bytes", "in")]
        for group in shown:
            row = self._row(group.states[0])
            stored = sum(one.residual_bytes for one in group.states)
            rows.append(
                (
                    group.label,
                    row["dtype"],
                    row["recurrence"] or "-",
                    f"{row['verdict']}: {row['reason']}",
                    row["storage"] or "-",
                    "-" if row["keeps"] is None else f"{row['keeps']:.1e}",
                    f"{stored:,}",
                    row["served_by"],
                )
            )
        # Names can be searched for only if they stand on one line.
        floors = {0: 200 if self.verbose else 16, 2: 12, 3: 12, 7: 5}
        return [*table(rows, width, wraps=floors), *more]

    def _below(self) -> Iterator[str]:
        """Yield the sentences below the table."""
        yield f"operations before: {_listed(_count(self.before))}{self.alike}"
        yield f"operations after:  {_listed(_count(self.lowered))}"
        yield from self._about_kernels()
        kinds = Counter(s.verdict for s in self.plan)
        yield (
            f"residuals: {self.residual_bytes:,} bytes for "
            f"{kinds['compensated']} of {len(self.plan)} carried states"
        )
        for group in grouped(self.refused, lambda s: s.reason):
            yield f"refused: {group.label}: {group.states[0].reason}"
        by_chance = [s for s in self.plan if self.config.rounds_by_chance(s.storage)]
        if by_chance:
            with_residuals = len(by_chance) - kinds["by chance"]
            what = f"the residuals of {with_residuals} states" if with_residuals else ""
            if alone := kinds["by chance"]:
                what += f"{' and ' * bool(what)}{alone} states, which have none"
            yield (
                f"rounded by chance, with seed {self.config.seed}: {what}; what is smaller than "
                "their storage keeps, and not than fp32 does, is kept on average"
            )
        yield from self._too_small()
        if self.joined:
            yield f"joined in fp32, for want of a rule: {', '.join(sorted(set(self.joined)))}"
        yield from self.remarks
        for note in self.notes:
            yield f"warning: {note}"

    def _about_kernels(self) -> Iterator[str]:
        """Say of each class of isomorphic updates what kernel runs; equal classes share a line."""
        numbers: dict[tuple[int, str, str], list[int]] = {}
        for k, one in enumerate(self._classes(), 1):
            numbers.setdefault(one, []).append(k)
        for (n, why, unprintable), ks in numbers.items():
            many = f"classes {ks[0]} to {ks[-1]}" if ks[-1] - ks[0] == len(ks) - 1 else ""
            many = many or f"classes {', '.join(map(str, ks))}"
            yield (
                (f"{many}, each: " if ks[1:] else f"class {ks[0]}: ")
                + f"{n} {'member' if n == 1 else 'members'}, "
                + (f"a kernel for each: {why}" if why else "one kernel for all")
                + (f", by Inductor: {unprintable}" if unprintable else "")
            )


def _written(config: CollageConfig) -> str:
    choice = config.storage
    if config.budget is not None:
        return f"budget={config.budget}"
    pairs = [] if isinstance(choice, str) else [f"{p}: {s}" for p, s in choice]
    return f"storage={choice if isinstance(choice, str) else ', '.join(pairs)}"


def _count(modules: list[GraphModule]) -> Counter[str]:
    return Counter(
        str(node.target).removeprefix("aten.").partition(".")[0]
        for module in modules
        for node in module.graph.nodes
        if node.op == "call_function" and "getitem" not in str(node.target)
    )


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{n} {name}" for name, n in counts.most_common()) or "none"
