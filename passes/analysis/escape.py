"""Pass 8: find values that would leave a graph with the high word of a state only."""

from collections.abc import Container, Iterable, Iterator

import torch
from torch.fx import Node

from collage_fx.passes.analysis.affine import ADDING, MUCH, bound, is_number
from collage_fx.passes.analysis.carried_path import walk
from collage_fx.passes.analysis.factors import scaling
from collage_fx.passes.analysis.high_words import chosen, entering
from collage_fx.passes.analysis.plan import verdict
from collage_fx.passes.analysis.recurrence import recurrence_of
from collage_fx.passes.ir.graph_memory import behind, closure, mutations
from collage_fx.passes.ir.program import (
    LOW_PRECISION,
    Carried,
    Owner,
    Program,
    compensable_in,
    graph_of,
    has_no_residual,
    is_tensor,
    value_of,
)
from collage_fx.passes.rules.structural import STRUCTURE
from collage_fx.runtime.storage.registry import compensable_dtypes

aten = torch.ops.aten

_VALUES = (*LOW_PRECISION, torch.float32)


def escape(program: Program) -> None:
    """Note in `Program.lost` what the graph would lose that joined values would keep.

    A graph has a low word beside the states that it writes, within their slices. Beyond them the
    high word alone is known of

    - a sum or difference of a parameter, as of the distance that it has moved, where the graph does
      not write that parameter or does so in another slice;
    - the update of a state which a state of another slice enters with weight, however it is scaled
      before: an average of the two, say; see `high_words.py`;
    - the update of a state that is scaled by a sum or norm of it, say, or by a state of another
      shape; see `factors.py`;
    - a result that takes over the value of a state and is not stored in the graph: a new state that
      begins as a copy of a parameter, a parameter computed anew from other states, a state that is
      replaced and not overwritten or is stored after a graph break, bits to be rounded by chance;
    - a value that meets its own largest element, mean or first element, say, which is that of its
      high word; see `high_words.py`.

    States that it only reads so may get a residual later: they are in `Program.reads`.

    The graph does not change.
    """
    owned = any(c.owned and c.owner in ("param", "state") for c in program.carried)
    if owned or program.is_step:
        states = _states(program, ("param", "state"))
        sums = list(_sums(program, _with_low_words(program, states)))
        results = list(_results(program, states))
        program.lost = list(dict.fromkeys([*sums, *(text for _, text in results)]))
        takers = {taker for taker, _ in results}
        if not sums and -1 not in takers:
            program.takers = frozenset(takers)
    elif any(s.compensated for s in program.plan):  # and not the forward pass of a model, say
        states, place = _states(program, ("param", "state", "tensor")), _place(program)
        states = _with_low_words(program, states)
        every = states | _rounded(program)
        entered = entering(program, states, place)
        factors, certain = scaling(program, every), place.keys() | (every.keys() - states.keys())
        program.lost = [
            *_missed(program, states, entered, place, "enters a sum or difference"),
            *_missed(program, every, factors, certain, "scales a new value"),
        ]
    program.lost += list(dict.fromkeys(chosen(program)))


def _states(program: Program, owners: tuple[Owner, ...]) -> dict[Node, Carried]:
    """Return the states among the inputs that have a residual, or may have one."""
    compensated = {s.index for s in program.plan if s.compensated}
    carried = {c.index: c for c in program.carried}
    held = compensable_dtypes(program.settings.storage)
    found = {}
    for index, node in enumerate(graph_of(program.canonical).graph.find_nodes(op="placeholder")):
        if not is_tensor(node) or value_of(node).dtype not in held:
            continue
        if index in compensated:
            found[node] = carried[index]
        elif index not in program.read_whole and index not in carried and node.users:
            read = program.describe(index, node)
            known = read.owner in owners or read.present
            if known and compensable_in(read, program.settings.storage):
                found[node] = read
    return found


def _with_low_words(program: Program, states: dict[Node, Carried]) -> dict[Node, Carried]:
    """Return the states whose high word is not all that there is of them."""
    choice = program.settings.storage
    return {node: c for node, c in states.items() if not has_no_residual(c, choice)}


def _rounded(program: Program) -> dict[Node, Carried]:
    """Return the states that the graph updates without a residual, and that may have one."""
    compensated = {s.index for s in program.plan if s.compensated}
    inputs = graph_of(program.canonical).graph.find_nodes(op="placeholder")
    return {
        inputs[c.index]: c
        for c in program.carried
        if c.index not in compensated
        and not c.left_alone
        and compensable_in(c, program.settings.storage)
        and not has_no_residual(c, program.settings.storage)
    }


