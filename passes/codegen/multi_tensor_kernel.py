"""One kernel for all members of a class: `collage::multi_tensor`.

Inductor unrolls an optimizer step: it generates and compiles a kernel for each parameter, though
they all do the same. A class is compiled once instead, for tensors of one dimension and any size,
and run over its members, each as one flat walk over its memory: on a CPU by a loop in C++ around a
kernel of our own, or Inductor's where that has no text, on a GPU by one launch of a Triton
kernel.
"""

import functools
import hashlib
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from collage_fx.passes.analysis.plan import flat, in_order
from collage_fx.passes.codegen import kernel_cache
from collage_fx.passes.codegen.inductor_kernel import compile_by_inductor
from collage_fx.passes.codegen.inductor_lowering import region_graph, register_region
from collage_fx.passes.codegen.printers.cpp_kernel import (
    Unprintable,
    names_in_cpp,
    print_cpp_kernel,
)
from collage_fx.passes.codegen.printers.triton_kernel import print_triton_kernel
from collage_fx.passes.codegen.rounding_probe import check_roundings
from collage_fx.passes.codegen.scalar_kernel import Scalars, only_taken_by
from collage_fx.passes.ir.graph_memory import base_of, with_memory
from collage_fx.passes.ir.program import (
    Program,
    Rewritten,
    Settings,
    Slice,
    graph_of,
    other_outputs,
    value_of,
)
from collage_fx.runtime import logs, progress
from collage_fx.runtime.kernels.argument_table import (
    Column,
    Runner,
    check_sizes,
    device_of,
    some_of,
)
from collage_fx.runtime.kernels.cpp_loop import compile_loop
from collage_fx.runtime.kernels.triton_launch import Launch
from collage_fx.runtime.storage import changed_bits, nibbles

MEMBERS = 8
"""Members from which on a class on a GPU has one kernel, where the user leaves the choice."""
MULTI_TENSOR_KERNELS: dict[str, "MultiTensorKernel"] = {}
T = TypeVar("T")


def least_members(settings: Settings, device: torch.device) -> int:
    """Return the least number of members for which a class on a device gets our own kernel.

    On a CPU one is enough: Inductor rounds element by element there, and takes longer to compile.
    On a GPU its kernels do as well, and CUDA graphs can hold them.
    """
    return MEMBERS if settings.multi_tensor == "auto" and device.type != "cpu" else 1


_LIBRARY = torch.library.Library("collage", "FRAGMENT")
_LIBRARY.define(
    "multi_tensor(Tensor(a!)[] written, Tensor[] read, Tensor(b!)[] vectors, int[] starts, str key)"
    " -> ()",
    # Inductor's CUDA graphs leave it out: it is one launch, whose table of addresses they would
    # have in their own memory, and a copy of each gradient in a place that stays the same.
    tags=(torch.Tag.cudagraph_unsafe,),
)


