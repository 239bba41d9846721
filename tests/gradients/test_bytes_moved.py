"""Bytes that a step moves for each element: counted from what its kernels load and store.

For passes.codegen.printers.cpp_kernel and passes.codegen.printers.triton_kernel.
"""

import re
from typing import Any

import pytest
from clipped_runs import give, params
from torch.optim import AdamW

import collage_fx
from collage_fx.passes.codegen.multi_tensor_kernel import MULTI_TENSOR_KERNELS

READ = 2
"""Bytes of an element of a gradient, which the norm reads once."""
APART = READ + 2 * READ
"""Bytes of the norm, and of what multiplies gradients in place."""


def moved(**options: Any) -> tuple[int, int]:
    """Return the bytes that the kernel of an AdamW step in bf16 moves: in C++, and in Triton."""
    optimizer = AdamW(params(shapes=[(5, 3)] * 4), lr=1e-3)
    give(optimizer, 0)
    explained = collage_fx.explain(optimizer, **options)
    (cpp,) = explained.kernels
    (part,) = (r for one in explained.compiled for r in one.program.rewritten)
    kernel = MULTI_TENSOR_KERNELS[part.multi_tensor]
    pairs = zip(kernel.dtypes, kernel.scalar, strict=True)
    widths = [0 if scalar else dtype.itemsize for dtype, scalar in pairs]
    in_cpp = re.findall(r"\bp(\d+)\[i\]", cpp)
    # Each stands there with a mask and without.
    in_triton = {(what, i) for what, i in re.findall(r"tl\.(load|store)\(p(\d+)", kernel.triton())}
    return sum(widths[int(i)] for i in in_cpp), sum(widths[int(i)] for _, i in in_triton)


@pytest.mark.kernels
@pytest.mark.parametrize(("level", "bytes_"), [("auto", 24), ("light", 20)])
def test_bytes_of_an_element(level: str, bytes_: int) -> None:
    plain = moved(level=level)
    assert [n + APART for n in plain] == [bytes_ + 4] * 2, "clipped apart"
    clipped = moved(level=level, clip_grad_norm=1.0)
    assert clipped == plain
    assert [n + READ for n in clipped] == [bytes_] * 2, "clipped in the step"
    zeroed = moved(level=level, clip_grad_norm=1.0, zero_grads=True)
    assert [n + READ for n in zeroed] == [bytes_ + 2] * 2


@pytest.mark.kernels
def test_control_other_storages_move_other_bytes() -> None:
    assert moved(level="all") == (26, 26)
    assert moved(level="all", storage="sr") == (14, 14)
    assert moved(level="all", storage="ulp8") == (20, 20)
