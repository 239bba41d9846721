"""A kernel over the members of a class on a CPU as Inductor makes it.

For what `printers/cpp_kernel.py` has no text for: exponentials and the like, fp8.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from collage_fx.passes.codegen import inductor_compile
from collage_fx.passes.ir.program import value_of
from collage_fx.runtime.kernels.argument_table import Column, Runner
from collage_fx.runtime.kernels.cpp_loop import loop_over
from collage_fx.runtime.ops import collage
from collage_fx.runtime.torch_private import (
    TracingContext,
    _disable_current_modes,
    inductor_config,
    tracing,
)

_SAMPLE = 96
"""A size to trace with; it stands for any."""


def compile_by_inductor(
    region: str,
    dtypes: Sequence[torch.dtype],
    scalar: Sequence[bool],
    stored: Sequence[int],
    results: Sequence[int],
) -> tuple[Runner, str]:
    """Return a kernel over members of any size, and its source.

    The arguments are those of `print_triton_kernel`.
    """

    def step(*inputs: Tensor) -> tuple[()]:
        new = collage.region.default(list(inputs), region)
        for i, result in zip(stored, results, strict=True):
            inputs[i].copy_(new[result])
        return ()

    with _disable_current_modes(), torch.no_grad():
        samples = [
            torch.zeros(() if one else (_SAMPLE,), dtype=dtype, device="cpu")
            for dtype, one in zip(dtypes, scalar, strict=True)
        ]
        graph = make_fx(step, tracing_mode="symbolic")(*samples)
        graph.shape_env = None  # what Inductor cannot have in the key of its cache
        fakes = _with_size(graph, list(scalar).index(False))
        # Without assertions on sizes no tensor needs to be flat: the kernel takes addresses.
        # Inductor's cache of graphs keeps none without a context.
        context = tracing(TracingContext(inductor_compile.fake_mode_of(fakes)))
        with inductor_config.patch(size_asserts=False), context:
            compiled: Any = inductor_compile.compile_functional(graph, fakes)
        source: str = getattr(compiled, "source_code", "")
        function = getattr(compiled, "current_callable", None) or compiled
        return loop_over(function, _SAMPLE, samples) or CallPerMember(function, scalar), source


def _with_size(graph: GraphModule, first: int) -> list[Any]:
    """Make the number of elements the first input of a graph; return what stands for its inputs.

    Dynamo hands its graphs over like this. Left to find the number in the size of a tensor,
    Inductor does so in any case before torch 2.14, later only where it asserts those sizes.

    Args:
        graph: a graph with symbolic sizes.
        first: an input with so many elements.
    """
    inputs = graph.graph.find_nodes(op="placeholder")
    with graph.graph.inserting_before(inputs[0]):
        size = graph.graph.placeholder("size")
    size.meta["val"] = value_of(inputs[first]).shape[0]
    graph.recompile()
    return [n.meta["val"] for n in (size, *inputs)]


@dataclass
class CallPerMember:
    """A compiled function, called for each member: where there is no loop over its kernel."""

    function: Callable[[list[Any]], Any]
    """Function of the number of elements and the tensors."""
    scalar: Sequence[bool]
    """Flag of each input: True if it is one number for all elements; the others are taken flat."""

    def run(self, columns: Sequence[Column], sizes: Sequence[int]) -> None:
        """Update all members; see `Runner.run`."""
        with _disable_current_modes():  # as for a kernel of our own
            for m, size in enumerate(sizes):
                row: list[Any] = [column[m] for column in columns]
                pairs = zip(row, self.scalar, strict=True)
                self.function(
                    [size, *(x if one else x.as_strided((size,), (1,)) for x, one in pairs)]
                )
