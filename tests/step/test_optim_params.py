"""Parameters of every kind under both engines: 20 steps of AdamW against float64.

For step.compiled_step.
"""

from collections.abc import Callable

import pytest
import torch
from optim_cases import STEPS, Way, compiled, error, plain, rounded, untraced
from torch import Tensor, nn

import collage_fx

KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "scalar": lambda x: x[0, 0, 0, 0].clone(),
    "one": lambda x: x[0, 0, 0, :1].clone(),
    "transposed": lambda x: x[0, 0].clone().t(),
    "strided": lambda x: x[:, :, ::2, 1::2],
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "expanded_and_copied": lambda x: x[0, 0, 0].expand(3, 4).contiguous(),
}
ways = pytest.mark.parametrize("way", [untraced, compiled])


def trained(start: list[Tensor], dtype: torch.dtype, way: Way, **options: float) -> list[Tensor]:
    """Run the steps, one parameter group for each parameter; return the full values."""
    params = [nn.Parameter(torch.empty_like(s, dtype=dtype).copy_(s)) for s in start]
    groups = [{"params": [p], "lr": 1e-3 * 2**i} for i, p in enumerate(params)]
    step = way(torch.optim.AdamW(groups, **options))
    generator = torch.Generator().manual_seed(2)
    for _ in range(STEPS):
        for p in params:
            g = torch.randn(p.shape, generator=generator).bfloat16().to(dtype)
            p.grad = torch.empty_like(p).copy_(g)
        step()
    return [collage_fx.value(p).clone() for p in params]


def check(start: list[Tensor], way: Way) -> None:
    exact = trained(start, torch.float64, plain)
    found = trained(start, torch.bfloat16, way)
    for f, e in zip(found, exact, strict=True):
        assert error([f], [e]) < error(rounded([e], torch.bfloat16), [e])


def weights() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return (1 + 0.25 * torch.randn(2, 3, 4, 4, generator=generator)).bfloat16().double()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.quick("one", "scalar", "transposed", "expanded_and_copied")
def test_layouts_untraced(kind: str) -> None:
    check([KINDS[kind](weights())], untraced)


@ways
@pytest.mark.quick("untraced")
def test_all_layouts_and_a_rate_for_each_group(way: Way) -> None:
    check([kind(weights()) for kind in KINDS.values()], way)


@ways
@pytest.mark.quick("untraced")
def test_empty_parameter_beside_others(way: Way) -> None:
    found = trained([weights(), torch.empty(0, 3).double()], torch.bfloat16, way)
    assert found[1].shape == (0, 3)
    assert error(found[:1], trained([weights()], torch.float64, plain)) < 1e-3


@ways
@pytest.mark.quick("untraced")
def test_tied_parameters_move_once(way: Way) -> None:
    start = weights()[0, 0]
    results = []
    for dtype, run in ((torch.float64, plain), (torch.bfloat16, way)):
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)).to(dtype)
        model[1].weight = model[0].weight
        model[0].weight.data.copy_(start)
        step = run(torch.optim.AdamW(model.parameters(), lr=1e-3))
        for k in range(STEPS):
            g = torch.randn(4, 4, generator=torch.Generator().manual_seed(k)).bfloat16().to(dtype)
            model[0].weight.grad = g
            step()
        assert model[1].weight is model[0].weight
        results.append([collage_fx.value(model[1].weight).clone()])
    exact, found = results
    assert error(found, exact) < error(rounded(exact, torch.bfloat16), exact)


@ways
@pytest.mark.quick("untraced")
def test_parameter_without_gradient_stays(way: Way) -> None:
    params = [nn.Parameter(weights().bfloat16()) for _ in range(2)]
    step = way(torch.optim.AdamW(params, lr=1e-3))
    for _ in range(STEPS):
        params[0].grad = torch.ones_like(params[0])
        step()
    assert torch.equal(collage_fx.value(params[1]), weights())
    assert not torch.equal(collage_fx.value(params[0]), weights())
