"""The source of a kernel line by line, with the values of the lowered graph that are in it."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from torch.fx import Node

from collage_fx.inspection.page.readable import Piece, Span
from collage_fx.passes.codegen.inductor_lowering import region_graph
from collage_fx.passes.codegen.multi_tensor_kernel import MULTI_TENSOR_KERNELS, MultiTensorKernel
from collage_fx.passes.codegen.printers.cpp_kernel import Unprintable, names_in_cpp
from collage_fx.passes.ir.program import Program, Rewritten, graph_of

LARGEST = 200_000
"""Characters of a source that are shown at most."""
_WORD = re.compile(r"\b[ptxy]\d+\b")
_STORED = re.compile(r"^\s*p(\d+)\[i\] = |^\s*tl\.store\(p(\d+) \+ i, ")
_BEGINS = ('extern "C"', "def body(")
_CALL = re.compile(r"^ +(\w+)(?:\.run)?\(([^()]*)\)$", re.MULTILINE)
_POINTER = re.compile(r"\b(?:in_)?out_ptr\d+\b")


@dataclass
class Line:
    """A line of a source."""

    number: int
    pieces: list[Piece]
    stores: str = ""
    """The state that it stores."""


@dataclass
class Kernel:
    """The source of the kernel of a class in one language."""

    language: str
    lines: list[Line]
    begins: int
    """The first line of what is about this class; before it are helpers."""
    values: dict[str, list[Node]]
    """Number of a value in it -> those of the lowered graph that it is."""
    note: str = ""

    @property
    def stored(self) -> list[Line]:
        """The lines that store a state."""
        return [line for line in self.lines if line.stores]


def kernels_of(rewritten: Rewritten, program: Program, code: str, prefix: str) -> list[Kernel]:
    """Return the kernels of a class: our C++ and Triton's, or what Inductor made.

    Args:
        rewritten: the class.
        program: the one that it is in.
        code: Inductor's code for the graph.
        prefix: of the numbers of values.
    """
    kernel = MULTI_TENSOR_KERNELS.get(rewritten.multi_tensor)
    if kernel is None:
        return [_by_inductor(rewritten, program, code, prefix + "i")] if code else []
    found = []
    for device, source in {**kernel.sources, **_for_gpu(kernel)}.items():
        if not source:  # what interprets graphs has none
            continue
        on_cpu = device == "cpu"
        ours = on_cpu and not kernel.by_inductor
        names = _cpp_names(kernel) if ours else {} if on_cpu else _triton_names(kernel, source)
        values = _lowered(rewritten, kernel, names)
        language = "C++" if on_cpu else "Triton"
        made = _linked(source, language, values, prefix + ("c" if on_cpu else "g"), rewritten)
        if device not in kernel.sources:
            made.note = "As it would be printed for a GPU; it was not run."
        elif kernel.by_inductor:
            made.note = f"By Inductor: {kernel.by_inductor}."
        found.append(made)
    return found


def _for_gpu(kernel: MultiTensorKernel) -> dict[str, str]:
    """Return the Triton source by device, where Inductor can print one."""
    if "cuda" in kernel.sources:
        return {}
    try:
        return {"a GPU": kernel.triton()}
    except Exception:  # whatever Inductor raises of what it does not print, or without Triton
        return {}
    finally:
        kernel.sources.pop("cuda", None)


def _cpp_names(kernel: MultiTensorKernel) -> dict[Node, str]:
    try:
        graph = region_graph(kernel.region)
        return names_in_cpp(graph, kernel.scalar, single=kernel.single)
    except Unprintable:
        return {}


def _triton_names(kernel: MultiTensorKernel, source: str) -> dict[Node, str]:
    """Return the names of inputs and stored results; Triton names what is between."""
    graph = region_graph(kernel.region)
    names = {n: f"x{i}" for i, n in enumerate(graph.find_nodes(op="placeholder"))}
    outputs: tuple[Node, ...] = graph.output_node().args[0]  # type: ignore[assignment]
    returned = re.search(r"^    return (.*),$", source, re.MULTILINE)
    words = returned[1].split(", ") if returned else []
    if len(words) == len(kernel.results):
        names |= {outputs[k]: word for k, word in zip(kernel.results, words, strict=True)}
    return names


def _lowered(
    rewritten: Rewritten, kernel: MultiTensorKernel, names: dict[Node, str]
) -> dict[str, list[Node]]:
    """Return, by its name in a source, what each value is in the lowered graph of the class.

    The kernel's own graph may come from an equal class, compiled before.
    """
    lowered = graph_of(rewritten.lowered).graph
    same: dict[Node, Node] = {}
    for op in ("placeholder", "call_function"):
        theirs = [n for n in region_graph(kernel.region).nodes if n.op == op]
        same |= dict(zip(theirs, (n for n in lowered.nodes if n.op == op), strict=False))
    values: dict[str, list[Node]] = {}
    for node, name in names.items():
        if node in same:
            values.setdefault(name, []).append(same[node])
    outputs: tuple[Node, ...] = lowered.output_node().args[0]  # type: ignore[assignment]
    for i, k in zip(kernel.stored, kernel.results, strict=True):
        for word in (f"p{i}", f"y{i}"):
            values[word] = [outputs[k]]
    return values


def _linked(
    source: str, language: str, values: dict[str, list[Node]], prefix: str, rewritten: Rewritten
) -> Kernel:
    ids = {name: f"{prefix}{name}" for name in values}
    states = _states_by_input(rewritten)
    lines, begins = [], 1
    for number, text in enumerate(source.splitlines(), 1):
        if begins == 1 and text.startswith(_BEGINS):
            begins = number
        stored = _STORED.match(text)
        place = int(stored[1] or stored[2]) if stored else -1
        pieces = _pieces(text, ids if begins > 1 else {})
        lines.append(Line(number, pieces, states.get(place, "a result") if stored else ""))
    used = {ids[name]: nodes for name, nodes in values.items()}
    return Kernel(language, lines, begins, used)


def _pieces(text: str, ids: dict[str, str]) -> list[Piece]:
    pieces: list[Piece] = []
    at = 0
    for word in _WORD.finditer(text):
        if word[0] in ids:
            pieces += [text[at : word.start()], Span(ids[word[0]], (word[0],))]
            at = word.end()
    return [*pieces, text[at:]]


def _states_by_input(rewritten: Rewritten) -> dict[int, str]:
    """Return input of the lowered graph -> the state or residual that it is."""
    names = [n.name for n in graph_of(rewritten.expanded).graph.find_nodes(op="placeholder")]
    count = len(rewritten.model.inputs)
    written = [at for _, at, _ in rewritten.model.states]
    written += range(count, count + rewritten.residual_count)
    return {i: names[i] for i in written}


def _by_inductor(rewritten: Rewritten, program: Program, code: str, prefix: str) -> Kernel:
    """Return Inductor's code of a graph, with the lines that store the states of a class.

    Args:
        rewritten: the class.
        program: the one that it is in.
        code: of the graph of all classes.
        prefix: of the numbers of values.
    """
    lowered = graph_of(rewritten.lowered).graph
    outputs: tuple[Node, ...] = lowered.output_node().args[0]  # type: ignore[assignment]
    values: dict[str, list[Node]] = {}
    stores: dict[int, tuple[str, str]] = {}
    for argument, name, k in _arguments(rewritten):
        for number in _storing_lines(code, argument):
            number_of = f"{prefix}{k}"
            values[number_of] = [outputs[k]]
            stores[number] = (number_of, name)
    lines = []
    for number, text in enumerate(code[:LARGEST].splitlines(), 1):
        where = stores.get(number)
        pieces: list[Piece] = [Span(where[0], (text,))] if where else [text]
        lines.append(Line(number, pieces, where[1] if where else ""))
    cut = " Cut here; all of it is in Explanation.output_code." if len(code) > LARGEST else ""
    why = f"Each member has a kernel of its own: {rewritten.apart}." if rewritten.apart else ""
    return Kernel("Inductor", lines, 1, values, why + cut)


def _arguments(rewritten: Rewritten) -> Iterable[tuple[str, str, int]]:
    """Yield name in Inductor's code, short name and position among results of what is stored."""
    names = _states_by_input(rewritten)
    model = rewritten.members[0]
    for _, at, new in model.states:
        yield model.inputs[at].name, names[at], model.outputs.index(new)
    lows = [(i, j) for i in rewritten.storages for j in range(len(rewritten.residuals(i)))]
    for k, (i, j) in enumerate(lows):
        argument = f"{model.inputs[model.states[i][1]].name}_lo{j or ''}"
        yield argument, names[len(model.inputs) + k], len(model.outputs) + k


