"""What the passes have made of one graph, in the logs and in the trace that tlparse reads."""

from collections.abc import Iterator

from torch.fx import GraphModule

from collage_fx.passes.ir.program import Program, StatePlan, Unlike
from collage_fx.runtime.logs import GRAPHS, VERDICTS, show


def show_program(program: Program) -> None:
    """Log the verdicts and the graphs; classes are numbered as `explain` does."""
    show(VERDICTS, "verdicts", lambda: verdicts(program))
    show(GRAPHS, "source", lambda: text_of(program.source))
    rewritten = (r for r in program.rewritten if r.lowered is not None)
    for number, one in enumerate(rewritten, 1):
        for name, graph in (("expanded", one.expanded), ("lowered", one.lowered)):
            _show_graph(f"{name} class {number}", graph)
    _show_graph("result", program.result)


def _show_graph(title: str, graph: GraphModule | None) -> None:
    if graph is not None:
        show(GRAPHS, title, lambda: text_of(graph))


def text_of(graph: GraphModule) -> str:
    """Return the operations of a graph, one a line."""
    return str(graph.graph).strip()


def verdicts(program: Program) -> str:
    """Return one line for all states of one kind on which there is one verdict."""
    alike: dict[str, list[StatePlan]] = {}
    for state in program.plan:
        kind = state.name.rpartition(" of ")[0]  # which state of its parameter it is
        alike.setdefault(f"{kind}: {_verdict(state)}", []).append(state)
    lines = [f"{_names(states)}: {_verdict(states[0])}" for states in alike.values()]
    return "\n".join([*lines, *_of_classes(program)]) or "no states"


def _names(states: list[StatePlan]) -> str:
    more = f" and {len(states) - 1} more" if states[1:] else ""
    return f"{states[0].name}{more}"


def _verdict(state: StatePlan) -> str:
    storage = f", storage {state.storage}" if state.storage else ""
    dtype = str(state.dtype).removeprefix("torch.")
    return f"{dtype}, {state.recurrence or '-'}, {state.verdict}: {state.reason}{storage}"


def _of_classes(program: Program) -> Iterator[str]:
    rewritten = (r for r in program.rewritten if r.lowered is not None)
    for number, one in enumerate(rewritten, 1):
        kernel = f"kernel {one.multi_tensor}" if one.multi_tensor else f"one each: {one.apart}"
        yield f"class {number} of {one.count}: {kernel}"


def summary(made: Program | Unlike | None) -> str:
    """Return in one line what was made of a graph, or why it was given up."""
    if made is None:
        return "compiled as it stands"
    if isinstance(made, Unlike):
        return f"given up, as one member cannot stand for all of its class: {made.reason}"
    states, done = len(made.plan), sum(s.compensated for s in made.plan)
    counts = [r.count for r in made.rewritten if r.lowered is not None]
    kernels = len({r.multi_tensor for r in made.rewritten} - {""})
    classes = f"classes of {', '.join(map(str, counts))} members" if counts else "no classes"
    passes = sum(made.seconds.values())
    return (
        f"{done} of {states} states compensated; {classes}, {kernels} with one kernel for all; "
        f"passes {passes:.2f} s"
    )
