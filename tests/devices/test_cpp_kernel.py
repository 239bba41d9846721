"""The C++ kernel of a class: bit for bit the eager functions, whatever the inputs are.

For passes.codegen.printers.cpp_kernel.
"""

import re
import subprocess
from subprocess import CalledProcessError
from typing import Any

import pytest
import torch
from graphs import FIRST, differing, random_inputs
from interpreter import region
from kernel_memory import columns_of, cut
from kernels import (
    CASES,
    LIBRARY,
    NO_REFERENCE,
    Case,
    Trust,
    kernel_of,
    parametrized,
    rewritten,
)
from tensors import bf16, with_grads
from torch import Tensor
from torch.fx import Graph, Node

import collage_fx
from collage_fx.passes.codegen.multi_tensor_kernel import MultiTensorKernel, compile_for_cpu
from collage_fx.passes.codegen.printers import cpp_kernel
from collage_fx.passes.codegen.printers.cpp_kernel import Unprintable, print_cpp_kernel
from collage_fx.passes.codegen.printers.exact_roundings import exact_roundings
from collage_fx.passes.ir.program import CONVERT, graph_of
from collage_fx.runtime import cpp_compiler
from collage_fx.runtime.kernels.cpp_loop import FLAGS, Loop, compile_loop
from collage_fx.runtime.ops import collage
from collage_fx.runtime.storage.positions import positions
from collage_fx.runtime.storage.registry import EXPANSIONS

aten = torch.ops.aten
pytestmark = pytest.mark.kernels

TEXT: dict[str, Any] = {"capture_output": True, "text": True}
INDUCTORS = ("adam-e4m3fn", "adam-e5m2-mcf3")
"""Cases for which no C++ is written."""
OURS = {name: case for name, case in CASES.items() if name not in (*INDUCTORS, *NO_REFERENCE)}
HALF = {
    "adamw-fp16": Case(torch.optim.AdamW, {}, "plus", 22, dtype=torch.float16),
    "adamw-fp16-ulp8": Case(torch.optim.AdamW, {}, "plus", 18, "ulp8", torch.float16),
    "adamw-fp16-ulp4": Case(torch.optim.AdamW, {}, "plus", 16, "ulp4", torch.float16),
    "adamw-fp16-sr": Case(torch.optim.AdamW, {}, "plus", 14, "sr", torch.float16),
    "adamw-fp16-by-chance": Case(
        torch.optim.AdamW, {}, "plus", 22, "mcf2", torch.float16, by_chance=True
    ),
}


