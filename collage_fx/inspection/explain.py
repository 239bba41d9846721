"""`explain`: what is compensated, what not and why, and the graphs before and after."""

import copy
import types
import warnings
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from collage_fx.budget.plan import beginning
from collage_fx.budget.prediction import Prediction
from collage_fx.compilation.residual_binding import of_size
from collage_fx.compilation.session import Compiled
from collage_fx.config import CollageConfig
from collage_fx.dynamo.backend import Backend
from collage_fx.dynamo.options import names_options, split_options
from collage_fx.inspection.explanation import Explanation
from collage_fx.inspection.gradients import GradientRecorder
from collage_fx.inspection.replay import closure_for
from collage_fx.inspection.replay import replay as replay_steps
from collage_fx.inspection.values import value as full_value
from collage_fx.optimizer.fused import as_its_kernel
from collage_fx.optimizer.ownership import (
    Owned,
    bytes_by_kind,
    owned_tensors,
    tensors_of_callable,
)
from collage_fx.optimizer.parameter_names import names_of, renamed, renamed_state
from collage_fx.optimizer.served import Served
from collage_fx.optimizer.state_table import sort_key
from collage_fx.passes.codegen.multi_tensor_kernel import MULTI_TENSOR_KERNELS
from collage_fx.passes.ir.program import Program, StatePlan
from collage_fx.runtime.errors import CollageError, OptionError
from collage_fx.runtime.residuals.store import STORE
from collage_fx.runtime.storage.registry import chosen
from collage_fx.runtime.trees import tree_map
from collage_fx.step.compiled_step import (
    compile_function,
    compile_optimizer,
    optimizer_of,
    report_of,
    session_of,
)
from collage_fx.step.distributed_wrappers import wrapped_optimizers
from collage_fx.step.optimizer_clone import clone_of, with_some_gradient
from collage_fx.step.small_updates import moving_parameters
from collage_fx.step.subject import innermost, name_of, step_made_here, subject_of


