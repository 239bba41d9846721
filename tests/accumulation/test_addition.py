"""The kernel that adds a gradient to a sum leaves the words that PyTorch's operations leave.

For accumulation.addition.
"""

from typing import Any

import pytest
import torch
from interpreter import without_compiler
from torch import Tensor

from collage_fx.accumulation import addition
from collage_fx.runtime.residuals.residual import Residual, Sums
from collage_fx.runtime.storage.registry import STORAGES, is_by_chance, join_in
from collage_fx.runtime.storage.state_name import StateName

pytestmark = pytest.mark.kernels

ODD = torch.tensor(
    [0.0, -0.0, 1e-40, -1e-7, 65504.0, 1e38, float("inf"), -float("inf"), float("nan")]
)
"""Values at the ends of what 16 bits hold."""
CASES = [
    (storage, dtype)
    for storage, kind in STORAGES.items()
    for dtype in kind.residuals
    if dtype in (torch.bfloat16, torch.float16) and not (kind.packed or is_by_chance(storage))
]


def words(tensors: list[Tensor]) -> list[Tensor]:
    """Bits, of NaN those of one: its payload is nobody's."""
    found = [t.clone() if t.is_floating_point() else t for t in tensors]
    for t in (t for t in found if t.is_floating_point()):
        t[t.isnan()] = torch.nan
    return [t.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[t.itemsize]) for t in found]


def summed(storage: str, dtype: torch.dtype, fresh: torch.dtype, size: int = 1003) -> list[Tensor]:
    """Return the words of a sum of five gradients."""
    draw = torch.Generator().manual_seed(0)
    total = torch.randn(size, generator=draw).to(dtype)
    total[: len(ODD)] = ODD.to(dtype)
    residual = Residual(total, storage, StateName("gradient", "p"), sums=Sums())
    for k in range(5):
        gradient = torch.randn(size, generator=draw) * 10.0 ** (2 - k)
        gradient[k : k + len(ODD)] = ODD
        addition.add(total, residual, gradient.to(fresh))
        if k == 2:
            total.data[40:60] = 0  # nobody is told
    assert residual.belongs(total)
    return words([total, *residual.components])


@pytest.mark.parametrize(("storage", "dtype"), CASES, ids=str)
@pytest.mark.quick("mcf2-torch.bfloat16")
def test_same_words(monkeypatch: pytest.MonkeyPatch, storage: str, dtype: torch.dtype) -> None:
    """For gradients in the dtype of the sum, and in fp32, as autocast leaves them."""
    for fresh in (dtype, torch.float32):
        by_kernel = summed(storage, dtype, fresh)
        assert not addition._WITHOUT
        with monkeypatch.context() as patch:
            patch.setattr(addition, "_WITHOUT", {"cpu"})
            expected = summed(storage, dtype, fresh)
        assert all(map(torch.equal, by_kernel, expected)), fresh


def test_control(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that takes zero with its low words leaves others."""
    addition._kernel.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(addition, "_whole", lambda s, *words: join_in(torch.float32, s, *words))
        wrong = summed("mcf2", torch.bfloat16, torch.bfloat16)
    addition._kernel.cache_clear()
    right = summed("mcf2", torch.bfloat16, torch.bfloat16)
    assert not all(map(torch.equal, wrong, right))


def test_what_no_kernel_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other layouts, packed words, and rounding by chance are added by operations."""
    kernels: list[Any] = []
    own = addition._kernel
    monkeypatch.setattr(addition, "_kernel", lambda *args: kernels.append(args) or own(*args))
    for storage, flipped in (("mcf2", False), ("mcf2", True), ("ulp4", False), ("sr", False)):
        total = torch.ones(6, 4, dtype=torch.bfloat16)
        residual = Residual(total, storage, StateName("gradient", "p"), sums=Sums())
        fresh = torch.full((4, 6) if flipped else (6, 4), 2**-6, dtype=torch.bfloat16)
        for _ in range(8):
            addition.add(total, residual, fresh.t() if flipped else fresh)
        assert bool(kernels) == (storage == "mcf2" and not flipped)
        assert (residual.whole(total) - 1.125).abs().max() < 0.02
        kernels.clear()


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum is the same; what has failed is not tried again."""
    expected = summed("mcf2", torch.bfloat16, torch.bfloat16)
    monkeypatch.setattr(addition, "_WITHOUT", set())

    def fail(*_: Any) -> None:
        raise OSError("no compiler")

    tried: list[Any] = []
    monkeypatch.setattr(addition, "_kernel", lambda *args: tried.append(args) or fail())
    found = summed("mcf2", torch.bfloat16, torch.bfloat16)
    assert all(map(torch.equal, found, expected))
    assert len(tried) == 1 and {"cpu"} == addition._WITHOUT
    with without_compiler():
        assert all(map(torch.equal, summed("mcf2", torch.bfloat16, torch.bfloat16), expected))
