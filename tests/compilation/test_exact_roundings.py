"""Roundings that our C++ kernels leave out change nothing: of all pairs of 16-bit numbers.

The functions that round are those of the kernels; what they do is compared with PyTorch's.

For passes.codegen.printers.exact_roundings and runtime.kernels.cpp_helpers.
"""

import ctypes
from typing import Any

import pytest
import torch
from floats import differing
from kernels import CASES, rewritten
from torch import Tensor

import collage_fx
from collage_fx.passes.codegen.multi_tensor_kernel import MULTI_TENSOR_KERNELS
from collage_fx.passes.codegen.printers.exact_roundings import OVERFLOW, exact_roundings
from collage_fx.passes.ir.program import graph_of
from collage_fx.runtime import cpp_compiler
from collage_fx.runtime.expansion.eft import fast_two_sum, two_sum
from collage_fx.runtime.kernels.cpp_helpers import HELPERS
from collage_fx.runtime.kernels.cpp_loop import FLAGS
from collage_fx.runtime.ops import collage
from collage_fx.runtime.storage.layouts import split_remainder16

HALVES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
_SOURCE = """
static inline bool differ(float x, float y) {{
  return (bits<uint32_t>(x) != bits<uint32_t>(y)) & !((x != x) & (y != y));
}}

// Over all b and count words a from first on: how often 2Sum and Fast2Sum differ from those with
// all roundings; so for the controls, 2Sum with s not rounded, Fast2Sum with s - a not rounded.
extern "C" void pairs(int64_t first, int64_t count, int64_t* differing) {{
  int64_t n0 = 0, n1 = 0, n2 = 0, n3 = 0;
  for (int64_t i = first; i < first + count; ++i) {{
    const float a = plain_nan(widen_{half}(uint16_t(i)));
    #pragma omp simd reduction(+:n0, n1, n2, n3)
    for (int32_t j = 0; j < 65536; ++j) {{
      const float b = plain_nan(widen_{half}(uint16_t(j)));
      const float s = round_{half}(a + b);
      const float a_part = round_{half}(s - b), b_part = round_{half}(s - a_part);
      const float t = round_{half}(round_{half}(a - a_part) + round_{half}(b - b_part));
      const float a_exact = s - b, b_exact = s - a_exact;
      const float t_exact = (a - a_exact) + (b - b_exact);
      n0 += differ(t, absolute(a_exact) < {overflow}f ? t_exact : NAN);
      n1 += differ(t, (a - ((a + b) - b)) + (b - ((a + b) - ((a + b) - b))));
      const float z = round_{half}(s - a), fast = round_{half}(b - z);
      n2 += differ(fast, b - z);
      n3 += differ(fast, b - (s - a));
    }}
  }}
  differing[0] += n0, differing[1] += n1, differing[2] += n2, differing[3] += n3;
}}

extern "C" void words(const float* x, uint16_t* y, float* z, int64_t count) {{
  for (int64_t i = 0; i < count; ++i) {{
    z[i] = {round}(x[i]);
    y[i] = narrow_{half}(z[i]);
  }}
}}

extern "C" void widened(float* y) {{
  for (int32_t i = 0; i < 65536; ++i) y[i] = widen_{half}(uint16_t(i));
}}
"""


def compiled(dtype: torch.dtype) -> Any:
    text = _SOURCE.format(
        half=HALVES[dtype],
        round="round_any_bf16" if dtype is torch.bfloat16 else "round_fp16",
        overflow=float(OVERFLOW[dtype]).hex(),
    )
    return cpp_compiler.load(HELPERS + text, FLAGS)


