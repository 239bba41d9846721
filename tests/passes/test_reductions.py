"""Results of reductions stay in fp32 until they are stored or meet larger tensors.

For passes.frontend.reductions.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from graphs import capture
from recorded_steps import Each
from torch import Tensor
from torch.optim import Optimizer

import collage_fx
from collage_fx.passes.ir.program import is_tensor

BF16, FP16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
UNIT = {BF16: 2.0**-8, FP16: 2.0**-11}
LR, STEPS, COUNT = 0.02, 10, 4096
SEEDS = (1, 2, 5)
"""Seeds with the largest errors of those from 0 to 5."""


def by_mean(p: Tensor, g: Tensor, state: Any) -> None:
    p.sub_(g * (g.abs().mean() / 3 + 1e-3), alpha=LR)


def by_sum(p: Tensor, g: Tensor, state: Any) -> None:
    if not state:
        state["l1"] = torch.zeros(1)
    state["l1"].add_(g.abs().sum(), alpha=0.01)
    p.sub_(g * state["l1"].squeeze(), alpha=LR)


def by_norms(p: Tensor, g: Tensor, state: Any) -> None:
    ratio = p.norm() / (g.norm() + 1e-6)
    p.sub_(g * torch.where(ratio > 0, 1 / ratio, torch.ones_like(ratio)), alpha=LR)


def by_foreach_norms(p: Tensor, g: Tensor, state: Any) -> None:
    ratios = torch.stack(torch._foreach_norm([p, g])) / torch.stack(torch._foreach_norm([g, p]))
    p.sub_(g * ratios.unbind()[1], alpha=LR)


def by_largest(p: Tensor, g: Tensor, state: Any) -> None:
    p.sub_(g * (1 / (g.amax() * 3 - g.amin())), alpha=LR)


def shrunk_by_dot(p: Tensor, g: Tensor, state: Any) -> None:
    p.mul_(1 - LR * torch.dot(g, g) / COUNT)


def by_average(p: Tensor, g: Tensor, state: Any) -> None:
    """An average over the steps of a mean over the elements, as factored second moments are."""
    if not state:
        state["average"] = torch.ones(1, dtype=p.dtype)
    state["average"].mul_(0.99).add_(g.mean(0, keepdim=True), alpha=0.01)
    p.sub_(g * state["average"].squeeze().pow(8), alpha=LR)


def by_average_of_average(p: Tensor, g: Tensor, state: Any) -> None:
    """The same through a second state, and written in fp32."""
    by_average(torch.zeros_like(p), g, state)
    if "second" not in state:
        state["second"] = torch.ones(1, dtype=p.dtype)
    state["second"].mul_(0.99).add_(state["average"], alpha=0.01)
    wide = (state["second"].float() + state["average"].mean(dtype=torch.float32)) / 2
    p.sub_(g * wide.to(p.dtype).squeeze().pow(8), alpha=LR)


EACH = [
    by_mean,
    by_sum,
    by_norms,
    by_foreach_norms,
    by_largest,
    by_average,
    by_average_of_average,
    shrunk_by_dot,
]


def ways(
    each: Any, inputs: torch.dtype, dtype: torch.dtype, wrap: Callable[[Optimizer], Any]
) -> list[float]:
    """Return how far steps along one direction move each of some vectors of a dtype."""
    starts, grads = [], []
    for seed in SEEDS:
        generator = torch.Generator().manual_seed(seed)
        grads.append(torch.randn(COUNT, generator=generator).abs().to(inputs).to(dtype))
        starts.append(torch.randn(COUNT, generator=generator).abs().add(1).to(inputs).to(dtype))
    params = [torch.nn.Parameter(start.clone()) for start in starts]
    step = wrap(Each(params, each))
    for _ in range(STEPS):
        for p, g in zip(params, grads, strict=True):
            p.grad = g.clone()
        step()
    pairs = zip(params, starts, strict=True)
    return [float((collage_fx.value(p).double() - s.double()).sum()) for p, s in pairs]


def error(each: Any, dtype: torch.dtype, **options: Any) -> float:
    """Return how far off that is at most, relative to what it is in float64.

    Roundings of single elements nearly cancel in it; one of a factor of all does not.
    """

    def compiled(optimizer: Optimizer) -> Any:
        return collage_fx.compile(optimizer, **options)

    pairs = zip(ways(each, dtype, dtype, compiled), ways(each, dtype, F64, plain), strict=True)
    return max(abs(found / exact - 1) for found, exact in pairs)


def plain(optimizer: Optimizer) -> Any:
    return optimizer.step


@pytest.mark.parametrize("each", EACH)
@pytest.mark.parametrize("options", [{}, {"arithmetic": "wide"}], ids=["eft", "wide"])
@pytest.mark.quick("eft-by_mean", "eft-by_foreach_norms")
def test_a_factor_that_is_computed_of_reductions_is_not_rounded(
    each: Any, options: dict[str, Any]
) -> None:
    assert error(each, BF16, **options) < UNIT[BF16] / 12
    # Inductor rounds a sum, and what it reads of a state; what it computes of them stays in fp32.
    if each is not by_average_of_average:  # whose mean of one element is this element
        assert error(each, BF16, without=("reductions",), **options) > UNIT[BF16] / 4


@pytest.mark.parametrize("each", [by_mean, by_norms])
@pytest.mark.quick("by_mean")
def test_nor_is_it_in_fp16(each: Any) -> None:
    assert error(each, FP16) < UNIT[FP16] / 24
    # The sums of squares are: their roots are off by half of that, and in a quotient by less.
    assert error(each, FP16, without=("reductions",)) > UNIT[FP16] / 12


@pytest.mark.kernels
def test_nor_do_kernels_round_it() -> None:
    assert error(by_foreach_norms, BF16, multi_tensor=False) < UNIT[BF16] / 12


def canonical(each: Any, shape: tuple[int, ...] = (4, 3), **kept: torch.dtype) -> list[str]:
    """Return the operations of a canonical graph after the pass, with the dtypes of their results.

    Args:
        each: the update.
        shape: of the parameter.
        kept: 0-d states, of these dtypes.
    """
    p = torch.nn.Parameter(torch.ones(shape, dtype=BF16))
    p.grad = torch.ones_like(p)
    optimizer = Each([p], each)
    optimizer.state[p] |= {name: torch.zeros((), dtype=dtype) for name, dtype in kept.items()}
    program = capture(optimizer.step).program()
    assert program.canonical is not None
    return [
        f"{node.target}: {str(node.meta['val'].dtype).removeprefix('torch.')}"
        for node in program.canonical.graph.nodes
        if node.op == "call_function" and is_tensor(node)
    ]


def test_a_sum_that_is_stored_in_fp32_is_never_rounded() -> None:
    def each(p: Tensor, g: Tensor, state: Any) -> None:
        state["l1"].add_(g.sum())
        p.sub_(g)

    assert_expected_inline(
        "\n".join(canonical(each, l1=F32)),
        """\
