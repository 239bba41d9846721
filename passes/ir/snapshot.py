"""A program between two passes as text, to see what each of them does."""

from collections.abc import Iterator

from torch.fx import GraphModule

from collage_fx.passes.ir.program import Program

UNCHANGED = "unchanged"


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
        yield f"rewritten {i} on expansions", _text(r.expanded)
        yield f"rewritten {i} in plain arithmetic", _text(r.lowered)
    yield "graph", _text(program.result or program.canonical or program.source)


def _because(reason: str) -> str:
    return f" ({reason})" if reason else ""


def _text(module: GraphModule | None) -> str:
    return "" if module is None else str(module.graph).strip()
