"""The norm of gradients: as near to float64 as fp32 is, read once for several optimizers.

For gradients.norm and runtime.kernels.sum_of_squares.
"""

import gc
from typing import Any

import pytest
import torch
from clipped_runs import LR, NORM, give, norm_of, params
from torch import Tensor
from torch.optim import SGD, AdamW

import collage_fx
from collage_fx.errors import UnsupportedError
from collage_fx.gradients import norm
from collage_fx.gradients.norm import GradientNorm, gradients_of, norm_over
from collage_fx.runtime.kernels import sum_of_squares as kernel
from collage_fx.runtime.kernels.sum_of_squares import sum_of_squares


def exact(tensors: list[Tensor]) -> float:
    return sum(float((t.to_dense() if t.is_sparse else t).double().square().sum()) for t in tensors)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_sums_of_squares(dtype: torch.dtype) -> None:
    large = torch.full((1 << 20,), 0.1).to(dtype)
    tensors = [torch.randn(size).to(dtype) for size in (0, 1, 31, 33, 50_001)]
    tensors += [large, torch.randn(7, 9).to(dtype).t(), torch.randn(9, 8).to(dtype)[:, ::3]]
    tensors += [torch.eye(5).to(dtype).to_sparse(), torch.tensor(3.0).to(dtype)]
    found = sum_of_squares(tensors)
    assert not found.dim() and found.dtype is torch.float64
    assert float(found) == pytest.approx(exact(tensors), rel=1e-5)
    assert float(sum_of_squares([])) == 0


def test_control_torch_is_off_where_elements_are_equal() -> None:
    large = [torch.full((1 << 22,), 0.1).bfloat16()]
    wide = float(torch.linalg.vector_norm(large[0], dtype=torch.float32)) ** 2
    rounded = float(torch.linalg.vector_norm(large[0])) ** 2
    assert abs(float(sum_of_squares(large)) / exact(large) - 1) < 1e-5
    assert abs(wide / exact(large) - 1) > 1e-3 or abs(rounded / exact(large) - 1) > 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_what_is_not_finite(dtype: torch.dtype, bad: float) -> None:
    t = torch.randn(100).to(dtype)
    t[40] = -bad
    assert float(sum_of_squares([t])) == pytest.approx(bad, nan_ok=True)


def test_squares_that_no_fp32_holds() -> None:
    assert float(sum_of_squares([torch.tensor([1e30, 1e-30])])) == pytest.approx(1e60, rel=1e-6)


def test_threads_change_nothing() -> None:
    tensors = [torch.randn(100_000).bfloat16(), torch.randn(70_001)]
    before, found = torch.get_num_threads(), set()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.add(float(sum_of_squares(tensors)))
    torch.set_num_threads(before)
    assert len(found) == 1


def test_without_a_compiler_torch_adds_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "_library", lambda: None)
    tensors = [torch.randn(1000).bfloat16(), torch.randn(7, 9).t(), torch.randn(3, 2)[:, ::2]]
    assert float(sum_of_squares(tensors)) == pytest.approx(exact(tensors), rel=1e-6)


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of gradients of each sum."""
    found: list[int] = []

    def counted(tensors: Any) -> Tensor:
        found.append(len(tensors))
        return sum_of_squares(tensors)

    monkeypatch.setattr(norm, "sum_of_squares", counted)
    return found


def test_optimizers_share_a_norm(sums: list[int]) -> None:
    one, other = SGD(params()[:2], lr=LR), AdamW(params()[2:], lr=1e-3)
    both: list[Any] = [one, other]
    for optimizer in both:
        collage_fx.compile_(optimizer, clip_grad_norm=NORM, clip_over=both, zero_grads=True)
    for k in range(4):
        expected = float(norm_of([g for optimizer in both for g in give(optimizer, k)]))
        for optimizer in both[:: 1 if k % 2 else -1]:
            optimizer.step()
            assert float(optimizer.step.grad_norm) == pytest.approx(expected, rel=1e-6)
    assert sums == [5] * 4, "each pair of steps reads all gradients once"


def test_gradients_of_another_step_are_read_again(sums: list[int]) -> None:
    one, other = SGD(params()[:2], lr=LR), SGD(params()[2:], lr=LR)
    shared = norm_over([one, other])
    assert norm_over([other, one]) is shared and norm_over([one]) is not shared
    give(one, 0)
    give(other, 0)
    shared.sum_of_squares(one, gradients_of(one))
    shared.sum_of_squares(one, gradients_of(one))  # the other one has taken no step
    assert len(sums) == 2
    give(other, 1)
    assert float(shared.sum_of_squares(other, gradients_of(other))) == pytest.approx(
        exact([p.grad for o in (one, other) for p in o.param_groups[0]["params"]])
    )
    one.param_groups[0]["params"][0].grad.mul_(3)
    shared.sum_of_squares(one, gradients_of(one))
    assert len(sums) == 4


def test_an_optimizer_that_is_gone_counts_no_more(sums: list[int]) -> None:
    other = SGD(params()[2:], lr=LR)
    shared = norm_over([SGD(params()[:2], lr=LR), other])
    gc.collect()
    give(other, 0)
    shared.sum_of_squares(other, gradients_of(other))
    assert sums == [3]


def test_a_gradient_counts_for_each_parameter_that_has_it() -> None:
    one, same = (torch.zeros(3).requires_grad_() for _ in range(2))
    one.grad = same.grad = torch.ones(3)
    without = torch.zeros(3).requires_grad_()
    optimizer = SGD([one, same, without], lr=LR)
    found = GradientNorm([optimizer]).sum_of_squares(optimizer, gradients_of(optimizer))
    assert float(found) == 6
    assert float(torch.nn.utils.get_total_norm([one.grad, same.grad])) == pytest.approx(6**0.5)
    optimizer.param_groups[0]["params"].append(one)
    assert len(gradients_of(optimizer)) == 2


def test_partial_gradients_are_refused() -> None:
    from torch.distributed import destroy_process_group, init_process_group
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate
    from torch.testing._internal.distributed.fake_pg import FakeStore

    init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    p = DTensor.from_local(torch.zeros(4).bfloat16(), mesh, [Replicate()]).requires_grad_()
    p.grad = DTensor.from_local(torch.ones(4).bfloat16(), mesh, [Partial()])
    optimizer = SGD([p], lr=LR)
    collage_fx.compile_(optimizer, clip_grad_norm=NORM)
    with pytest.raises(UnsupportedError, match="yet to be reduced"):
        optimizer.step()
    assert not p.to_local().any()
    destroy_process_group()