aten.sum.default: float32
aten.add.Tensor: float32
aten.sub.Tensor: bfloat16
aten.copy_.default: bfloat16
aten.copy_.default: float32""",
    )


def test_one_that_is_stored_in_16_bits_is_rounded_there() -> None:
    def each(p: Tensor, g: Tensor, state: Any) -> None:
        state["l1"].copy_(2 * g.sum() + 1)
        p.sub_(g)

    assert_expected_inline(
        "\n".join(canonical(each, l1=BF16)),
        """\
aten.sum.default: float32
aten.mul.Tensor: float32
aten.add.Tensor: float32
prims.convert_element_type.default: bfloat16
aten.sub.Tensor: bfloat16
aten.copy_.default: bfloat16
aten.copy_.default: bfloat16""",
    )


def test_a_state_that_a_sum_enters_is_handed_on_with_its_low_word() -> None:
    def each(p: Tensor, g: Tensor, state: Any) -> None:
        state["l1"].mul_(0.99).add_(g.sum())
        p.mul_(state["l1"].rsqrt())

    assert_expected_inline(
        "\n".join(canonical(each, l1=BF16)),
        """\
aten.mul.Tensor: bfloat16
aten.sum.default: float32
prims.convert_element_type.default: float32
aten.add.Tensor: float32
prims.convert_element_type.default: bfloat16
prims.convert_element_type.default: float32
aten.rsqrt.default: float32
prims.convert_element_type.default: float32
aten.mul.Tensor: float32
prims.convert_element_type.default: bfloat16
aten.copy_.default: bfloat16
aten.copy_.default: bfloat16""",
    )


def test_what_a_sum_is_taken_from_is_rounded_once() -> None:
    def each(p: Tensor, g: Tensor, state: Any) -> None:
        p.mul_(0.999).sub_(g.expand(3).sum())

    assert_expected_inline(
        "\n".join(canonical(each, ())),
        """\