def _storing_lines(code: str, argument: str) -> list[int]:
    """Return the lines of Inductor's code, counted from 1, that store an argument of its graph.

    A kernel stores to its pointers; which argument each is can be read off the call.
    """
    lines = code.splitlines()
    found = []
    for call in _CALL.finditer(code):
        arguments = [a.strip() for a in call[2].split(",")]
        places = [i for i, a in enumerate(arguments) if a == argument]
        start = next((i for i, t in enumerate(lines) if t.startswith(f"{call[1]} = ")), None)
        if start is None or not places:
            continue
        ends = (i for i in range(start + 1, len(lines)) if lines[i].startswith("'''"))
        end = next(ends, len(lines))
        for pointer in _pointers("\n".join(lines[start:end]), call[1], places):
            store = re.compile(rf"store\({pointer}\b|\b{pointer}\[[^=]*\] = ")
            found += [i + 1 for i in range(start, end) if store.search(lines[i])]
    return found


def _pointers(source: str, name: str, places: list[int]) -> list[str]:
    """Return the parameters of a kernel, of those at these places, that it stores to."""
    head = re.search(rf"(?:void\s+kernel|def {name})\((.*?)\)", source, re.DOTALL)
    parameters = head[1].split(",") if head else []
    words = (_POINTER.search(parameters[i]) for i in places if i < len(parameters))
    return [word[0] for word in words if word]
