"""Runs the graphs that the backend makes without a compiler: an interpreter in Inductor's place.

`without_compiler` replaces the one call of Inductor's compiler (`codegen.inductor_compile`), that
of kernels over classes (`multi_tensor_kernel.compile_for_cpu`) and that of the monitor's kernels
(`measured_kernel.compiled`; it does without them), and nothing else: Dynamo, AOTAutograd, all
passes and the binding of residuals are as always, and what came out of them is run operation by
operation by eager PyTorch.

What equality to expect, and what `test_interpreter.py` checks:

- Within collage::region, and so within each kernel over a class, every operation is one of fp32 (or
  fp64) and every rounding is written down: bit for bit as Inductor, but for functions that
  vectorized and scalar code compute differently by an ulp (exp, log, tanh, powers of tensors that
  are not 0-d, ...).
- Operations outside of them (reductions, matrix products, graphs in which nothing is compensated)
  keep 16-bit values in fp32 from one element-wise operation to the next, as Inductor does on a CPU
  in the kernels that it fuses, and round what a reduction or a matrix product makes and what is
  stored (`fused`). Where Inductor ends a kernel elsewhere both are right to a few roundings of the
  dtype; sums are added up in another order.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._dynamo import guards
from torch._inductor import config as inductor_config
from torch.autograd import _unsafe_preserve_version_counter
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate
from torch.utils._python_dispatch import _disable_current_modes

from collage_fx.passes.codegen import inductor_compile, multi_tensor_kernel
from collage_fx.passes.codegen.inductor_kernel import CallPerMember
from collage_fx.passes.codegen.inductor_lowering import _REGIONS
from collage_fx.passes.codegen.multi_tensor_kernel import MULTI_TENSOR_KERNELS, MultiTensorKernel
from collage_fx.passes.codegen.printers import measured_kernel
from collage_fx.passes.ir.program import CONVERT
from collage_fx.runtime.kernels.argument_table import Column, Runner, addresses
from collage_fx.runtime.ops import collage
from collage_fx.runtime.storage import changed_bits, nibbles
from collage_fx.runtime.storage.positions import Place, positions

aten = torch.ops.aten


@dataclass
class _Interpreted(CallPerMember):
    """A class's function, called for each member, with its positions as a tensor."""

    position: int | None = None

    def run(self, columns: Sequence[Column], sizes: Sequence[int]) -> None:
        """Update all members."""
        columns = list(columns)
        if self.position is not None:
            firsts = addresses(columns[self.position])
            each = zip(firsts, sizes, strict=True)
            with _disable_current_modes():  # as around a kernel of our own
                columns[self.position] = [
                    positions(torch.empty(n), Place(first, (1,))) for first, n in each
                ]
        super().run(columns, sizes)