def _place(program: Program) -> dict[Node, set[Node]]:
    """Return, for each state that is compensated, the nodes of its slice."""
    return {part.old(i): set(part.nodes) for part, i in program.compensated()}


def _sums(program: Program, states: dict[Node, Carried]) -> Iterator[str]:
    place = _place(program)
    weighty = list(entering(program, states, place))
    every = states | _rounded(program)
    factors = list(scaling(program, every))
    certain = {x for x in every if every[x].owner == "param" or x in place or x not in states}
    needed = (x for x in (*weighty, *factors) if x not in certain)
    program.weighty = frozenset(c.index for x in needed for c in program.alike(states[x]))
    found = [*_operands(program, states, place), *weighty]
    yield from _missed(program, states, found, certain, "enters a sum or difference")
    yield from _missed(program, every, factors, certain, "scales a new value")


def _missed(
    program: Program,
    states: dict[Node, Carried],
    found: Iterable[Node],
    certain: Container[Node],
    how: str,
) -> Iterator[str]:
    """Yield the states that are read with their high word only; note those that may have no more.

    Args:
        program: the program.
        states: what the nodes are.
        found: the states that are read so.
        certain: those which have a low word, or will have one, for certain.
        how: what they do.
    """
    written = {c.index for c in program.carried}
    for x in dict.fromkeys(found):
        others = not (states[x].owned or states[x].present)  # another optimizer's, maybe
        only_read = states[x].index not in written
        if x in certain and not (only_read and others):
            for state in program.alike(states[x]):
                yield f"{state.name} {how} with its high word only"
        if only_read:
            program.reads |= {c.index: c.name for c in program.alike(states[x])}


def _operands(
    program: Program, states: dict[Node, Carried], place: dict[Node, set[Node]]
) -> Iterator[Node]:
    """Return the states that are an operand of a sum themselves, outside their own slice."""
    for node in graph_of(program.canonical).graph.nodes:
        if node.target in ADDING and node.users:
            for operand in filter(is_tensor, node.args):
                origin = behind(operand, STRUCTURE)
                if origin in states and node not in place.get(origin, ()):
                    yield origin


def _results(program: Program, states: dict[Node, Carried]) -> Iterator[tuple[int, str]]:
    """Yield values that results take over, as text, each with the result's state; or -1."""
    graph = graph_of(program.canonical).graph
    order = {node: i for i, node in enumerate(graph.nodes)}
    has_param = any(c.owner == "param" for c in states.values())
    for result, (is_param, taker) in _candidates(program).items():
        before = sorted(closure(result, lambda n: n.all_input_nodes), key=order.__getitem__)
        # A state that begins as a gradient is rounded as its update is.
        for x in (n for n in before if n in states and not states[n].gradient):
            form = walk(before, x).get(result)
            if form is None or bound(form.share) < MUCH:
                continue
            if not is_param and not all(map(is_number, form.shares)):
                continue
            found = recurrence_of(form), program.settings.level, has_param
            if states[x].owner == "param" or verdict(states[x], *found).compensated:
                for state in program.alike(states[x]):
                    text = f"a result takes over the value of {state.name}, without its low word"
                    yield taker, text


def _candidates(program: Program) -> dict[Node, tuple[bool, int]]:
    """Return values that may take over others, whether with an unknown weight, and their states.

    Those are the 16-bit results, what is stored in a state without a residual, and fp32 values
    whose bits are taken.
    """
    graph = graph_of(program.canonical).graph
    stored = mutations(graph)
    handed_on = [n for n in graph.output_node().all_input_nodes if n not in stored.values()]
    results = dict.fromkeys(handed_on, (True, -1))
    wide = {n.args[0] for n in graph.nodes if n.target is aten.view.dtype}
    results |= dict.fromkeys(wide, (True, -1))
    compensated = {s.index for s in program.plan if s.compensated}
    inputs = list(graph.find_nodes(op="placeholder"))
    for state in program.carried:
        if state.owned and not state.left_alone and state.index not in compensated:
            results[stored[inputs[state.index]]] = state.owner == "param", state.index
    return {
        n: found
        for n, found in results.items()
        if is_tensor(n) and (n in wide or value_of(n).dtype in _VALUES)
    }
