"""Text of a program of the passes, for logs, tlparse and `explain`."""

from collections.abc import Iterator
from functools import partial

from torch.fx import GraphModule

from collage_fx.passes.ir.program import Program, StatePlan, Unlike
from collage_fx.runtime.errors import listed
from collage_fx.runtime.logs import GRAPHS, VERDICTS, show

UNCHANGED = "unchanged"
"""The snapshot of a program that a pass has left as it was."""


def show_program(program: Program) -> None:
    """Log the verdicts and the graphs; classes are numbered as `explain` does."""
    show(VERDICTS, "verdicts", lambda: verdicts(program))
    show(GRAPHS, "source", lambda: text_of(program.source))
    rewritten = (r for r in program.rewritten if r.lowered is not None)
    for number, one in enumerate(rewritten, 1):
        show(GRAPHS, f"expanded class {number}", partial(text_of, one.expanded))
        show(GRAPHS, f"lowered class {number}", partial(text_of, one.lowered))
    if program.result is not None:
        show(GRAPHS, "result", lambda: text_of(program.result))


def text_of(graph: GraphModule | None) -> str:
    """Return the operations of a graph, one a line; nothing of none."""
    return "" if graph is None else str(graph.graph).strip()


def snapshot(program: Program) -> str:
    """Return all that the passes have found out and made so far, one part under the other."""
    return "\n\n".join(f"{title}:\n{text}" for title, text in _parts(program) if text)


def _parts(program: Program) -> Iterator[tuple[str, str]]:
    yield "states", "\n".join(f"{c.index}: {c.name}{_because(c.refusal)}" for c in program.carried)
    for i, group in enumerate(program.classes):
        nodes = ", ".join(n.name for n in group.representative.nodes)
        found = "\n".join(r.text for r in group.recurrences)
        yield f"class {i} of {len(group.members)}", "\n".join(filter(None, (nodes, found)))
    yield (
        "verdicts",
        "\n".join(f"{s.name}: {s.compensated}{_because(s.reason)}" for s in program.plan),
    )
    yield "lost", "\n".join(program.lost)
    yield "read with the high word only", "\n".join(program.reads.values())
    for i, r in enumerate(program.rewritten):
        yield f"rewritten {i} on expansions", text_of(r.expanded)
        yield f"rewritten {i} in plain arithmetic", text_of(r.lowered)
    yield "graph", text_of(program.result or program.canonical or program.source)


def _because(reason: str) -> str:
    return f" ({reason})" if reason else ""


def verdicts(program: Program) -> str:
    """Return one line for all states of one kind on which there is one verdict."""
    alike: dict[tuple[str | None, str], list[StatePlan]] = {}
    for state in program.plan:
        # Of what belongs to no parameter, and of parameters, there is one line too.
        kind = state.state_name.own if state.state_name.parameter else None
        alike.setdefault((kind, _verdict(state)), []).append(state)
    lines = [f"{listed([s.name for s in k], 1)}: {_verdict(k[0])}" for k in alike.values()]
    return "\n".join([*lines, *_of_classes(program)]) or "no states"


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
