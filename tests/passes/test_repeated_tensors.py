"""passes/dedup/repeated_tensors: a list of `_foreach_*` has a tensor more than once.

For passes.dedup.repeated_tensors.
"""

from typing import Any

import pytest
import torch
from tensors import error
from torch import Tensor
from torch.optim import Optimizer

import collage_fx
from collage_fx.dynamo import backend
from collage_fx.passes.dedup.repeated_tensors import divided

NUMBERS = [0.9999, 0.999, 1.0001]


class Repeats(Optimizer):
    def __init__(self, params: list[Tensor], reads: bool) -> None:
        super().__init__(params, {})
        self.reads = reads

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        p, q = self.param_groups[0]["params"]
        torch._foreach_add_([p, q, p], [p.grad, q.grad, q.grad], alpha=-1e-4)
        if self.reads:
            torch.ones(1).item()
        torch._foreach_mul_([p, q, p], NUMBERS)
        torch._foreach_addcmul_([p, q, p], [p.grad] * 3, [q.grad] * 3, [1e-4, 2e-4, 3e-4])


def trained(dtype: torch.dtype, way: str, **options: Any) -> list[Tensor]:
    torch.manual_seed(0)
    params = [torch.randn(8).bfloat16().to(dtype).requires_grad_() for _ in range(2)]
    optimizer = Repeats(params, way == "recorded")
    if way != "plain":
        collage_fx.compile_(optimizer, **options)
    for _ in range(20):
        for p in params:
            p.grad = torch.randn(8).bfloat16().to(dtype)
        optimizer.step()
    return [collage_fx.value(p) if way != "plain" else p.detach().double() for p in params]


@pytest.mark.parametrize("way", ["graph", "recorded"])
def test_a_tensor_is_updated_as_often_as_a_list_has_it(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact, plain = trained(torch.float64, "plain"), trained(torch.bfloat16, "plain")
    found = trained(torch.bfloat16, way)
    errors = [max(map(error, values, exact)) for values in (found, plain)]
    assert errors[0] < errors[1] / 20
    if way == "graph":  # functionalization keeps the last of two updates
        monkeypatch.setattr(backend, "divide_repeated", lambda gm: None)
        assert max(map(error, trained(torch.bfloat16, way), exact)) > 20 * errors[0]


def test_lists_are_divided_before_what_they_have_already() -> None:
    a, b, c = torch.zeros(3)
    numbers = torch.tensor([1.0, 2.0, 3.0, 4.0])
    parts = divided(([a, b, b, a], [b, c, c, a]), {"scalars": numbers, "value": 2})
    found = [(list(map(id, x)), list(map(id, y)), k["scalars"].tolist()) for (x, y), k in parts]
    assert found == [
        ([id(a), id(b)], [id(b), id(c)], [1.0, 2.0]),
        ([id(b), id(a)], [id(c), id(a)], [3.0, 4.0]),
    ]
    assert all(k["value"] == 2 for _, k in parts)
    assert divided(([a, b], [c, c]), {}) == []
