"""Slices of one buffer share a version counter: a write to one is no write to the others.

For record.service.
"""

import ctypes
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import SGD

import collage_fx
from collage_fx.record.service import Service


class Writing(SGD):
    """SGD whose steps write a parameter as a library does that PyTorch sees nothing of."""

    def __init__(self, params: list[Tensor], lr: float) -> None:
        super().__init__(params, lr=lr)
        self.pointer = params[1].data_ptr()

    def step(self, closure: Any = None) -> Any:
        """Take a step, and write."""
        result = super().step(closure)
        self.write()
        return result

    @torch.compiler.disable
    def write(self) -> None:
        """Write the second parameter."""
        ctypes.memset(self.pointer, 0, 8)
        increment_version(self.param_groups[0]["params"][1])


def said(kind: type[SGD] = SGD, **options: Any) -> tuple[list[Tensor], str]:
    """Return two parameters in one buffer after steps, and what was warned of unseen writes."""
    buffer = torch.ones(8, dtype=torch.bfloat16)
    params: list[Tensor] = [torch.nn.Parameter(buffer[:4]), torch.nn.Parameter(buffer[4:])]
    optimizer = kind(params, lr=2.0**-10)
    collage_fx.compile_(optimizer, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for i in range(6):
            params[0].grad = torch.ones(4).bfloat16()
            params[1].grad = None if i % 2 else torch.ones(4).bfloat16()
            optimizer.step()
    texts = [str(w.message) for w in caught]
    return params, "".join(t for t in texts if "#unseen-write" in t)


@pytest.mark.parametrize("options", [{}, {"record": True}], ids=["graph", "recorded"])
def test_a_slice_without_a_gradient_is_not_written(options: Any) -> None:
    params, warned = said(**options)
    assert not warned
    for p, steps in zip(params, (6, 3), strict=True):
        assert collage_fx.value(p).tolist() == [1 - steps * 2.0**-10] * 4


def test_by_versions_alone_it_would_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Service, "_is_beside", lambda service, tensor, written: False)
    assert "params[1]" in said()[1]


def test_a_write_that_nobody_saw_is_told() -> None:
    params, warned = said(Writing)
    assert "params[1]" in warned and not params[1].any()