@contextlib.contextmanager
def without_compiler() -> Iterator[list[GraphModule]]:
    """Interpret what is compiled while this lasts; yield the graphs that were.

    A step that was compiled inside must not be called outside: its classes have no kernels there.
    """
    found: list[GraphModule] = []

    def interpreted(gm: GraphModule, inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
        inductor_compile.keep_old_values(gm)
        found.append(gm)
        return _boxed(gm)

    def of_a_class(kernel: MultiTensorKernel) -> tuple[Runner, str, str]:
        found.append(_REGIONS[kernel.region])
        as_they_are = [one or i in kernel.packed for i, one in enumerate(kernel.scalar)]
        return _Interpreted(_member(kernel), as_they_are, kernel.position), "", ""

    original = inductor_compile.compile_functional
    runners = {k: s.runners for k, s in MULTI_TENSOR_KERNELS.items()}
    sources = {k: s.sources.get("cpu") for k, s in MULTI_TENSOR_KERNELS.items()}
    for kernel in MULTI_TENSOR_KERNELS.values():
        kernel.runners = {}
    inductor_compile.compile_functional = interpreted
    compile_for_cpu = multi_tensor_kernel.compile_for_cpu
    multi_tensor_kernel.compile_for_cpu = of_a_class
    try:
        # With its caches on, kernels of classes are loaded from disk.
        without_sums = mock.patch.object(measured_kernel, "compiled", lambda source: None)
        with inductor_config.patch(fx_graph_cache=False), without_sums:
            yield found
    finally:
        inductor_compile.compile_functional = original
        multi_tensor_kernel.compile_for_cpu = compile_for_cpu
        for key, kernel in MULTI_TENSOR_KERNELS.items():
            kernel.runners = runners.get(key, {})
            kernel.sources.pop("cpu", None)  # of what is interpreted there is none
            if source := sources.get(key):
                kernel.sources["cpu"] = source


@contextlib.contextmanager
def untimed_guards() -> Iterator[None]:
    """Let Dynamo time no guards, as it does with those of every frame, for a log."""
    with mock.patch.object(guards, "profile_guard_manager", lambda *_: 0.0, create=True):
        yield


def _boxed(gm: GraphModule) -> Callable[[list[Any]], Any]:
    """Return a graph as the boxed callable that Inductor would make of it."""
    module = _exact(fused(gm))

    def run(args: list[Any]) -> Any:
        values = list(args)
        args.clear()
        tensors = _counted(values)
        # As in a kernel: no mode sees the operations, no version is counted up.
        with (
            _writable(values),
            _disable_current_modes(),
            _unsafe_preserve_version_counter(tensors),
        ):
            return module(*values)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _writable(values: Iterable[Any]) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which these may be written, inference tensors as well."""
    inference = any(isinstance(v, Tensor) and v.is_inference() for v in values)
    return torch.inference_mode() if inference else torch.no_grad()


def _counted(values: Iterable[Any]) -> tuple[Tensor, ...]:
    """Return the tensors that count versions."""
    return tuple(v for v in values if isinstance(v, Tensor) and not v.is_inference())


def _root(x: Tensor) -> Tensor:
    """Return the correctly rounded root; eager fp32 on a CPU is off by an ulp at times."""
    return x.double().sqrt().to(x.dtype) if x.dtype == torch.float32 else x.sqrt()


KEPT = {CONVERT, aten.mean.default, aten.mean.dim, aten.var.correction}
"""Operations beside element-wise ones whose results Inductor does not round: of means and variances
it stores the sum, in fp32."""
OF_MEMORY = {aten.as_strided.default, aten.view.dtype}
"""Views of memory, for which Inductor stores what they are given."""


def fused(gm: GraphModule) -> GraphModule:
    """Return a copy of a graph that keeps 16-bit values in fp32 between operations that Inductor
    fuses: those on single elements, and on what they reduce."""
    graph, env, wide = Graph(), {}, {}  # type: ignore[var-annotated]

    def narrowed(node: Node) -> Node:
        if node not in env:
            env[node] = graph.call_function(CONVERT, (wide[node], node.meta["val"].dtype))
        return env[node]

    def widened(node: Node) -> Node:
        if not _is_16_bit(node):
            return env[node]
        if node not in wide:
            wide[node] = graph.call_function(CONVERT, (env[node], torch.float32))
        return wide[node]

    for node in gm.graph.nodes:
        tags = getattr(node.target, "tags", ())
        kept = torch.Tag.pointwise in tags or node.target in KEPT or _moves(node, wide)
        if not (kept or torch.Tag.reduction in tags) or not _computes(node):
            env[node] = graph.node_copy(node, narrowed)
            continue
        new = graph.node_copy(node, widened)
        new.args, new.kwargs = map_aggregate((new.args, new.kwargs), _in_fp32)
        if kept and _is_16_bit(node):
            wide[node] = new
        else:
            env[node] = graph.call_function(CONVERT, (new, node.meta["val"].dtype))
    return GraphModule(gm, graph)


def _moves(node: Node, wide: dict[Node, Node]) -> bool:
    """Return True if a node is a view of a value that is kept in fp32."""
    is_view = getattr(node.target, "is_view", False) and node.target not in OF_MEMORY
    return is_view and node.args[0] in wide


def _computes(node: Node) -> bool:
    """Return True if a node makes one tensor by an ATen operation that changes no operand."""
    mutable = getattr(getattr(node.target, "_schema", None), "is_mutable", True)
    return (
        isinstance(node.meta.get("val"), Tensor)
        and not mutable
        and any(map(_is_16_bit, (node, *node.all_input_nodes)))
    )


def _is_16_bit(node: Node) -> bool:
    val = node.meta.get("val")
    return isinstance(val, Tensor) and val.dtype in (torch.bfloat16, torch.float16)


def _in_fp32(a: Any) -> Any:
    is_16_bit = isinstance(a, torch.dtype) and a in (torch.bfloat16, torch.float16)
    return torch.float32 if is_16_bit else a


READY: weakref.WeakKeyDictionary[GraphModule, GraphModule] = weakref.WeakKeyDictionary()
"""Lowered graph -> the same, ready to be interpreted."""


def region(inputs: list[Tensor], key: str) -> list[Tensor]:
    lowered = _REGIONS[key]
    if lowered not in READY:
        READY[lowered] = _exact(lowered)
    return list(READY[lowered](*inputs))


def _member(kernel: MultiTensorKernel) -> Callable[[list[Any]], None]:
    """Return what updates one member of a class: see `CallPerMember`."""

    packed = kernel.packed

    def run(args: list[Any]) -> None:
        inputs = args[1:]
        words = [
            nibbles.unpacked(x, inputs[kernel.full[0]]) if packed.get(i) == nibbles.BITS else x
            for i, x in enumerate(inputs)
        ]
        with (
            _writable(inputs),
            _disable_current_modes(),
            _unsafe_preserve_version_counter(_counted(inputs)),
        ):
            results = region(words, kernel.region)
            for i, k in zip(kernel.stored, kernel.results, strict=True):
                new = results[k]
                if packed.get(i) == nibbles.BITS:
                    new = nibbles.packed(new)
                elif i in packed:
                    new = inputs[i] | changed_bits.packed(new)
                inputs[i].copy_(new)

    return run


LIKE_KERNELS: dict[Any, Callable[..., Any]] = {
    aten.sqrt.default: _root,
    aten.view.default: torch.reshape,  # values may be laid out otherwise than when it was traced
    collage.region.default: region,
}
"""Operations that eager PyTorch does otherwise than a kernel."""


def _exact(gm: GraphModule) -> GraphModule:
    """Return a copy of a graph in which those are done as a kernel does them."""
    graph = Graph()
    env: dict[Any, Any] = {}
    for node in gm.graph.nodes:
        env[node] = graph.node_copy(node, lambda n: env[n])
        if node.op == "call_function":
            env[node].target = LIKE_KERNELS.get(node.target, node.target)
    return GraphModule(gm, graph)