@dataclass(eq=False)
class MultiTensorKernel:
    """Kernel for the members of a class, compiled for a kind of device when it first runs there."""

    region: str
    """The key of the lowered graph among the regions."""
    dtypes: list[torch.dtype]
    scalar: list[bool]
    """Flag of each input of the lowered graph: True if it is one number for all elements."""
    written: list[int]
    """The inputs that are overwritten."""
    results: list[int]
    """Position of the result that each of them gets, then each vector that is made."""
    vectors: list[int]
    """The inputs of which there is one vector for all members: given, or made here."""
    runners: dict[str, Runner] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    """Kind of device -> the source of what runs there."""
    single: bool = False
    """True if each member has one element: the 0-d work of a class."""
    position: int | None = None
    """The input that is the position of each element, of which a member gives that of its first."""
    packed: dict[int, int] = field(default_factory=dict)
    """Input of which memory holds several elements to a byte -> the bits of one."""
    by_inductor: str = ""
    """Reason why the kernel for a CPU is Inductor's; empty if it is ours."""
    made_in: Any = field(default_factory=logs.compilation)
    """Dynamo's number of the compilation that has made it: it is compiled later."""

    @functools.cached_property
    def key(self) -> str:
        """The name of it, by what is compiled of it."""
        return hashlib.sha256(self.text().encode()).hexdigest()[:16]

    @functools.cached_property
    def read(self) -> list[int]:
        """The inputs that are only read, and of which each member has its own."""
        others = {*self.written, *self.vectors, self.position}
        return [i for i in range(len(self.dtypes)) if i not in others]

    @property
    def stored(self) -> list[int]:
        """The inputs that get the results."""
        return [*self.written, *self.vectors][: len(self.results)]

    def bits(self, i: int) -> int:
        """Return the bits from one element of an input to the next, 0 for a number."""
        if self.scalar[i]:
            return 0
        if i == self.position:  # it goes up by one, as an address does after 8 bits
            return 8
        return self.packed.get(i) or 8 * self.dtypes[i].itemsize

    @property
    def full(self) -> list[int]:
        """The inputs, no vectors, of which a member has a tensor of its own size."""
        own = [*self.written, *self.read]
        return [i for i in own if not (self.scalar[i] or i in self.packed)]

    def columns(self, written: Sequence[T], read: Sequence[T]) -> dict[int, Sequence[T]]:
        """Return, for each input that is no vector, those of all members."""
        wide, narrow = len(self.written), len(self.read)
        found = {i: written[k::wide] for k, i in enumerate(self.written)}
        return found | {i: read[k::narrow] for k, i in enumerate(self.read)}

    def runner(self, device: torch.device) -> Runner:
        """Return the runner that updates members on a device."""
        if device.type not in self.runners:
            with progress.work(lambda: "compiling", progress.counted("kernel")):
                self.runners[device.type] = self._made_for(device)
        return self.runners[device.type]

    def _made_for(self, device: torch.device) -> Runner:
        start = time.perf_counter()
        runner: Runner
        if device.type == "cpu":
            runner, how = self._kept_or_compiled()
        else:
            check_roundings(device, "printed for Triton", _run_probe)
            runner, how = self.launch(), "printed for Triton"
        took = time.perf_counter() - start
        logs.LOG.info("kernel %s for %s: %s, %.2f s", self.key, device.type, how, took)
        self.show()
        return runner

    def show(self) -> None:
        """Log what has been generated of it."""
        for source in self.sources.values():
            logs.show(logs.CODE, f"kernel {self.key}", functools.partial(str, source), self.made_in)

    def launch(self) -> Launch:
        """Return the launch of the kernel on a GPU."""
        return Launch(self.triton(), self.numbers)

    @property
    def numbers(self) -> list[bool]:
        """Flag of each input: True if it is a number for each member, as the first position is."""
        return [one or i == self.position for i, one in enumerate(self.scalar)]

    def triton(self) -> str:
        """Return the source of the Triton kernel."""
        if "cuda" not in self.sources:
            operands = (self.region, self.dtypes, self.scalar, self.stored, self.results)
            self.sources["cuda"] = print_triton_kernel(*operands, self.position, self.packed)
        return self.sources["cuda"]

    def _kept_or_compiled(self) -> tuple[Runner, str]:
        """Return the compiled kernel for a CPU, from another process if there is one, and which."""
        place = kernel_cache.path_of(self.text())
        found = kernel_cache.load(place)
        if found is None:
            runner, source, self.by_inductor = compile_for_cpu(self)
            kernel_cache.save(place, runner, source, self.by_inductor)
            how = f"compiled by Inductor: {self.by_inductor}" if self.by_inductor else "compiled"
        else:
            runner, source, self.by_inductor = found
            how = "from the cache on disk"
        self.sources["cpu"] = source
        return runner, how

    def text(self) -> str:
        """Return the text that determines all that is compiled of it."""
        order = (self.scalar, self.written, self.results, self.vectors, self.single)
        return repr((self.region, self.dtypes, *order, self.position, self.packed))

    def run(self, columns: list[Column], sizes: list[int]) -> None:
        """Update members; see `Runner.run`. Those without elements are left out."""
        if not all(sizes):
            inside = [m for m, size in enumerate(sizes) if size]
            columns = [some_of(column, inside) for column in columns]
            sizes = [sizes[m] for m in inside]
        if sizes:
            device = device_of(columns[self.scalar.index(False)])
            self.runner(device).run(columns, sizes)


def show_code(program: Program, source_code: str) -> None:
    """Log the code of a graph: Inductor's, and the kernels that an earlier graph has compiled.

    The others are logged when they are compiled, at the first call.
    """
    if source_code:
        logs.show(logs.CODE, "output code", lambda: source_code)
    known = (MULTI_TENSOR_KERNELS.get(r.multi_tensor) for r in program.rewritten)
    for kernel in dict.fromkeys(known):
        if kernel is not None:
            kernel.show()


def compile_for_cpu(kernel: MultiTensorKernel) -> tuple[Runner, str, str]:
    """Return the runner of a kernel on a CPU, its source, and why that is Inductor's if it is.

    Raises RoundingsLost where the compiler leaves out roundings.
    """
    check_roundings(torch.device("cpu"), "printed in C++", _run_probe)
    return _compiled_for_cpu(kernel)


