"""Values and residuals of views of parameters, and of buffers that parameters are views of.

For inspection.values and runtime.residuals.aliases.
"""

from collections.abc import Callable

import pytest
import torch
from interpreter import without_compiler
from torch import Tensor
from torch.nn import Parameter

import collage_fx
from collage_fx.errors import ResidualError

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "data": lambda p: p.data,
    "rows": lambda p: p.detach()[1:3],
    "columns": lambda p: p.data[:, 1:4],
    "transposed": lambda p: p.data.t(),
    "flat": lambda p: p.data.view(-1),
    "every second": lambda p: p.data.view(-1)[1::2],
}


def trained(params: list[Parameter], storage: str) -> None:
    optimizer = collage_fx.compile_(torch.optim.SGD(params, lr=1e-4), storage=storage)
    with without_compiler():
        for _ in range(3):
            for p in params:
                p.grad = p.detach().clone()
            optimizer.step()


def random(*size: int) -> Tensor:
    return (torch.rand(size, generator=torch.Generator().manual_seed(0)) + 1).bfloat16()


@pytest.mark.parametrize("storage", ["remainder16", "mcf2", "ulp8", "ulp4"])
@pytest.mark.parametrize("name", VIEWS)
def test_views_have_the_values_of_a_parameter(name: str, storage: str) -> None:
    p = Parameter(random(4, 5))
    trained([p], storage)
    view, whole = VIEWS[name], collage_fx.value(p)
    found = view(p)
    assert not torch.equal(view(whole), found.double())
    torch.testing.assert_close(collage_fx.value(found), view(whole), rtol=0, atol=0)
    if storage != "ulp4":  # whose components are bytes of two elements
        (residual,) = collage_fx.residuals(p)
        (of_view,) = collage_fx.residuals(found)
        torch.testing.assert_close(of_view, view(residual), rtol=0, atol=0)
        assert of_view.untyped_storage().data_ptr() == residual.untyped_storage().data_ptr()


def test_a_transposed_parameter_has_views_too() -> None:
    p = Parameter(random(4, 5).t())
    trained([p], "remainder16")
    assert torch.equal(collage_fx.value(p.data[1:]), collage_fx.value(p)[1:])


def test_a_buffer_has_the_values_of_its_parameters() -> None:
    buffer = random(40)
    params = [Parameter(x) for x in buffer.split([16, 24])]
    trained(params, "remainder16")
    whole = torch.cat([collage_fx.value(p) for p in params])
    assert not torch.equal(whole, buffer.double())
    assert torch.equal(collage_fx.value(buffer), whole)
    assert torch.equal(collage_fx.value(buffer.view(8, 5).t()), whole.view(8, 5).t())


def test_what_has_no_residual_is_converted() -> None:
    p, other = Parameter(random(4, 5)), random(4, 5)
    trained([p], "remainder16")
    assert torch.equal(collage_fx.value(other[1:]), other[1:].double())
    assert collage_fx.residuals(other.t()) == ()


def test_residuals_are_given_to_a_parameter_by_another_name() -> None:
    p = Parameter(random(4, 5))
    trained([p], "remainder16")
    (residual,) = collage_fx.residuals(p)
    zeros = torch.zeros_like(residual)
    with pytest.raises(ResidualError, match="a view of what has a residual"):
        collage_fx.load_residuals(p.data[:2], [zeros[:2]])
    collage_fx.load_residuals(p.data, [zeros])
    assert torch.equal(collage_fx.value(p), p.double())


def test_parts_that_overlap_are_not_all_of_a_buffer() -> None:
    buffer = random(64)
    scale = collage_fx.compile(lambda x: x.mul_(1 - 1e-4))
    with without_compiler(), torch.no_grad():
        scale(buffer[:40])
        scale(buffer[20:44])
    assert torch.equal(collage_fx.value(buffer)[44:], buffer[44:].double())


def test_negative_views_have_their_own_values() -> None:
    p = Parameter(random(4, 2).half())
    trained([p], "mcf2")
    negative = torch.view_as_complex(p.data).conj().imag
    assert negative.is_neg() and torch.equal(collage_fx.value(negative), negative.double())


def test_memory_that_was_given_back_has_no_residual() -> None:
    p = Parameter(random(4, 5))
    trained([p], "remainder16")
    p.untyped_storage().resize_(0)
    assert collage_fx.residuals(p) == ()
    p.untyped_storage().resize_(40)
    assert collage_fx.value(p).shape == (4, 5)
