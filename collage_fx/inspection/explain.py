"""`explain`: what is compensated, what not and why, and the graphs before and after."""

import copy
import inspect
import os
import types
import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from collage_fx.compilation.session import Compiled
from collage_fx.config import CollageConfig
from collage_fx.dynamo.backend import Backend
from collage_fx.dynamo.options import split_options
from collage_fx.inspection.gradients import GradientRecorder
from collage_fx.inspection.replay import Replay
from collage_fx.inspection.replay import replay as replay_steps
from collage_fx.inspection.values import value as full_value
from collage_fx.optimizer.fused import as_its_kernel
from collage_fx.optimizer.ownership import bytes_by_kind, owned_tensors, tensors_of_callable
from collage_fx.optimizer.served import Served, sort_key, table
from collage_fx.passes.codegen.multi_tensor_kernel import MULTI_TENSOR_KERNELS
from collage_fx.passes.ir.program import LOW_PRECISION, Program, Rewritten, StatePlan
from collage_fx.runtime.errors import CollageError, OptionError
from collage_fx.runtime.residuals.store import STORE
from collage_fx.runtime.storage.registry import FINEST, STORAGES, Choice, chosen, kept
from collage_fx.step.compiled_step import compile_function, compile_optimizer, report_of
from collage_fx.step.distributed_wrappers import held_by
from collage_fx.step.optimizer_clone import clone_of, with_some_gradient
from collage_fx.step.subject import innermost, name_of, step_made_here, subject_of


