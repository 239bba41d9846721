"""The Triton kernel of a class run on CPU tensors by Triton's interpreter; see test_kernel.py."""

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from graphs import differing
from kernel_memory import columns_of, cut
from kernels import (
    CASES,
    Case,
    captured,
    kernel_of,
    misaligned,
    repaired_interpreter,
    rewritten,
    without_roundings,
)
from torch import Tensor
from torch.fx import Node
from torch.utils._python_dispatch import TorchDispatchMode
from virtual_gpu import inductor, on_gpu, virtual_gpu

from collage_fx.passes.codegen.inductor_lowering import _run
from collage_fx.passes.ir.program import Rewritten, graph_of
from collage_fx.runtime.expansion.eft import FP8, LOW_PRECISION, WIDER
from collage_fx.runtime.expansion.stochastic import seed_of
from collage_fx.runtime.kernels.left_out import left_out_if
from collage_fx.runtime.kernels.triton_launch import BLOCK, CHUNKS, Launch
from collage_fx.runtime.storage.positions import positions

pytestmark = pytest.mark.kernels

SIZES = (1, BLOCK - 1, BLOCK, CHUNKS[0], 5, CHUNKS[0] + BLOCK + 3)


class RoundedOnce(TorchDispatchMode):
    """Rounds roots and quotients once, to nearest, as the kernels do.

    On a CPU ATen's roots are off by an ulp at times; on a CUDA device it takes x / c, where c is a
    number or on the CPU, as x * (1 / c), which rounds twice.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.collage.region.default:
            with self:
                return _run(*args)
        if func is torch.ops.aten.sqrt.default and on_host(args[0]):
            return torch.from_numpy(np.asarray(np.sqrt(args[0].numpy())))
        if func is torch.ops.aten.div.Tensor and not isinstance(args[1], Tensor):
            return quotient(*args)
        return func(*args, **(kwargs or {}))


def on_host(x: Tensor) -> bool:
    """Return True if numpy can have the root of x, and rounds it to nearest."""
    return x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64)


def quotient(x: Tensor, number: float) -> Tensor:
    """Return x / number as a division of two tensors on the device of x, which rounds once."""
    wide = WIDER[x.dtype] if x.dtype in LOW_PRECISION else x.dtype
    divisor = torch.full((1,) * x.dim(), number, dtype=wide, device=x.device)
    return (x.to(wide) / divisor).to(x.dtype)


@pytest.fixture(autouse=True)
def _repaired() -> Iterator[None]:
    with repaired_interpreter():
        yield


def test_the_repaired_conversion_is_that_of_torch() -> None:
    halves = torch.arange(1 << 16).to(torch.int32) << 16
    ends = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
    values = (halves[:, None] | ends).view(torch.float32).flatten()
    with repaired_interpreter() as original:
        from triton.runtime.interpreter import _convert_float as convert

        def wrong(function: object) -> int:
            words = function(values.numpy(), tl.float32, tl.bfloat16, None)  # type: ignore[operator]
            ours = torch.from_numpy(words.astype(np.uint16).view(np.int16)).view(torch.bfloat16)
            return differing(ours, values.bfloat16())

        assert wrong(convert) == 0 and wrong(original) > 1000


def dtype(node: Node) -> torch.dtype:
    return node.meta["val"].dtype if "val" in node.meta else node.meta["dtype"]


def _residual(node: Node, x: Tensor) -> Tensor:
    """Return random residuals, below half an ulp of one, from random numbers of about one."""
    if dtype(node) in (*FP8, torch.float32):  # fp8 words are scaled to be as large as the first
        return (x * (0.5 if dtype(node) in FP8 else 2.0**-25)).to(dtype(node))
    if dtype(node).is_floating_point:
        return (x * 2.0 ** (-19 if node.name[-1].isdigit() else -10)).to(dtype(node))
    info = torch.iinfo(dtype(node))
    return (info.min + x * 1e4 % (info.max - info.min)).to(dtype(node))


def members_of(of_class: Rewritten, scale: float = 1.0, device: str = "cpu") -> list[list[Tensor]]:
    """Return members of several sizes, the last misaligned, with random values."""
    generator = torch.Generator().manual_seed(1)
    members = []
    for size in (*SIZES, BLOCK + 1):
        inputs = []
        for node in graph_of(of_class.expanded).graph.find_nodes(op="placeholder"):
            shape = () if node.meta["scalar"] else (size,)
            x = torch.rand(shape, generator=generator, dtype=torch.float64) + 0.5
            some = x > 1.4  # bits of changes, of which some are set
            x = _residual(node, x) if "_lo" in node.name else (x * scale).to(dtype(node))
            x = some if x.dtype is torch.bool else x
            x = positions(x) if node.name == "position" else x
            inputs.append(x.to(device))
        cut(kernel_of(of_class), inputs)
        members.append(inputs)
    members[-1] = [misaligned(x) if x.dim() else x for x in members[-1]]
    return members


def reference(of_class: Rewritten, inputs: list[Tensor]) -> None:
    """Run the graph of collage:: operations eagerly, and write the states."""
    kernel = kernel_of(of_class)
    with RoundedOnce():
        results = graph_of(of_class.expanded)(*inputs)
    for i, k in zip(kernel.written, kernel.results, strict=True):
        old, new = inputs[i], results[k]
        old.copy_(old | new if new.dtype is torch.bool else new)


def steps(of_class: Rewritten, source: str, count: int) -> list[int]:
    """Return, for each step, at how many elements the kernel differs from the reference."""
    kernel = kernel_of(of_class)
    launch = Launch(source, kernel.numbers)
    ours, theirs = members_of(of_class), members_of(of_class)
    found = []
    for step in range(count):
        sizes = [max(x.numel() for x in inputs) for inputs in ours]
        with columns_of(kernel, ours) as columns:
            launch.run(columns, sizes)
        for inputs in theirs:
            reference(of_class, inputs)
        pairs = [
            (a, b) for m, n in zip(ours, theirs, strict=True) for a, b in zip(m, n, strict=True)
        ]
        found.append(sum(differing(a, b) for a, b in pairs))
        for m, n in zip(ours, theirs, strict=True):
            for i in kernel.read:
                m[i].copy_(renewed(n[i], step))
    return found


def renewed(x: Tensor, step: int) -> Tensor:
    """Return an input that is only read, overwritten for the next step."""
    seed = not x.is_floating_point()
    return x.fill_(seed_of(0, step)) if seed else x.mul_(-0.7 if step % 3 else 1.6)


def test_a_quotient_by_a_number_is_rounded_once() -> None:
    x = torch.arange(1, 4097).float()
    exact = (x.double() / 3).float()  # of 24 bits: no double rounding at 53
    with RoundedOnce():
        assert differing(torch.div(x, 3), exact) == 0
        assert differing(torch.div(x.bfloat16(), 3), (x.bfloat16().double() / 3).bfloat16()) == 0
    assert differing(x * (1 / torch.tensor(3.0)), exact) > 100  # what CUDA computes


OFTEN = ("adamw-plus",)
STEPPED = {name: case for name, case in CASES.items() if name != "adam-e4m3fn"}
"""e5m2 takes the same way, and a longer one; in the interpreter both take their time."""
COUNT = 2
"""Steps; in the interpreter each takes its time."""


def often(cases: dict[str, Case]) -> list[Any]:
    """Return the cases, of which most are slow."""
    marks = {name: () if name in OFTEN else pytest.mark.slow for name in cases}
    return [pytest.param(case, id=name, marks=marks[name]) for name, case in cases.items()]


@pytest.mark.parametrize("case", often(STEPPED))
def test_steps_are_those_of_the_eager_reference(case: Case) -> None:
    of_class = rewritten(case)
    assert steps(of_class, kernel_of(of_class).triton(), COUNT) == [0] * COUNT


@pytest.mark.slow
@pytest.mark.parametrize("case", ["adam-e4m3fn", "adam-e5m2-mcf3"])
def test_beyond_fp8_the_kernel_does_what_eager_pytorch_does(case: str) -> None:
    """A GPU converts what is too large, and infinity, to the largest number: the controls."""
    of_class = rewritten(CASES[case])
    source = kernel_of(of_class).triton()

    def differing_after(text: str) -> int:
        (ours,) = members_of(of_class)[4:5]
        for x in ours:
            if x.dtype == torch.bfloat16:  # the gradient, and the parameter with its residuals
                x.copy_(torch.tensor([1e5, -1e5, torch.inf, torch.nan, 3.0]))
        theirs = [x.clone() for x in ours]
        Launch(text, kernel_of(of_class).scalar).run([[x] for x in ours], [5])
        reference(of_class, theirs)
        return sum(differing(a.float(), b.float()) for a, b in zip(ours, theirs, strict=True))

    assert differing_after(source) == 0
    if case == "adam-e5m2-mcf3":
        chosen = r"tl\.where\(t\d+, (t\d+), t\d+\)(\n +t\d+ = narrow)"
        for wrong in (
            re.sub(chosen, r"\1\2", source),
            re.sub(r"narrow_e5m2\((t\d+)\)", r"\1.to(tl.float8e5)", source),
        ):
            assert wrong != source and differing_after(wrong) > 0


def test_the_comparison_can_fail() -> None:
    of_class = rewritten(CASES["adamw-plus"])
    source = kernel_of(of_class).triton()
    assert sum(steps(of_class, without_roundings(source), 1)) > 1000


@pytest.mark.parametrize("case", often(CASES))
def test_a_step_that_is_left_out_changes_nothing(case: Case) -> None:
    of_class = rewritten(case)
    kernel = kernel_of(of_class)
    launch = kernel.launch()

    def after(number: float | None) -> list[Tensor]:
        """Return all operands after a step with gradients that are not finite, if that is asked."""
        members = members_of(of_class)
        for m in members if number != 0 else ():
            for i in kernel.read:
                if m[i].is_floating_point() and m[i].dim():
                    m[i].view(-1)[::2], m[i].view(-1)[1::2] = torch.inf, torch.nan
        sizes = [max(x.numel() for x in m) for m in members]
        found = contextlib.nullcontext() if number is None else left_out_if(torch.tensor(number))
        with found, columns_of(kernel, members) as columns:
            launch.run(columns, sizes)
        return [m[i] for m in members for i in kernel.written]

    before = [m[i] for m in members_of(of_class) for i in kernel.written]
    assert sum(map(differing, after(1.0), before)) == 0
    assert sum(map(differing, after(None), before)) > 1000
    theirs = members_of(of_class)
    for inputs in theirs:
        reference(of_class, inputs)
    expected = [m[i] for m in theirs for i in kernel.written]
    assert sum(map(differing, after(0.0), expected)) == 0


def steps_of_inductor(case: Case, count: int, *, rounding: bool = True) -> list[int]:
    """Return, for each step, at how many elements what Inductor emits differs from the reference.

    Args:
        case: the optimizer.
        count: of the steps.
        rounding: whether conversions to bf16 and back are left in the kernels.
    """
    captures = captured(case, ((37, 29), (5,)))
    with virtual_gpu():
        emitted = inductor(on_gpu(captures, case.settings))
    for kernel in emitted.kernels:
        kernel.source = kernel.source if rounding else without_roundings(kernel.source)
    program = captures.of(case.settings)
    graph = graph_of(program.result)
    generator = torch.Generator().manual_seed(0)
    ours = []
    for n in graph.graph.find_nodes(op="placeholder"):
        x = torch.rand(n.meta["val"].shape, generator=generator)
        ours.append(_residual(n, x) if "_lo" in n.name else x.to(dtype(n)))
    theirs = [x.clone() for x in ours]
    found = []
    for _ in range(count):
        emitted.call(list(ours))
        with RoundedOnce():
            graph(*theirs)
        found.append(sum(differing(a, b) for a, b in zip(ours, theirs, strict=True)))
    return found


LONG = {"adamw-mcf3", "adamw-ulp8", "adamw-mcf2-by-chance", "adamw-double-single"}
INDUCTOR = {name: case for name, case in STEPPED.items() if name not in LONG}
"""The arithmetic of the others is checked in the kernels of their classes, above."""


@pytest.mark.parametrize("case", often(INDUCTOR))
@pytest.mark.quick("trust-light")
def test_what_inductor_emits_takes_the_same_steps(case: Case) -> None:
    assert steps_of_inductor(case, COUNT) == [0] * COUNT


@pytest.mark.slow
def test_the_comparison_with_what_inductor_emits_can_fail() -> None:
    assert sum(steps_of_inductor(CASES["adamw-plus"], 2, rounding=False)) > 500