def _compiled_for_cpu(kernel: MultiTensorKernel) -> tuple[Runner, str, str]:
    try:
        source, order = print_cpp_kernel(
            region_graph(kernel.region),
            kernel.scalar,
            kernel.stored,
            kernel.results,
            kernel.position,
            kernel.packed,
            single=kernel.single,
        )
    except Unprintable as why:
        operands = (kernel.region, kernel.dtypes, kernel.scalar, kernel.stored, kernel.results)
        return *compile_by_inductor(*operands), str(why)
    return compile_loop(source, order, list(map(kernel.bits, order))), source, ""


def _run_probe(lowered: Graph, given: list[Tensor]) -> list[Tensor]:
    """Compile a lowered graph as a kernel over members; return its results for operands."""
    outputs: Any = lowered.output_node().args[0]
    dtypes = [n.meta["dtype"] for n in outputs]
    graph = with_memory(lowered, dtypes)
    made = [torch.empty_like(given[0], dtype=dtype) for dtype in dtypes]
    every = [*given, *made]
    region = register_region(GraphModule(torch.nn.Module(), graph))
    written = range(len(given), len(every))
    results, scalar = [*range(len(made))], [False] * len(every)
    kernel = MultiTensorKernel(region, [x.dtype for x in every], scalar, [*written], results, [])
    on_cpu = given[0].device.type == "cpu"
    runner = _compiled_for_cpu(kernel)[0] if on_cpu else kernel.launch()
    runner.run([[x] for x in every], [given[0].numel()])
    return made


def register_multi_tensor(rewritten: Rewritten, vectors: Sequence[int] = ()) -> str:
    """Return the key under which collage::multi_tensor finds what to do to the members of a class.

    Args:
        rewritten: the class.
        vectors: the 0-d inputs that come as one vector for all members.
    """
    part, residuals = rewritten.members[0], rewritten.residual_count
    by_chance = bool(rewritten.by_chance)
    new = other_outputs(part)
    lows = len(part.inputs)
    at = lows + residuals + by_chance  # of positions, after the seed
    memory = at + by_chance
    written = [at for _, at, _ in part.states]
    written += [*range(lows, lows + residuals), *range(memory, memory + len(new))]
    results = [part.outputs.index(value) for _, _, value in part.states]
    results += range(len(part.outputs), len(part.outputs) + residuals)
    results += map(part.outputs.index, new)
    scalar = [value_of(n).dim() == 0 for n in part.inputs] + [False] * residuals
    scalar += [True] * by_chance + [False] * (by_chance + len(new))
    position = at if by_chance else None
    storages = enumerate(rewritten.residual_storages, lows)
    packed = {
        k: changed_bits.BITS if storage is None else nibbles.BITS
        for k, (_, storage) in storages
        if storage is None or storage.packed
    }
    lowered = graph_of(rewritten.lowered)
    operands = (lowered, new, scalar, written, results, list(vectors))
    return _register(*operands, position=position, packed=packed)


def register_scalar_kernel(scalars: Scalars) -> str:
    """Return the key under which collage::multi_tensor finds the 0-d work of a class."""
    part, new = scalars.members[0], other_outputs(scalars.members[0])
    written = [at for _, at, _ in part.states]
    results = [part.outputs.index(node) for node in [*(n for _, _, n in part.states), *new]]
    vectors = range(len(part.inputs), len(part.inputs) + len(new))
    scalar = [False] * (len(part.inputs) + len(new))
    return _register(scalars.lowered, new, scalar, written, results, list(vectors), single=True)


def _register(
    lowered: GraphModule,
    new: list[Node],
    scalar: list[bool],
    written: list[int],
    results: list[int],
    vectors: list[int],
    *,
    single: bool = False,
    position: int | None = None,
    packed: dict[int, int] | None = None,
) -> str:
    graph = with_memory(lowered.graph, (value_of(n).dtype for n in new))
    dtypes = [n.meta["dtype"] for n in graph.find_nodes(op="placeholder")]
    region = register_region(GraphModule(torch.nn.Module(), graph))
    operands = (region, dtypes, scalar, written, results, vectors)
    kernel = MultiTensorKernel(*operands, single=single, position=position, packed=packed or {})
    if kernel.key not in MULTI_TENSOR_KERNELS:
        MULTI_TENSOR_KERNELS[kernel.key] = kernel
        progress.expect("kernel")
    return kernel.key