aten.mul.Tensor: bfloat16
aten.expand.default: bfloat16
aten.sum.default: float32
prims.convert_element_type.default: float32
aten.sub.Tensor: float32
prims.convert_element_type.default: bfloat16
aten.copy_.default: bfloat16""",
    )


def test_a_sum_that_a_step_splits_into_two_words_is_rounded_for_them() -> None:
    def each(p: Tensor, g: Tensor, state: Any) -> None:
        total = g.float().sum()
        state["hi"].copy_(total.to(p.dtype))
        state["lo"].copy_(total - total.to(p.dtype).float())
        p.sub_(g)

    sums = [op for op in canonical(each, hi=BF16, lo=BF16) if "convert" in op]
    assert sums == [
        "prims.convert_element_type.default: float32",  # the gradient
        "prims.convert_element_type.default: bfloat16",
        "prims.convert_element_type.default: float32",  # and not left out
        "prims.convert_element_type.default: bfloat16",
    ]


def test_norms_of_a_list_of_two_dtypes_are_rounded_as_pytorch_does() -> None:
    def each(p: Tensor, g: Tensor, state: Any) -> None:
        norm, wide = torch._foreach_norm([g, state["l1"].view(1)])
        state["l1"].copy_(norm.float() + wide)
        p.sub_(g)

    assert "<built-in function getitem>: bfloat16" in canonical(each, l1=F32)


def test_results_of_one_sum_have_each_its_own_memory() -> None:
    def each(p: Tensor, g: Tensor, state: Any) -> None:
        if "a" in state:
            state["a"].add_(1.0)
        else:
            rows = g.sum(1)
            state["a"], state["b"] = rows.float(), rows.view(2, 1).float()
        p.sub_(g, alpha=LR)

    p = torch.nn.Parameter(torch.ones(2, 3, dtype=BF16))
    optimizer = Each([p], each)
    step = torch.compile(optimizer.step, backend="collage")
    for _ in range(2):
        p.grad = torch.ones_like(p)
        step()
    state = optimizer.state[p]
    assert (state["a"].tolist(), state["b"].tolist()) == ([4, 4], [[3], [3]])


def test_a_state_that_is_scaled_by_reductions_of_it_is_computed_in_wide() -> None:
    """In eft what else is scaled by the same factor, in an average say, would be rounded."""

    def each(p: Tensor, g: Tensor, state: Any) -> None:
        p.sub_(g)
        p.mul_(1 / p.norm())

    p = torch.nn.Parameter(torch.ones(4, 3, dtype=BF16))
    p.grad = torch.ones_like(p)
    (rewritten,) = capture(Each([p], each).step).program().rewritten
    assert any("beside the carried path" in text for text in rewritten.joined)
