"""Run the kernels of a rewritten graph without Inductor's wrapper around them.

Inductor's own time grows with the number of inputs of a graph, and a step of a thousand parameters
has ten thousand. A class needs nothing of it: its kernel is compiled once, for any number of
members. Inductor gets what is left, which is often nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from collage_fx.passes.codegen.multi_tensor_kernel import MULTI_TENSOR_KERNELS, run_multi_tensor
from collage_fx.passes.frontend.slice import elementwise
from collage_fx.passes.ir.graph_memory import base_of
from collage_fx.passes.ir.program import CONVERT, LOW_PRECISION, is_scalar, is_tensor, value_of
from collage_fx.runtime.kernels.argument_table import check_sizes
from collage_fx.runtime.ops import collage
from collage_fx.runtime.residuals.memory import empty_as
from collage_fx.runtime.torch_private import _disable_current_modes

aten = torch.ops.aten
_FILLED = (aten.full.default, aten.scalar_tensor.default)
_FEW = 32
"""Operations on numbers that eager PyTorch does between two kernels; each takes 2 us."""


@dataclass
class KernelCall:
    """One call of a kernel: where its operands are among the values of a run."""

    operands: list[list[int]]
    key: str
    device: torch.device
    starts: list[int]
    """Position of the first element of each member, if the kernel takes positions."""
    full: list[list[int]]
    """Positions of the members' tensors, for each input of their size that is given."""

    def prepare(self, values: list[Any]) -> None:
        """Compile what runs on the device, unless that is done; raise CollageError if it must not.

        Args:
            values: the inputs of the graph, and memory.
        """
        MULTI_TENSOR_KERNELS[self.key].runner(self.device)
        check_sizes([values[i].numel() for i in column] for column in self.full)

    def run(self, values: list[Any]) -> None:
        """Update all members."""
        written, read, vectors = ([values[i] for i in at] for at in self.operands)
        run_multi_tensor(written, read, vectors, self.starts, self.key)


@dataclass
class Direct:
    """A rewritten graph as what Inductor compiles of it, and the kernels after that."""

    rest: GraphModule | None
    """Graph for Inductor: takes some inputs, returns what the kernels need and the other results.
    None if nothing is left for Inductor."""
    inputs: list[int]
    """Positions of the graph's inputs that `rest` takes."""
    memory: list[Tensor]
    """Fake tensors of what the kernels make: shape, strides, dtype and device of its memory."""
    constants: list[Any]
    """Results that are no tensors."""
    calls: list[KernelCall]
    results: list[int]
    """Operands and results are numbered: inputs of the graph, memory, constants, what `rest`
    makes."""
    first_made: int
    """The number of the first of these."""
    compiled: Callable[[list[Any]], Any] | None = None
    """The boxed callable of `rest`, once that is compiled, if it has to be."""

    def bind(self, rest: Callable[[list[Any]], Any] | None) -> Callable[[list[Any]], Any]:
        """Return the boxed callable of the whole graph, given that of `rest`."""
        self.compiled = rest

        def run(args: list[Any]) -> Any:
            values = [*args, *self.allocate()]
            args.clear()
            for call in self.calls:
                call.prepare(values)  # before anything is written
            values += [*self.constants, *self.make(values)]
            for call in self.calls:
                call.run(values)
            return [values[i] for i in self.results]

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def interpreted(self) -> Callable[[list[Any]], Any]:
        """Return the boxed callable of the whole graph, without Inductor."""
        rest = None if self.rest is None else _eager(self.rest)
        return self.bind(None if rest is None else lambda values: rest(*values))

    def allocate(self) -> list[Tensor]:
        """Return memory for what the kernels make."""
        return list(map(empty_as, self.memory))

    @property
    def made(self) -> list[Node]:
        """The values that `rest` makes."""
        results: Any = self.rest.graph.output_node().args[0] if self.rest is not None else ()
        return list(results)

    @property
    def is_of_numbers(self) -> bool:
        """True if `rest` computes a few numbers of the host, such as a rate that changes, negated.

        That takes eager PyTorch some microseconds, and Inductor seconds to compile.
        """
        nodes = self.rest.graph.nodes if self.rest is not None else ()
        made = [n for n in nodes if n.op not in ("placeholder", "output")]
        return len(made) <= _FEW and all(map(_makes_number, made))

    @property
    def writes_by_kernels(self) -> bool:
        """True if the graph writes nothing but by kernels."""
        nodes = self.rest.graph.nodes if self.rest is not None else ()
        return all(n.target is not aten.copy_.default for n in nodes)

    @property
    def only_kernels(self) -> bool:
        """True if the graph writes nothing but by kernels, and returns nothing."""
        return not self.results and self.writes_by_kernels

    @property
    def may_be_left_out(self) -> bool:
        """True if `left_out` decides over all writes: they are done by kernels on a GPU."""
        return self.only_kernels and all(call.device.type != "cpu" for call in self.calls)

    def make(self, values: Sequence[Any] | dict[int, Any]) -> list[Any]:
        """Return the results of `rest` for the graph's inputs."""
        if self.compiled is None:
            return []
        # As AOTAutograd calls it, which a bound graph does without: libraries write `out=`.
        with torch.no_grad():
            return list(self.compiled([values[i] for i in self.inputs]))