def obstacle(rewritten: Rewritten, settings: Settings) -> str:
    """Return the reason why the members of a class are not updated together; empty if they are.

    They must do nothing but update their states and make results of the graph, each in one flat
    walk over its memory. What else reads their states is `conflicts`' affair.
    """
    members = rewritten.members
    if not all(only_taken_by(m, m, or_returned=True) for m in members):
        return "the graph goes on with what a member computes"
    if not all(flat(m) for m in members):
        return "the tensors of a member differ in shape or strides, or are not dense"
    states = (c for m in members for c, _, _ in m.states)
    if rewritten.by_chance and any(in_order(c) is None for c in states):
        return "the elements of a member do not lie in order"
    values = [value_of(n) for m in members for n in m.inputs]
    devices = {v.device for v in values if v.dim()}
    scalars = {v.device for v in values if not v.dim()}
    if len(devices) > 1 or not scalars <= devices | {torch.device("cpu")}:  # a launch brings those
        return "the members are not on one device"
    device = devices.pop()
    least = least_members(settings, device)
    if rewritten.count < least:
        return f"fewer than {least} members"
    return unreachable(device) or _uncounted(rewritten, device)


def _uncounted(rewritten: Rewritten, device: torch.device) -> str:
    """Return the reason why Inductor's kernel has to do, which counts no elements of a class."""
    why = unprintable(rewritten, device) if rewritten.by_chance else ""
    return f"positions are counted in kernels of our own only: {why}" if why else ""


def unprintable(rewritten: Rewritten, device: torch.device) -> str:
    """Return the reason why a class has no kernel of our own on a CPU; empty if it has."""
    if device.type != "cpu":
        return ""
    graph = graph_of(rewritten.lowered).graph
    try:  # whether an input is 0-d or not makes no difference to what can be printed
        names_in_cpp(graph, [False for _ in graph.find_nodes(op="placeholder")])
    except Unprintable as why:
        return str(why)
    return ""


def unreachable(device: torch.device) -> str:
    """Return the reason why a device has no kernels over many members; empty if it has."""
    if device.type == "cpu":
        return ""
    if device.type != "cuda":
        return f"a kernel over many members is for CPUs and CUDA devices, not for {device.type}"
    able = find_spec("triton") and torch.cuda.get_device_capability(device) >= (7, 0)
    return "" if able else "Triton cannot be used: not installed, or too old a GPU"


Readers: TypeAlias = dict[Node, list[tuple[Node, bool]]]


def readers_of(graph: Graph) -> Readers:
    """Return the readers of each tensor of a graph, and whether they read by way of a view."""
    readers: Readers = {}
    for node in graph.nodes:
        for operand in node.all_input_nodes:
            base = base_of(operand)
            readers.setdefault(base, []).append((node, operand is not base))
    return readers


def conflicts(readers: Readers, parts: Sequence[Slice]) -> set[Slice]:
    """Return the parts of which a state is read by another part, or by way of a view.

    Such a reader would see the new value instead of the old one, or the other way round, depending
    on which part runs first. What is in no part runs before all of them.
    """
    where = {node: part for part in parts for node in part.nodes}

    def conflicting(part: Slice, state: Node) -> bool:
        return any(
            where.get(node, part) is not part or (viewed and (node in where or node.op == "output"))
            for node, viewed in readers[state]
        )

    return {p for p in parts if any(conflicting(p, p.inputs[at]) for _, at, _ in p.states)}


def run_multi_tensor(
    written: list[Tensor],
    read: list[Tensor],
    vectors: list[Tensor],
    starts: Sequence[int],
    key: str,
) -> None:
    """Update all members of a class: the operation `collage::multi_tensor`.

    Args:
        written: the tensors that are overwritten, those of a member one after the other.
        read: the others that each member has of its own, likewise.
        vectors: with one element for each member; read by `register_multi_tensor`, made by
            `register_scalar_kernel`.
        starts: for each member the position of its first element, if the kernel takes positions.
        key: what the two return.
    """
    kernel = MULTI_TENSOR_KERNELS[key]
    given = kernel.columns(written, read)
    columns: dict[int, Column] = {**given}
    columns |= dict(zip(kernel.vectors, vectors, strict=True))
    if kernel.position is not None:
        columns[kernel.position] = array("q", starts)
    sizes = [t.numel() for t in given[kernel.full[0]]]
    kernel.run([columns[i] for i in range(len(columns))], sizes)


def _run_checked(
    written: list[Tensor],
    read: list[Tensor],
    vectors: list[Tensor],
    starts: Sequence[int],
    key: str,
) -> None:
    kernel = MULTI_TENSOR_KERNELS[key]
    columns = kernel.columns(written, read)
    check_sizes([t.numel() for t in columns[i]] for i in kernel.full)
    run_multi_tensor(written, read, vectors, starts, key)


_LIBRARY.impl("multi_tensor", _run_checked, "CompositeExplicitAutograd")
_LIBRARY.impl("multi_tensor", lambda *_: None, "Meta")