@names_options
def explain(
    optimizer_or_function: Optimizer | Callable[..., Any],
    *args: Any,
    model: Module | None = None,
    verbose: bool = False,
    replay: GradientRecorder | int = 0,
    **options: Any,
) -> Explanation:
    """Explain what collage_fx would do to a step, without changing anything.

    Args:
        optimizer_or_function: an optimizer, or what wraps one and has it as its `optimizer`; a step
            made by `collage_fx.compile`; or a function.
        *args: for a function, the arguments of one call; they are copied.
        model: the module whose names the parameters have. Else they have those that the optimizer
            was given with them, or those in the smallest module that has all of them.
        verbose: whether the report has a row for each state, though others say the same.
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
        SubjectError: a model, or anything else that is neither an optimizer nor a function; a
            `model` that has not the parameters of the optimizer.
        CollageError: the step cannot be run.

    Examples:
        >>> explanation = collage_fx.explain(optimizer)
        >>> state = explanation.plan[2]
        >>> print(state.name, state.recurrence, state.verdict)
        exp_avg_sq of weight x' = 0.999*x + B compensated
    """
    budget = _prediction_of(optimizer_or_function)
    subject, step, known, names = _prepare(optimizer_or_function, args, model)
    known = _without_itself(known, optimizer_or_function)
    config, inductor = split_options(options, known=known)
    # What was given counts, and what the step was given, unless that is for another storage.
    other = options.keys() & {"storage", "stochastic_rounding"}
    options = options if other else {**known, **options}
    owner = getattr(step, "__self__", None)
    if isinstance(owner, Optimizer):
        config = beginning(as_its_kernel(config, options, owner), owner)
    session = Backend(config, inductor, named=True, keep=True)
    if isinstance(owner, Optimizer):
        session.optimizer = weakref.ref(owner)
        compiled = compile_optimizer(owner, session)
        args = closure_for(step)
    else:
        compiled = compile_function(step, session)
    with STORE.unheard(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            replayed = replay_steps(owner, config, inductor, replay)
            # Twice: some optimizers make their states in the first step and carry them later.
            compiled(*_copied(args))
            before = [(o, full_value(o.tensor)) for o in _moving(owner)]
            compiled(*_copied(args))
            found = ((o.name, _median_update(o, old, full_value(o.tensor))) for o, old in before)
            updates = {name: update for name, update in found if update is not None}
        except OptionError:
            raise
        except Exception as error:
            raise CollageError(f"the step of {subject} cannot be explained: {error}") from error
    notes = [str(w.message) for w in caught if str(w.message).startswith("collage_fx")]
    report = report_of(compiled)
    explanation = _explanation(subject, config, session.compiled, report.states, notes)
    explanation.updates, explanation.replayed = updates, replayed
    explanation.memory = bytes_by_kind(owner) if isinstance(owner, Optimizer) else {}
    explanation.remarks = [note for note in report.notes if note not in session.warned]
    explanation.verbose = verbose
    if budget is not None and budget.budget == config.budget:
        explanation.budget = budget
    explanation.plan = _sized(explanation.plan, owner)
    _rename(explanation, names)
    return explanation


def _without_itself(known: dict[str, Any], subject: Any) -> dict[str, Any]:
    """Return options without the optimizer whose copy is explained, whose gradients count once."""
    optimizer = optimizer_of(subject) if known.get("clip_over") else None
    others = [one for one in known.get("clip_over", ()) if one() is not optimizer]
    return {**known, "clip_over": others} if optimizer is not None else known


def _prediction_of(subject: Any) -> Prediction | None:
    """Return what is predicted of the storages that were chosen for a budget, if there is one."""
    session = session_of(subject)
    optimizer = None if session is None else session.optimizer()
    if session is None or optimizer is None or session.budgeted() is None:
        return None
    found: Prediction = session.budgeted().prediction(optimizer)
    return found


def _rename(explanation: Explanation, names: dict[str, str]) -> None:
    """Give the states the names of the model."""
    plan, engine = explanation.plan, explanation.engine
    explanation.plan = [replace(s, state_name=renamed_state(s.state_name, names)) for s in plan]
    explanation.engine = {renamed(name, names): how for name, how in engine.items()}
    explanation.updates = {renamed(n, names): size for n, size in explanation.updates.items()}
    if explanation.budget is not None:
        explanation.budget = explanation.budget.renamed(names)
    explanation.notes = [renamed(note, names) for note in explanation.notes]
    explanation.remarks = [renamed(remark, names) for remark in explanation.remarks]


def _sized(plan: list[StatePlan], owner: Any) -> list[StatePlan]:
    """Return states with the sizes that they have, which may be symbols in a graph."""
    owned = owned_tensors(owner) if isinstance(owner, Optimizer) else ()
    tensors = {o.name: o.tensor for o in owned}
    return [of_size(s, tensors[s.name]) if s.name in tensors else s for s in plan]


def _moving(owner: Any) -> list[Owned]:
    """Return the 16-bit parameters that a step of an optimizer moves, but for sharded ones."""
    found = moving_parameters(owner) if isinstance(owner, Optimizer) else []
    return [o for o in found if o.whole is o.tensor]


def _median_update(owned: Owned, old: Tensor, new: Tensor) -> float | None:
    """Return the median of the updates of a parameter by a step, each relative to the value.

    Of elements that have a gradient and were not zero; None if there are none.
    """
    gradient = owned.tensor.grad
    if gradient is None or gradient.layout != torch.strided:
        return None
    moved = ((new - old) / old).abs()[(gradient != 0) & (old != 0)]
    return float(moved.median()) if moved.numel() else None


def _prepare(
    subject: Optimizer | Callable[..., Any], args: tuple[Any, ...], model: Module | None
) -> tuple[str, Callable[..., Any], dict[str, Any], dict[str, str]]:
    """Return a name, a step on copies, the options it was compiled with, and parameters' names."""
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
        subject = next(iter(wrapped_optimizers(subject)), subject)
        twin = clone_of(subject, torch.clone, residuals=True)
        with_some_gradient(twin)
        step = types.MethodType(type(twin).step, twin)
        return type(subject).__name__, step, options, names_of(subject, model)
    owned = any(True for _ in tensors_of_callable(subject))  # which a copy of it has too
    return name_of(subject), copy.deepcopy(subject) if owned else subject, options, {}


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
            name, scalar = state.state_name, not state.shape
            storage = chosen(config.storage, name, state.dtype, scalar=scalar)
            states[state.name] = state.planned(storage)
    programs: list[Program] = [c.program for c in latest]
    rewritten = [r for p in programs for r in p.rewritten if r.lowered is not None]
    kernels = [MULTI_TENSOR_KERNELS.get(r.multi_tensor) for r in rewritten]
    devices = [r.members[0].states[0][0].val.device.type for r in rewritten]
    return Explanation(
        subject=subject,
        config=config,
        plan=sorted(states.values(), key=lambda state: sort_key(state.state_name)),
        before=[p.source for p in programs],
        expanded=[r.expanded for r in rewritten if r.expanded is not None],
        lowered=[r.lowered for r in rewritten if r.lowered is not None],
        after=[p.result for p in programs if p.result is not None],
        output_code=[c.source_code for c in latest],
        snapshots=[p.snapshots for p in programs],
        seconds=[p.seconds for p in programs],
        members=[r.count for r in rewritten],
        kernels=[k.sources.get(d, "") if k else "" for k, d in zip(kernels, devices, strict=True)],
        apart=[r.apart for r in rewritten],
        by_inductor=[k.by_inductor if k else "" for k in kernels],
        joined=[op for r in rewritten for op in r.joined],
        notes=notes,
        engine={one.name: one.engine for one in served},
        alike=" (of members that are alike, those of one)"
        if any(p.copies for p in programs)
        else "",
        compiled=latest,
    )
