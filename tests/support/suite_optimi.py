"""Tests as optimi has them for its optimizers, written anew: the sdist of torch-optimi has none.

They know nothing of collage_fx: `make suites` runs them as they are, and with each step compiled.
"""

import copy
from typing import Any

import optimi
import pytest
import torch
from optimi import prepare_for_gradient_release, remove_gradient_release
from torch import Tensor, nn

TORCH: dict[str, tuple[Any, dict[str, Any]]] = {
    "Adam": (torch.optim.Adam, {"betas": (0.9, 0.99), "eps": 1e-6}),
    "AdamW": (torch.optim.AdamW, {"betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.01}),
    "RAdam": (torch.optim.RAdam, {"betas": (0.9, 0.99), "eps": 1e-6}),
    "SGD": (torch.optim.SGD, {}),
}
"""Optimizers that torch has too, and its arguments that are optimi's defaults."""
NAMES = ("Adam", "AdamW", "Adan", "Lion", "RAdam", "Ranger", "SGD", "StableAdamW")
FOREACH = pytest.mark.parametrize("foreach", [False, True], ids=["loop", "foreach"])
NAME = pytest.mark.parametrize("name", NAMES)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
SIZES = pytest.mark.parametrize("size", [(8, 2), (31, 7), (64, 64)], ids=str)
LOOSE = {torch.bfloat16: (2e-2, 1e-2), torch.float16: (5e-3, 2e-3), torch.float32: (1e-5, 1e-6)}


class Mlp(nn.Module):
    """Two layers and a norm."""

    def __init__(self, size: tuple[int, int], dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(5)
        wide, narrow = size
        self.layers = nn.Sequential(
            nn.Linear(wide, narrow, bias=False), nn.LayerNorm(narrow), nn.Linear(narrow, 1)
        ).to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out.square().mean()


def trained(
    made: Any, size: tuple[int, int], dtype: torch.dtype, steps: int = 10, **given: Any
) -> tuple[Mlp, Any]:
    """Return a model after some steps, and its optimizer."""
    model = Mlp(size, dtype)
    optimizer = made(model.parameters(), **given)
    generator = torch.Generator().manual_seed(6)
    for _ in range(steps):
        model(torch.randn(16, size[0], generator=generator).to(dtype)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def close(a: nn.Module, b: nn.Module, dtype: torch.dtype, loosen: float = 1.0) -> None:
    """Hold the parameters of two models against each other."""
    rtol, atol = (loosen * limit for limit in LOOSE[dtype])
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p.float(), q.float(), rtol=rtol, atol=atol)


@pytest.mark.parametrize("name", TORCH)
@pytest.mark.parametrize("lr", [1e-3, 1e-4])
@SIZES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@FOREACH
def test_is_as_torch(
    name: str, lr: float, size: tuple[int, int], dtype: torch.dtype, foreach: bool
) -> None:
    reference, arguments = TORCH[name]
    given: dict[str, Any] = {"lr": lr, "foreach": foreach}
    ours, _ = trained(getattr(optimi, name), size, dtype, kahan_sum=False, triton=False, **given)
    theirs, _ = trained(reference, size, dtype, **given, **arguments)
    close(ours, theirs, dtype)


@NAME
@SIZES
@DTYPES
def test_foreach_is_as_the_loop(name: str, size: tuple[int, int], dtype: torch.dtype) -> None:
    made = getattr(optimi, name)
    pair = [
        trained(made, size, dtype, lr=1e-3, foreach=foreach, triton=False)[0]
        for foreach in (False, True)
    ]
    close(*pair, dtype)


@NAME
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@FOREACH
def test_kahan_sums_are_as_fp32(name: str, dtype: torch.dtype, foreach: bool) -> None:
    made, given = getattr(optimi, name), {"lr": 1e-4, "foreach": foreach, "triton": False}
    narrow, _ = trained(made, (31, 7), dtype, kahan_sum=True, **given)
    wide, _ = trained(made, (31, 7), torch.float32, kahan_sum=False, **given)
    close(narrow, wide, dtype)


@NAME
@FOREACH
@pytest.mark.parametrize("decoupled", ["wd", "lr"])
def test_decay_shrinks_weights(name: str, foreach: bool, decoupled: str) -> None:
    given: dict[str, Any] = {"lr": 1e-3, "foreach": foreach, "triton": False}
    if decoupled == "lr":
        given |= {"decouple_lr": True, "max_lr": 1e-3}
    decay = 1e-2 if decoupled == "wd" else 1e-5
    made = getattr(optimi, name)
    with_it, _ = trained(made, (31, 7), torch.float32, weight_decay=decay, **given)
    without, _ = trained(made, (31, 7), torch.float32, weight_decay=0, **given)
    norms = [sum(float(p.detach().norm()) for p in m.parameters()) for m in (with_it, without)]
    assert norms[0] != norms[1]


@NAME
@DTYPES
@FOREACH
def test_goes_on_from_a_state_dict(name: str, dtype: torch.dtype, foreach: bool) -> None:
    made = getattr(optimi, name)
    model, optimizer = trained(made, (31, 7), dtype, lr=1e-3, foreach=foreach, triton=False)
    other = Mlp((31, 7), dtype)
    other.load_state_dict(model.state_dict())
    again = made(other.parameters(), lr=1e-3, foreach=foreach, triton=False)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    x = torch.randn(16, 31).to(dtype)
    for one, of in ((model, optimizer), (other, again)):
        for _ in range(3):
            one(x).backward()
            of.step()
            of.zero_grad()
    close(model, other, dtype, loosen=0)


@NAME
@DTYPES
def test_gradient_release_is_as_a_step(name: str, dtype: torch.dtype) -> None:
    made = getattr(optimi, name)
    given: dict[str, Any] = {"lr": 1e-3, "foreach": False, "triton": False}
    plain, _ = trained(made, (31, 7), dtype, steps=5, **given)
    model = Mlp((31, 7), dtype)
    optimizer = made(model.parameters(), gradient_release=True, **given)
    prepare_for_gradient_release(model, optimizer)
    generator = torch.Generator().manual_seed(6)
    for _ in range(5):
        model(torch.randn(16, 31, generator=generator).to(dtype)).backward()
        optimizer.step()
        optimizer.zero_grad()
    remove_gradient_release(model)
    close(plain, model, dtype)


@NAME
def test_a_wrong_rate_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="Invalid learning rate"):
        getattr(optimi, name)([torch.ones(2, requires_grad=True)], lr=-1.0)