@dataclass
class Explanation:
    """What collage_fx does to a step; str() of it is the report."""

    subject: str
    config: CollageConfig
    plan: list[StatePlan]
    """The verdict on each carried state."""
    before: list[GraphModule]
    """The functional graphs as they came from Dynamo and AOTAutograd, which of the members of a
    class that one kernel updates had one."""
    expanded: list[GraphModule]
    """For each class of slices its graph of collage:: operations; run eagerly, the reference."""
    lowered: list[GraphModule]
    """For each class its graph of fp32 operations and collage::round."""
    after: list[GraphModule]
    """The graphs that Inductor compiled."""
    output_code: list[str]
    """Inductor's output code of each graph."""
    snapshots: list[dict[str, str]] = field(default_factory=list)
    """For each graph what each pass left, as text; `unchanged` of a pass that did nothing."""
    seconds: list[dict[str, float]] = field(default_factory=list)
    """For each graph the time that each pass took."""
    members: list[int] = field(default_factory=list)
    """How many slices each class has."""
    kernels: list[str] = field(default_factory=list)
    """For each class the source of the kernel that updates all members; empty if there is none."""
    apart: list[str] = field(default_factory=list)
    """For each class why each member has a kernel of its own; empty if they share one."""
    by_inductor: list[str] = field(default_factory=list)
    """For each class why its kernel on a CPU is Inductor's; empty if it is ours, or for a GPU."""
    joined: list[str] = field(default_factory=list)
    """Operations on carried paths that ran as join - op - split, for want of a rule."""
    notes: list[str] = field(default_factory=list)
    """The warnings that compiling the step gives."""
    engine: dict[str, str] = field(default_factory=dict)
    """Name of a state -> what serves it: `graph`, `joined` or both."""
    alike: str = ""
    """What the counts of operations leave out."""
    updates: dict[str, float] = field(default_factory=dict)
    """Name of a parameter -> the median of its update relative to it, with the learning rate and
    the gradients of now, as it was stored: 0 if the storage loses most of it."""
    compiled: list[Compiled] = field(default_factory=list)
    """The graphs on their way through the passes."""
    memory: dict[str, int] = field(default_factory=dict)
    """Bytes of the optimizer's tensors by kind: parameters, gradients, and each kind of state."""
    replayed: Replay | None = None
    """The error of plain and compensated steps on the same gradients, if that was asked for."""

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write all of it to one HTML file that needs no network; return where.

        A file that is there already is replaced at once, or, if writing fails, left as it is.

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
        """Say which updates are too small for the storage they are kept in, and what keeps more."""
        small: dict[tuple[torch.dtype, str], list[str]] = {}
        for state in self.plan:
            update = self.updates.get(state.name)
            held = state.dtype, state.storage
            by_chance = self.config.rounds_by_chance(state.storage)
            if by_chance or not state.compensated or update is None:
                continue
            if update < kept(*held):
                small.setdefault(held, []).append(state.name)
        lines = []
        for (dtype, storage), names in small.items():
            least = kept(dtype, storage)
            fitting = (s.name for s in STORAGES.values() if dtype in s.residuals)
            finer = [repr(s) for s in fitting if kept(dtype, s) < least]
            more = f" and of {len(names) - 1} more" if names[1:] else ""
            would = f"{' or '.join(finer)} keeps more" if finer else "no storage keeps more"
            if STORAGES[storage].split_by_chance is not None:
                would += ", and stochastic_rounding=True keeps them on average"
            lines.append(
                f"storage {storage!r} keeps changes of {least:.1e} of a value and more: at the "
                f"learning rate of now half the updates of {names[0]}{more} are smaller; {would}"
            )
        return lines

    def __str__(self) -> str:
        lines = [
            f"collage_fx: {self.subject}, level={self.config.level}, arithmetic="
            f"{'wide' if self.config.wide else 'eft'}, storage={_written(self.config.storage)}",
            "",
            *_table(self.plan, self.engine),
            "",
            f"operations before: {_count(self.before)}{self.alike}",
            f"operations after:  {_count(self.lowered)}",
            *(
                f"class {k}: {n} {'member' if n == 1 else 'members'}, "
                + (f"a kernel for each: {why}" if why else "one kernel for all")
                + (f", by Inductor: {unprintable}" if unprintable else "")
                for k, (n, why, unprintable) in enumerate(
                    zip(self.members, self.apart, self.by_inductor, strict=True), 1
                )
            ),
            f"residuals: {self.residual_bytes:,} bytes for "
            f"{sum(s.compensated for s in self.plan)} of {len(self.plan)} carried states",
        ]
        for state in self.refused:
            lines.append(f"refused: {state.name}: {state.reason}")
        by_chance = [s for s in self.plan if self.config.rounds_by_chance(s.storage)]
        if by_chance:
            lines.append(
                f"rounded by chance, with seed {self.config.seed}: the residuals of "
                f"{len(by_chance)} states; what is smaller than their storage keeps, and not than "
                "fp32 does, is kept on average"
            )
        lines += self._too_small()
        if self.joined:
            lines.append(
                f"joined in fp32, for want of a rule: {', '.join(sorted(set(self.joined)))}"
            )
        lines += [f"warning: {note}" for note in self.notes]
        return "\n".join(lines)


