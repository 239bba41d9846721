"""States that are rounded by chance: by the places of elements, in kernels and graphs alike.

For runtime.storage.positions and passes.codegen.emit.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

import collage_fx

BF16 = torch.bfloat16


def stepped(
    tensors: list[Tensor], kind: Any = torch.optim.AdamW, *, plain: bool = False, **options: Any
) -> list[Tensor]:
    """The parameters and states after four steps."""
    params = [t.clone().requires_grad_() for t in tensors]
    options = {"storage": "sr", "level": "all"} | options
    optimizer = kind(params, lr=1e-4)
    step = optimizer.step if plain else collage_fx.compile(optimizer, **options)
    for k in range(4):
        generator = torch.Generator().manual_seed(k)
        for p in params:
            p.grad = torch.empty_like(p).copy_(torch.randn(p.shape, generator=generator))
        step()
    return [t.detach() for p in params for t in (p, *optimizer.state[p].values())]


@pytest.mark.kernels
def test_kernels_of_classes_and_of_inductor_round_alike() -> None:
    """Positions are counted in the one, and computed by operations in the other.

    Of sizes with which a compiler that knows how far positions go, and that no product of them may
    overflow, has left out the end of the loop (30), or written behind it (65).
    """
    sizes = [(65,), (5, 6), (5, 13)]
    memory = torch.randn(2 * 160, generator=torch.Generator().manual_seed(0)).to(BF16)
    parts = memory[:160].split([65, 30, 65])

    def flat(many: bool, **options: Any) -> Tensor:
        here = memory.clone()
        views = zip(here[:160].split([len(p) for p in parts]), sizes, strict=True)
        params = [torch.nn.Parameter(v.view(size)) for v, size in views]
        optimizer = torch.optim.SGD(params, lr=1e-2)
        step = collage_fx.compile(optimizer, storage="sr", multi_tensor=many, **options)
        for p in params:
            p.grad = torch.ones_like(p)
        step()
        assert torch.equal(here[160:], memory[160:])
        return here

    one, other = flat(True), flat(False)
    assert torch.equal(one, other) and bool((one != memory)[128:160].any())
    assert not torch.equal(one, flat(True, seed=3))


def test_elements_round_by_their_place_and_not_by_their_memory() -> None:
    values = torch.randn(4, 3, 5, 2, generator=torch.Generator().manual_seed(0)).to(BF16)
    for laid_out in (
        values.to(memory_format=torch.channels_last),
        values.transpose(0, 2).contiguous().transpose(0, 2),
        torch.stack([values, values])[1],
    ):
        assert all(map(torch.equal, stepped([laid_out] * 2), stepped([values] * 2)))
    turned = values.transpose(0, 2)
    found, expected = stepped([turned])[0].transpose(0, 2), stepped([values])[0]
    assert not torch.equal(found, expected)  # the control: other places


@pytest.mark.parametrize("dtype", [torch.float16, BF16])
@pytest.mark.parametrize("shape", [(), (0, 3), (3, 0, 2), (1,), (7, 5)], ids=str)
def test_any_shape_and_dtype_is_as_near_as_its_neighbours(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = stepped([values] * 2, torch.optim.SGD)[0]
    exact = stepped([values.double()], torch.optim.SGD, plain=True)[0]
    off = (found.double() - exact).abs()
    assert bool((off <= 4 * torch.finfo(dtype).eps * exact.abs()).all())
    assert found.shape == shape and found.dtype == dtype