def _makes_number(node: Node) -> bool:
    """Return True if a node computes a number on the host of others there, without drawing it."""
    if not all(map(_is_number, (node, *node.all_input_nodes))):
        return False
    if not is_tensor(node):
        return node.op == "call_function"
    if node.target in _FILLED:
        return True
    schema = getattr(node.target, "_schema", None)
    # What is returned may become a state, which is written: it has to be new in each call.
    new = schema is not None and all(r.alias_info is None for r in schema.returns)
    return new and elementwise(node) and value_of(node).dtype not in LOW_PRECISION


def _is_number(node: Node) -> bool:
    """Return True if the value of a node is a 0-d tensor on the CPU, or a number of Python."""
    if is_scalar(node):
        return value_of(node).device.type == "cpu"
    return isinstance(node.meta["val"], torch.SymInt | torch.SymFloat | torch.SymBool)


def _eager(gm: GraphModule) -> GraphModule:
    """Return a graph of numbers as eager PyTorch does it soonest: its constants are made once."""
    graph, made = Graph(), dict[str, Tensor]()
    env: dict[Node, Node] = {}
    output = gm.graph.output_node()
    for node in gm.graph.nodes:
        if node.target in _FILLED and not node.all_input_nodes and output not in node.users:
            with torch.inference_mode(False), _disable_current_modes():
                made[node.name] = node.target(*node.args, **node.kwargs)
            env[node] = graph.get_attr(node.name)
        elif node.target is CONVERT:  # it is done in Python
            x, dtype = node.args
            env[node] = graph.call_function(aten._to_copy.default, (env[x],), {"dtype": dtype})
        else:
            env[node] = graph.node_copy(node, lambda n: env[n])
    return GraphModule(made, graph)


def kernels_in(gm: GraphModule) -> list[tuple[str, torch.device]]:
    """Return the keys of the kernels of classes in a graph, with the devices that they run on."""
    calls = gm.graph.find_nodes(op="call_function", target=collage.multi_tensor.default)
    return [(str(n.args[-1]), value_of(n.all_input_nodes[0]).device) for n in calls]


def split(gm: GraphModule) -> Direct | None:
    """Take the kernels out of a rewritten graph; None if there are none, or they cannot be last."""
    placeholders = list(gm.graph.find_nodes(op="placeholder"))
    output = gm.graph.output_node()
    kernels = [n for n in gm.graph.nodes if n.target is collage.multi_tensor.default]
    operands = dict.fromkeys(a for n in kernels for a in n.all_input_nodes)
    bases = {base_of(n) for n in operands}
    copies = [n for n in gm.graph.nodes if n.target is aten.copy_.default]
    if not kernels or any(base_of(n.args[0]) in bases for n in copies):
        return None  # a kernel reads the old value of a state that the rest overwrites
    ends = {*kernels, output}
    memory = [
        n for n in operands if n.target is aten.empty_strided.default and set(n.users) <= ends
    ]
    others = {*placeholders, *memory, *kernels}
    made = [n for n in operands | dict.fromkeys(output.all_input_nodes) if n not in others]
    results: Any = output.args[0]
    constants = [n for n in results if not isinstance(n, Node)]
    number = {n: i for i, n in enumerate([*placeholders, *memory])}
    first = len(number) + len(constants)
    number |= {n: first + i for i, n in enumerate(made)}
    places = iter(range(first - len(constants), first))
    rest, inputs = _rest(gm, placeholders, others, made)
    return Direct(
        rest,
        inputs,
        [value_of(n) for n in memory],
        constants,
        [_call(n, number, first) for n in kernels],
        [number[n] if isinstance(n, Node) else next(places) for n in results],
        first,
    )


def _call(node: Node, number: dict[Node, int], first_made: int) -> KernelCall:
    args: Any = node.args
    *operands, starts, key = args
    device = value_of(node.all_input_nodes[0]).device
    numbers = [[number[n] for n in nodes] for nodes in operands]
    kernel = MULTI_TENSOR_KERNELS[key]
    columns = kernel.columns(numbers[0], numbers[1])
    full = [list(columns[i]) for i in kernel.full if max(columns[i]) < first_made]
    return KernelCall(numbers, key, device, list(starts), full)


def _rest(
    gm: GraphModule, placeholders: list[Node], others: set[Node], made: list[Node]
) -> tuple[GraphModule | None, list[int]]:
    """Return the rest of a graph, which makes these values, and which inputs it takes."""
    kept = {n for n in gm.graph.nodes if n.op != "output" and n not in others}
    if not kept:
        return None, []
    taken = {a for n in kept for a in n.all_input_nodes} | kept
    graph = Graph()
    env: dict[Node, Node] = {}
    for node in gm.graph.nodes:
        if node in taken:
            env[node] = graph.node_copy(node, lambda n: env[n])
    graph.output(tuple(env[n] for n in made))
    graph.output_node().meta = {"user_visible_output_idxs": list(range(len(made)))}
    return GraphModule(gm, graph), [i for i, n in enumerate(placeholders) if n in taken]