def explain(
    optimizer_or_function: Optimizer | Callable[..., Any],
    *args: Any,
    replay: GradientRecorder | int = 0,
    **options: Any,
) -> Explanation:
    """Say what collage_fx would do to a step, without changing anything.

    Args:
        optimizer_or_function: an optimizer, or what wraps one and has it as its `optimizer`; a step
            made by `collage_fx.compile`; or a function.
        *args: for a function, the arguments of one call; they are copied.
        replay: to measure errors, for the page that `save` writes: what `record_gradients`
            returned, or in how many steps to take the gradients of now. Three copies of the
            optimizer, of which one is in float64, are given them: 16 bytes for each element of
            parameters and states.
        **options: as for `collage_fx.compile`; by default those the step was compiled with.

    Returns:
        An Explanation. The step runs twice on a copy of the optimizer (of its parameters and
        states too, so it takes their memory once more); gradients that are None everywhere are
        taken as zeros, else parameters without a gradient are left out, as a step would.

    Raises:
        OptionError: an option or value that does not exist.
        SubjectError: a model, or anything else that is neither an optimizer nor a function.
        CollageError: the step cannot be run.
    """
    subject, step, known = _prepare(optimizer_or_function, args)
    options = {**known, **options}
    config, inductor = split_options(options)
    owner = getattr(step, "__self__", None)
    if isinstance(owner, Optimizer):
        config = as_its_kernel(config, options, owner)
    session = Backend(config, inductor, named=True, keep=True)
    if isinstance(owner, Optimizer):
        session.optimizer = weakref.ref(owner)
        supervised = compile_optimizer(owner, session)
        args = _closure(step)
    else:
        supervised = compile_function(step, session)
    with STORE.unheard(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            replayed = replay_steps(owner, config, inductor, replay)
            # Twice: some optimizers make their states in the first step and carry them later.
            supervised(*_copied(args))
            before = {name: full_value(p) for name, p in _parameters(owner)}
            supervised(*_copied(args))
            updates = _updates(owner, before)
        except OptionError:
            raise
        except Exception as error:
            raise CollageError(f"the step of {subject} cannot be explained: {error}") from error
    notes = [str(w.message) for w in caught if str(w.message).startswith("collage_fx")]
    served = report_of(supervised).states
    explanation = _explanation(subject, config, session.compiled, served, notes)
    explanation.updates, explanation.replayed = updates, replayed
    explanation.memory = bytes_by_kind(owner) if isinstance(owner, Optimizer) else {}
    return explanation


def _parameters(owner: Any) -> list[tuple[str, Tensor]]:
    """Return the 16-bit parameters that a step of an optimizer moves, with their names."""
    if not isinstance(owner, Optimizer):
        return []
    moving = {id(p) for g in owner.param_groups if g.get("lr", 1) != 0 for p in g["params"]}
    return [
        (o.name, o.tensor)
        for o in owned_tensors(owner)
        if o.owner == "param" and id(o.tensor) in moving and o.tensor.dtype in FINEST
    ]


def _updates(owner: Any, before: dict[str, Tensor]) -> dict[str, float]:
    """Return the median size of each update, of elements that have a gradient and are not zero."""
    found = {}
    for name, p in _parameters(owner):
        old = before[name]
        if p.grad is not None and p.grad.layout == torch.strided:
            moved = ((full_value(p) - old) / old).abs()[(p.grad != 0) & (old != 0)]
            if moved.numel():
                found[name] = float(moved.median())
    return found


def _closure(step: Callable[..., Any]) -> tuple[Any, ...]:
    """Return a closure for a step that needs one; the gradients stay as they are."""
    closure = inspect.signature(step).parameters.get("closure")
    needed = closure is not None and closure.default is inspect.Parameter.empty
    return (lambda: torch.zeros(()),) if needed else ()


def _prepare(
    subject: Optimizer | Callable[..., Any], args: tuple[Any, ...]
) -> tuple[str, Callable[..., Any], dict[str, Any]]:
    """Return a name, a step on copies and the options it was compiled with."""
    options: dict[str, Any] = {}
    session = getattr(step_made_here(subject, "_collage"), "_collage", None)
    if isinstance(session, Backend):
        options = {**vars(session.config), **session.inductor}
        # A scheduler puts a function of its own around the step, with its attributes.
        subject = session.optimizer() or subject
    elif session is not None:
        subject, options = session
    subject = subject_of(innermost(subject))
    if isinstance(subject, Optimizer):
        subject = next(iter(held_by(subject)), subject)
        twin = clone_of(subject, torch.clone, residuals=True)
        with_some_gradient(twin)
        return type(subject).__name__, types.MethodType(type(twin).step, twin), options
    owned = any(True for _ in tensors_of_callable(subject))  # which a copy of it has too
    return name_of(subject), copy.deepcopy(subject) if owned else subject, options


def _copied(args: tuple[Any, ...]) -> Any:
    """Copy the tensors of a call, the same tensor twice being one copy."""
    copies: dict[int, Tensor] = {}

    def one(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if id(x) not in copies:
            copies[id(x)] = x.detach().clone().requires_grad_(x.requires_grad)
        return copies[id(x)]

    return tree_map(one, args)


def _explanation(
    subject: str,
    config: CollageConfig,
    compiled: list[Compiled],
    served: list[Served],
    notes: list[str],
) -> Explanation:
    states: dict[str, StatePlan] = {}
    latest: list[Compiled] = []
    for one in compiled:
        names = {state.name for state in one.program.plan}
        # A later graph over the same states replaces an earlier one.
        latest = [c for c in latest if not names & {s.name for s in c.program.plan}] + [one]
        states.update({state.name: state for state in one.program.plan})
    for state in served:
        if state.joined and not state.graph:
            is_param = " of " not in state.name
            scalar = not state.shape
            storage = chosen(
                config.storage, state.name, state.dtype, is_param=is_param, scalar=scalar
            )
            states[state.name] = state.planned(storage)
    programs: list[Program] = [c.program for c in latest]
    rewritten = [r for p in programs for r in p.rewritten if r.lowered is not None]
    return Explanation(
        subject=subject,
        config=config,
        plan=sorted(states.values(), key=lambda state: sort_key(state.name)),
        before=[p.source for p in programs],
        expanded=[r.expanded for r in rewritten if r.expanded is not None],
        lowered=[r.lowered for r in rewritten if r.lowered is not None],
        after=[p.result for p in programs if p.result is not None],
        output_code=[c.source_code for c in latest],
        snapshots=[p.snapshots for p in programs],
        seconds=[p.seconds for p in programs],
        members=[r.count for r in rewritten],
        kernels=[_kernel(r) for r in rewritten],
        apart=[r.apart for r in rewritten],
        by_inductor=[_by_inductor(r) for r in rewritten],
        joined=[op for r in rewritten for op in r.joined],
        notes=notes,
        engine={one.name: one.engine for one in served},
        alike=" (of members that are alike, those of one)"
        if any(p.copies for p in programs)
        else "",
        compiled=latest,
    )


def _written(choice: Choice) -> str:
    return choice if isinstance(choice, str) else ", ".join(f"{p}: {s}" for p, s in choice)


def _by_inductor(rewritten: Rewritten) -> str:
    kernel = MULTI_TENSOR_KERNELS.get(rewritten.multi_tensor)
    return kernel.by_inductor if kernel else ""


def _kernel(rewritten: Rewritten) -> str:
    sources = MULTI_TENSOR_KERNELS[rewritten.multi_tensor].sources if rewritten.multi_tensor else {}
    return sources.get(rewritten.members[0].states[0][0].val.device.type, "")


def _count(modules: list[GraphModule]) -> str:
    counts = Counter(
        str(node.target).removeprefix("aten.").partition(".")[0]
        for module in modules
        for node in module.graph.nodes
        if node.op == "call_function" and "getitem" not in str(node.target)
    )
    return ", ".join(f"{n} {name}" for name, n in counts.most_common()) or "none"


def _table(plan: list[StatePlan], engine: dict[str, str]) -> list[str]:
    rows = [("state", "dtype", "recurrence", "verdict", "storage", "keeps", "bytes", "engine")]
    for state in plan:
        low = state.dtype in LOW_PRECISION or state.compensated
        verdict = (
            "compensated" if state.compensated else "plain" if low or not state.refused else ""
        )
        rows.append(
            (
                state.name,
                str(state.dtype).removeprefix("torch."),
                state.recurrence or "-",
                f"{verdict or 'refused'}: {state.reason}",
                state.storage or "-",
                f"{kept(state.dtype, state.storage):.1e}" if low else "-",
                f"{state.residual_bytes:,}",
                engine.get(state.name, "graph"),
            )
        )
    return table(rows)