def any_bits(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """A tensor of which every bit pattern is as likely as another: NaN, infinite, subnormal."""
    if dtype is torch.bool:
        return torch.rand(shape) < 0.5
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    limits = torch.iinfo(integer)
    return torch.randint(limits.min, limits.max, shape, dtype=integer).view(dtype)


def run(kernel: MultiTensorKernel, inputs: list[Tensor]) -> list[Tensor]:
    """Copies of the inputs, of which the kernel has overwritten some."""
    runner, source, why = compile_for_cpu(kernel)
    assert isinstance(runner, Loop) and not why and "#pragma omp simd" in source
    ours = [x.clone() for x in inputs]
    with columns_of(kernel, [ours]) as columns:
        runner.run(columns, [max(x.numel() for x in ours)])
    return ours


def differences(kernel: MultiTensorKernel, ours: list[Tensor], results: Any) -> int:
    pairs = zip(kernel.stored, kernel.results, strict=True)
    return sum(differing(ours[i], results[k]) for i, k in pairs)


@parametrized(OURS | HALF)
@pytest.mark.quick("adamw-mcf3", "adamw-mcf2-by-chance", "adamw-sr", "trust-in-fp32")
def test_a_printed_kernel_is_the_eager_functions_bit_for_bit(case: Case) -> None:
    """Of inputs near one by the eager functions, of any bits by the lowered graph in fp32."""
    of_class = rewritten(case)
    kernel = kernel_of(of_class)
    if case.dtype is torch.bfloat16 and case.storage in EXPANSIONS and not case.by_chance:
        # Eager roots of fp32 and fp16 are off by an ulp at times.
        inputs = random_inputs(of_class.expanded)
        expected = graph_of(of_class.expanded)(*inputs)
        assert differences(kernel, run(kernel, inputs), expected) == 0
    torch.manual_seed(0)
    shapes = [() if scalar else (4099,) for scalar in kernel.scalar]
    wild = [
        any_bits(d, s) if s else torch.rand(()).to(d)
        for d, s in zip(kernel.dtypes, shapes, strict=True)
    ]
    if kernel.position is not None:
        wild[kernel.position] = positions(wild[kernel.position], FIRST)
    cut(kernel, wild)
    ours, results = run(kernel, wild), region(wild, kernel.region)
    for i, k in zip(kernel.stored, kernel.results, strict=True):
        if kernel.dtypes[i] is torch.bool:  # bits stay set
            results[k] = results[k] | wild[i]
    assert differences(kernel, ours, results) == 0
    assert any(x.isnan().any() for x in wild) and differences(kernel, wild, ours) != 0


def test_the_comparison_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a kernel that rounds half up, where ties go to even."""
    of_class = rewritten(CASES["adamw-plus"])
    inputs = random_inputs(of_class.expanded)
    half_up = cpp_kernel.HELPERS.replace("0x7fffu + ((u >> 16) & 1u)", "0x8000u")
    assert half_up != cpp_kernel.HELPERS
    monkeypatch.setattr(cpp_kernel, "HELPERS", half_up)
    kernel = kernel_of(of_class)
    assert differences(kernel, run(kernel, inputs), graph_of(of_class.expanded)(*inputs)) > 0


def in_vectors(source: str) -> bool:
    """Return True if GCC makes vectors of the loop over the elements in the source of a kernel."""
    command = [cpp_compiler.compiler(), *cpp_compiler._FLAGS, *FLAGS, "-fopt-info-vec", "-x", "c++"]
    done = subprocess.run([*command, "-", "-o", "/dev/null"], input=source, **TEXT, check=True)
    lines = source.splitlines()
    loop = next(i for i, line in enumerate(lines, 1) if "omp simd" in line)
    said = re.findall(r"<stdin>:(\d+):\d+: optimized: loop vectorized", done.stderr)
    return bool({*range(loop, loop + 4)} & set(map(int, said)))


@pytest.mark.skipif("g++" not in cpp_compiler.compiler(), reason="other compilers say it otherwise")
@parametrized(OURS)
@pytest.mark.quick("adamw-changed")
def test_a_kernel_computes_in_vectors(case: Case) -> None:
    _, source, _ = compile_for_cpu(kernel_of(rewritten(case)))
    assert in_vectors(source)
    control = re.sub(r"(omp simd\n.*\n)", r'\1asm volatile("");\n', source)
    assert control != source and not in_vectors(control)


@parametrized({"library": LIBRARY} | {name: CASES[name] for name in INDUCTORS})
@pytest.mark.quick("library")
def test_what_has_no_text_is_inductors_and_says_why(case: Case) -> None:
    kernel = kernel_of(rewritten(case))
    _, source, why = compile_for_cpu(kernel)
    assert "cpp_fused" in source
    assert ("aten.tanh" if case is LIBRARY else "float8") in why


def test_explain_says_whose_kernel_it_is() -> None:
    texts = []
    for squash in (False, True):
        params = with_grads([bf16(5) for _ in range(9)])
        optimizer = Trust(params, squash=squash)
        step = collage_fx.compile(optimizer)
        step()
        step()
        texts.append(str(collage_fx.explain(optimizer)))
    assert "one kernel for all\n" in texts[0] and "by Inductor" not in texts[0]
    assert "one kernel for all, by Inductor: no C++ is written for aten.tanh.default" in texts[1]


def graph_of_one(target: Any, dtypes: list[torch.dtype], *numbers: Any, to: torch.dtype) -> Graph:
    """A lowered graph of one operation of tensors and numbers, which stores in its last input."""
    graph = Graph()
    inputs = []
    for k, dtype in enumerate((*dtypes, to)):
        inputs.append(graph.placeholder(f"in{k}"))
        inputs[-1].meta["dtype"] = dtype
    result = graph.call_function(target, (*inputs[:-1], *numbers))
    result.meta["dtype"] = target(*(torch.ones(2).to(d) for d in dtypes), *numbers).dtype
    graph.output((result,))
    return graph


BOOL, I32, I64, F32 = torch.bool, torch.int32, torch.int64, torch.float32


@pytest.mark.parametrize(
    ("target", "dtypes", "numbers", "to"),
    [
        (aten.lt.Scalar, [BOOL], (2,), BOOL),
        (aten.gt.Tensor, [I32, F32], (), BOOL),
        (aten.abs.default, [I64], (), I64),
        (aten.clamp_min.default, [F32], (float("nan"),), F32),
        (aten.add.Tensor, [F32], (1.0,), torch.float64),
        (aten.add.Tensor, [I32], (0.5,), I32),
    ],
)
def test_what_c_means_otherwise_is_not_printed(
    target: Any, dtypes: list[torch.dtype], numbers: tuple[Any, ...], to: torch.dtype
) -> None:
    graph = graph_of_one(target, dtypes, *numbers, to=to)
    with pytest.raises(Unprintable):
        print_cpp_kernel(graph, [False] * (len(dtypes) + 1), [len(dtypes)], [0])


def test_headers_that_compilers_take_long_to_read_are_for_functions_of_the_c_library() -> None:
    """The control: without <cmath> there is no std::exp."""
    texts = {}
    for target in (aten.sqrt.default, aten.abs.default, aten.exp.default):
        source, order = print_cpp_kernel(
            graph_of_one(target, [F32], to=F32), [False] * 2, [1], [0], libm=True
        )
        texts[target] = source
        columns = [torch.full((3,), 2.25), torch.zeros(3)]
        compile_loop(source, order, [4, 4]).run([[c] for c in columns], [3])
        assert torch.allclose(columns[1], target(columns[0]))
    long = [
        target for target, text in texts.items() if re.search("#include <(cmath|vector)>", text)
    ]
    assert long == [aten.exp.default]
    with pytest.raises(CalledProcessError):
        compile_loop(texts[aten.exp.default].replace("#include <cmath>", ""), order, [4, 4])


def test_the_nan_of_another_dtype_stays_one_where_no_rounding_is_done() -> None:
    """An fp16 NaN of any bits goes through the last step of a Fast2Sum, and is rounded to bf16."""
    graph = Graph()
    a, b, memory = (graph.placeholder(name) for name in "abm")
    a.meta["dtype"] = b.meta["dtype"] = torch.float16
    memory.meta["dtype"] = torch.bfloat16

    def append(target: Any, *args: Any, dtype: torch.dtype = F32) -> Node:
        node = graph.call_function(target, args)
        node.meta["dtype"] = dtype
        return node

    def rounded(target: Any, x: Node, y: Node) -> Node:
        return append(collage.round.default, append(target, x, y), torch.float16)

    x, y = (append(CONVERT, n, F32) for n in (a, b))
    s = rounded(aten.add.Tensor, x, y)
    t = rounded(aten.sub.Tensor, y, rounded(aten.sub.Tensor, s, x))
    graph.output((append(CONVERT, t, torch.bfloat16, dtype=torch.bfloat16),))
    assert len(exact_roundings(graph).exact) == 1
    source, order = print_cpp_kernel(graph, [False] * 3, [2], [0])
    word = torch.tensor([0x7FFF], dtype=torch.int16).view(torch.float16)
    columns = [torch.ones(1, dtype=torch.float16), word, torch.zeros(1, dtype=torch.bfloat16)]
    compile_loop(source, order, [2, 2, 2]).run([[c] for c in columns], [1])
    assert columns[2].isnan()
