"""Kernels that set bits for changes: what they move, and that others are what they were.

For passes.codegen.printers.cpp_kernel and passes.codegen.printers.triton_kernel.
"""

import re
from typing import Any

import pytest
import torch
from clipped_runs import give, params
from torch.optim import SGD, AdamW, Optimizer

import collage_fx
from collage_fx.passes.codegen.multi_tensor_kernel import MULTI_TENSOR_KERNELS, MultiTensorKernel
from collage_fx.passes.ir.program import Rewritten


def compiled(**options: Any) -> tuple[Rewritten, MultiTensorKernel, str]:
    """Return the class of AdamW over four tensors, its kernel, and the text of that in C++."""
    optimizer = AdamW(params(shapes=[(5, 3)] * 4), lr=1e-3)
    give(optimizer, 0)
    explained = collage_fx.explain(optimizer, **options)
    (cpp,) = explained.kernels
    (part,) = (r for one in explained.compiled for r in one.program.rewritten)
    return part, MULTI_TENSOR_KERNELS[part.multi_tensor], cpp


@pytest.mark.kernels
def test_a_bit_is_read_and_written_for_an_element() -> None:
    part, kernel, cpp = compiled(changed=True)
    ((at, bits),) = kernel.packed.items()
    assert bits == 1 and at in kernel.written and kernel.bits(at) == 1
    assert part.marked == (0,), "the parameter"
    assert re.findall(rf"\bp{at}\b.*", cpp)[1:] == [f"p{at} + begin / 8);"]
    assert cpp.count("to[i] |= uint8_t((four") == 1, "a byte for eight elements"
    triton = kernel.triton()
    assert len(re.findall(rf"mark\(p{at}, at, left", triton)) == 2, "whole chunks, and tails"
    assert not re.search(rf"tl\.(load|store)\(p{at} ", triton)


@pytest.mark.kernels
def test_control_without_it_there_are_none() -> None:
    part, kernel, cpp = compiled()
    assert not (kernel.packed or part.marked)
    for text in (cpp, kernel.triton()):
        assert "mark" not in text and "changed" not in text


class Exponential(Optimizer):
    """Has an operation that no kernel of our own has in C++."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(torch.exp(p.grad), alpha=1e-3)


def test_a_class_of_inductors_keeps_its_kernel_and_loses_the_bits() -> None:
    for kind, marked in ((SGD, (0,)), (Exponential, ())):
        optimizer: Any = kind(params(shapes=[(5, 3)] * 4))
        give(optimizer, 0)
        explained = collage_fx.explain(optimizer, changed=True)
        (part,) = (r for one in explained.compiled for r in one.program.rewritten)
        assert part.marked == marked and part.multi_tensor and not part.apart
        assert bool(explained.memory["changes"])
