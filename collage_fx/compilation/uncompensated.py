"""Warnings for graphs that are not, or only partly, compensated."""

from torch import Tensor
from torch.fx import GraphModule

from collage_fx.compilation.graph_inputs import AotInputs, aot_metadata
from collage_fx.compilation.session import Session
from collage_fx.optimizer.served import left_by_level, nothing_compensated
from collage_fx.passes.analysis.plan import leave_alone
from collage_fx.passes.frontend.capture import is_merged
from collage_fx.passes.ir.program import Program, StatePlan, compensable_in
from collage_fx.runtime.storage.registry import compensable_dtypes


def written_outside(session: Session, gm: GraphModule) -> bool:
    """Warn, and return True, if AOTAutograd itself writes new values back after the graph has run.

    So it does with a parameter that was updated through `.data`, and with one whose strides the
    step changes in place: no copy_ is in the graph.
    """
    metadata = aot_metadata()
    if metadata is None:
        return False
    inputs = [n.meta.get("val") for n in gm.graph.find_nodes(op="placeholder")]
    turned = [i for i, info in enumerate(metadata.input_info) if info.mutates_metadata]
    indices = [*metadata.mutated_inp_runtime_indices, *turned]
    outer = [inputs[i] for i in indices if i < len(inputs)]
    dtypes = compensable_dtypes(session.config.storage)
    if not any(isinstance(v, Tensor) and v.dtype in dtypes for v in outer):
        return False
    if session.steps() is None:
        session.warn_once(
            "data-write",
            "not compensated: parameters updated through .data; update them in place under "
            "torch.no_grad(), or use collage_fx.compile, which does that eagerly",
        )
    return True


def takes_one_for_two(session: Session, gm: GraphModule) -> bool:
    """Return True if inputs that are written share memory, and a step can be recorded instead.

    AOTAutograd makes one input of them, without a guard: it is so in each call from then on.
    """
    inputs = (n.meta.get("desc") for n in gm.graph.find_nodes(op="placeholder"))
    if session.steps() is None or not any(map(is_merged, inputs)):
        return False
    session.notes.add("recorded: the step writes tensors that share memory")
    return True


def differentiated(session: Session, gm: GraphModule, inputs: AotInputs) -> bool:
    """Warn, and return True, if a graph updates states, and its outputs are differentiated.

    It is compiled as it stands. Statistics of a model that is being trained are no optimizer's
    states: not a word on them.
    """
    dtypes = compensable_dtypes(session.config.storage)
    placeholders = gm.graph.find_nodes(op="placeholder")
    written = {n.args[0] for n in gm.graph.nodes if str(n.target) == "aten.copy_.default"}
    carried = [
        inputs.describe(index, node)
        for index, node in enumerate(placeholders)
        if node in written and node.meta["val"].dtype in dtypes
    ]
    leave_alone(carried, session.config.states, is_step=session.optimizer() is not None)
    choice = session.config.storage
    names = [c.name for c in carried if not c.left_alone and compensable_in(c, choice)]
    if names and session.steps() is None:  # else what this graph does is recorded
        session.warn_once(
            "differentiated",
            f"a graph that updates states ({', '.join(names)}) is part of a "
            "differentiated computation, and runs without compensation; compile the update by "
            "itself, under torch.no_grad()",
        )
    return bool(names)


def note_results(session: Session, gm: GraphModule, plan: list[StatePlan]) -> None:
    """Note that a graph of a function may return new states, and carries none that is seen.

    The function may write states in other graphs, and this one be of its model.
    """
    if not session.named or session.optimizer() is not None or any(s.compensable for s in plan):
        return
    dtypes = compensable_dtypes(session.config.storage)
    inputs = [n.meta.get("val") for n in gm.graph.find_nodes(op="placeholder")]
    results = [n.meta.get("val") for n in gm.graph.output_node().all_input_nodes]
    alike = [(v.shape, v.dtype) for v in inputs if isinstance(v, Tensor)]
    session.returns_alike |= any(
        isinstance(r, Tensor) and r.dtype in dtypes and (r.shape, r.dtype) in alike for r in results
    )


def warn_of_states(session: Session, program: Program) -> None:
    """Warn of states that the passes did not compensate, unless the graph is recorded instead."""
    if program.lost:
        session.note_loss(program.lost)
    if session.steps() is not None:
        return  # it does what this graph cannot do, and warns of the rest
    refused = [f"{s.name} ({s.reason})" for s in program.plan if s.refused]
    if refused:
        session.warn_once("refused", f"not compensated: {'; '.join(refused)}")
    # A hook of a step, which Dynamo traces by itself, may scale gradients.
    others = (c for c in program.carried if c.left_alone or c.gradient)
    indices = {one.index for c in others for one in program.alike(c)}
    states = [s for s in program.plan if s.index not in indices]
    floating = [s for s in states if s.dtype.is_floating_point and s.shape]
    if floating and program.result is None and not refused:
        message = nothing_compensated((s.dtype for s in floating), states)
        session.warn_once("nothing-compensated", message)
    elif left := left_by_level(states, unknown=True):
        session.warn_once("level-leaves", left)