def pointer(x: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(x.data_ptr())


def every_word(dtype: torch.dtype) -> Tensor:
    return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", HALVES)
def test_the_kernels_convert_and_round_as_pytorch_does(dtype: torch.dtype) -> None:
    """Every 16-bit number, those around them and between them, and random bits of fp32."""
    library = compiled(dtype)
    words = every_word(dtype)
    wide = torch.empty(65536)
    library.widened(pointer(wide))
    assert differing(wide, words.float()) == 0
    bits = words.float().view(torch.int32)
    step = 1 << 15 if dtype is torch.bfloat16 else 1 << 12  # half a unit in the last place
    near = [bits + k for k in (0, 1, -1, step, step - 1, step + 1)]
    near.append(torch.randint(-(2**31), 2**31 - 1, (1 << 20,), dtype=torch.int32))
    x = torch.cat(near).view(torch.float32)
    rounded, narrow = torch.empty_like(x), torch.empty(x.shape, dtype=dtype)
    library.words(pointer(x), pointer(narrow), pointer(rounded), ctypes.c_int64(x.numel()))
    assert differing(narrow, x.to(dtype)) == differing(rounded, x.to(dtype).float()) == 0
    assert differing(x.to(dtype).float(), x) > 0  # the control


def pairs_differing(dtype: torch.dtype, words: range) -> list[int]:
    found = torch.zeros(4, dtype=torch.int64)
    arguments = (ctypes.c_int64(words.start), ctypes.c_int64(len(words)), pointer(found))
    compiled(dtype).pairs(*arguments)
    return found.tolist()


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", HALVES)
def test_roundings_within_transformations_change_nothing(dtype: torch.dtype) -> None:
    """For a near the largest number, where sums overflow, near one, and infinite or NaN."""
    largest = int(torch.tensor(torch.finfo(dtype).max, dtype=dtype).view(torch.int16))
    one = int(torch.tensor(1.0, dtype=dtype).view(torch.int16))
    ranges = [range(first, first + 8) for first in (0, one, largest - 4)]
    counts = [pairs_differing(dtype, words) for words in ranges]
    two, unrounded, fast, inner = (sum(column) for column in zip(*counts, strict=True))
    assert two == fast == 0
    assert unrounded > 0 and inner > 0  # the controls


@pytest.mark.slow
@pytest.mark.kernels
@pytest.mark.parametrize("dtype", HALVES)
def test_roundings_within_transformations_change_nothing_of_all_pairs(dtype: torch.dtype) -> None:
    """2^32 pairs, of which those of two signs are each other's negation: a >= 0 only."""
    two, _, fast, _ = pairs_differing(dtype, range(1 << 15))
    assert two == fast == 0


def test_the_sequences_are_those_of_the_arithmetic() -> None:
    """The C++ above, which rounds everywhere, computes what `eft.py` does in the 16-bit dtype."""
    a, b = (torch.randn(4096).bfloat16() for _ in range(2))
    s = (a.float() + b.float()).bfloat16()
    t = ((a - (s - b)) + (b - (s - (s - b)))).bfloat16()
    assert differing(two_sum(a, b)[1], t) == differing(fast_two_sum(a, b)[1], b - (s - a)) == 0


@pytest.mark.slow
def test_a_step_of_adamw_rounds_less_than_half_as_often() -> None:
    graph = graph_of(rewritten(CASES["adamw-plus"]).lowered).graph
    roundings = [n for n in graph.nodes if n.target is collage.round.default]
    exact = exact_roundings(graph).exact
    assert exact.keys() <= set(roundings)
    ends = [node for node, overflowing in exact.items() if overflowing is not None]
    # Two sums, each of a 2Sum (five of its six roundings) and a Fast2Sum (one of three).
    assert (len(ends), len(exact), len(roundings)) == (2, 12, 26)


def test_a_split_of_fp32_rounds_nothing() -> None:
    graph = graph_of(rewritten(CASES["adamw-remainder16"]).lowered).graph
    roundings = [n for n in graph.nodes if n.target is collage.round.default]
    # Parameter and second moment are split; the first moment is rounded.
    assert len(roundings) == 3 and len(exact_roundings(graph).exact) == 2


@pytest.mark.kernels
def test_words_of_fp32_are_those_of_the_function() -> None:
    """Every high half with the ends of all low ones, infinite ones and NaN among them."""
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
    high = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32) << 16
    x = (high[:, None] + low).flatten().view(torch.float32)
    p = torch.zeros(x.numel(), dtype=torch.bfloat16)

    def step(p: Tensor, x: Tensor) -> None:
        p.add_(x)

    collage_fx.compile(step, level="all")(p, x)
    hi, lo = split_remainder16(x + 0.0, torch.bfloat16)
    assert differing(p, hi) == differing(*collage_fx.residuals(p), lo) == 0
    assert int(hi.isnan().sum()) == int(x.isnan().sum()) > 700 and hi.isinf().any()
    source = str(list(MULTI_TENSOR_KERNELS.values())[-1].sources["cpu"])
    assert "round" not in source[source.index("extern") :]
