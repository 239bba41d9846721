"""The kernels of both ways of emitting, compiled for an AMD GPU on a machine without one.

A division and a root of fp32 are sequences of instructions there, with contractions of their own:
how many is counted in kernels that do nothing else.

For passes.codegen.printers.triton_kernel and passes.codegen.inductor_lowering.
"""

import functools
import re
from collections import Counter
from typing import Any

import pytest
from kernels import CASES, GFX942, Case, assembled, kernel_of, matching, rewritten, roundings
from kernels import without_roundings as without
from test_inductor_triton import emitted

PER_THREAD = 4
"""Elements of a thread, of which there are 64 in a wave."""
FAST = ("adamw-plus", "trust-light")
EACH = [
    pytest.param(CASES[name], id=name, marks=[] if name in FAST else [pytest.mark.slow])
    for name in ("adamw-light", "adamw-plus", "adamw-remainder16", "sgd-light", "trust-light")
]
_SIMPLE = """\
import triton, triton.language as tl
@triton.jit
def multi_tensor(
    table, members, starts, sizes, left_out,
    ALIGNED: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr
):
    p = tl.load(table).to(tl.pointer_type(tl.float32)) + tl.arange(0, BLOCK)
    x = tl.load(p)
    tl.store(p, {operation})
"""


def operations(built: dict[str, Any]) -> Counter[str]:
    """Return how often each instruction stands in the assembly."""
    return Counter(re.findall(r"^\s+([a-z]\w+)\s", built["amdgcn"], re.MULTILINE))


def fused(counts: Counter[str]) -> int:
    """Return how many contractions there are, those of two elements counted twice."""
    single = matching(counts, r"v_(fma|fmac|fmaak|fmamk|mad|mac)_f32\w*")
    return single + 2 * matching(counts, r"v_pk_(fma|fmac|mad)_f32\w*")


@functools.cache
def own(operation: str, of: str) -> int:
    """Return how many contractions one operation of fp32 has of its own."""
    counts = operations(assembled(_SIMPLE.format(operation=operation), GFX942))
    assert fused(counts) % matching(counts, of) == 0
    return fused(counts) // matching(counts, of)


def contracted(counts: Counter[str]) -> int:
    """Return how many contractions are no division's and no root's."""
    divisions, roots = r"v_div_fixup_f32\w*", r"v_(sqrt|rsq)_f32\w*"
    found = fused(counts)
    found -= own("tl.div_rn(x, x + 1)", divisions) * matching(counts, divisions)
    return found - own("tl.sqrt_rn(x)", roots) * matching(counts, roots)


def moved(counts: Counter[str]) -> int:
    """Return the bytes that a thread reads and writes where its elements lie side by side."""
    return 8 * matching(counts, r"(buffer|global)_(load|store)_dwordx2")


def rounded(counts: Counter[str]) -> int:
    """Return how many results are rounded to bf16: one addition to the bits for each."""
    return matching(counts, r"v_add3_u32\w*")


def spilled(built: dict[str, Any]) -> int:
    """Return how many registers are kept in memory, and the bytes for them."""
    names = "vgpr_spill_count|sgpr_spill_count|private_segment_fixed_size"
    found = re.findall(rf"\.(?:{names}):\s+(\d+)", built["amdgcn"])
    assert len(found) == 3
    return sum(map(int, found))


@pytest.mark.parametrize("case", EACH)
@pytest.mark.quick("adamw-plus")
def test_the_kernel_of_a_class(case: Case) -> None:
    of_class = rewritten(case)
    source = kernel_of(of_class).triton()
    built = assembled(source, GFX942)
    counts = operations(built)
    assert moved(counts) == PER_THREAD * case.traffic
    assert spilled(built) == 0 and contracted(counts) == 0
    assert rounded(counts) >= 2 * PER_THREAD * roundings(of_class)  # whole chunks and tails


@pytest.mark.kernels
@pytest.mark.parametrize("case", EACH)
@pytest.mark.quick("trust-light")
def test_the_kernel_of_inductor(case: Case) -> None:
    of_class, kernel = emitted(case)
    built, smaller = (kernel.assembled(block=n, target=GFX942) for n in (1024, 512))
    counts = operations(built)
    assert moved(counts) == PER_THREAD * case.traffic
    assert spilled(built) == 0
    assert rounded(counts) >= PER_THREAD * roundings(of_class)
    # What is left are the powers of the bias corrections, once in a thread of any size.
    assert contracted(counts) == contracted(operations(smaller))


@pytest.mark.kernels
def test_the_checks_can_fail() -> None:
    case = CASES["adamw-plus"]
    of_class = rewritten(case)
    source = kernel_of(of_class).triton()
    assert contracted(operations(assembled(source, GFX942, fusion=True))) > 0
    plain = operations(assembled(without(source), GFX942))
    assert rounded(plain) < 2 * PER_THREAD * roundings(of_class)
    _, kernel = emitted(case)
    large, small = (
        contracted(operations(kernel.assembled(block=n, target=GFX942, fusion=True)))
        for n in (1024, 512)
    )
    assert large > small
    kernel.source = without(kernel.source)
    plain = operations(kernel.assembled(target=GFX942))
    assert rounded(plain) < PER_THREAD * roundings(of_class)
