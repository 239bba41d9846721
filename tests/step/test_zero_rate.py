"""A learning rate of 0, as every warmup from 0 has it first, gives what eager PyTorch gives.

For passes.dedup.denominator.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.optim import Optimizer

import collage_fx

CASES: list[tuple[str, dict[str, Any]]] = [
    ("Adadelta", {}),
    ("Adafactor", {"eps": (1e-8, 1e-3)}),
    ("Adagrad", {}),
    ("Adam", {}),
    ("Adam", {"amsgrad": True, "weight_decay": 0.1}),
    ("Adam", {"foreach": True}),
    ("AdamW", {}),
    ("AdamW", {"fused": True}),
    ("Adamax", {}),
    ("ASGD", {}),
    ("Muon", {}),
    ("NAdam", {}),
    ("RAdam", {}),
    ("RMSprop", {"momentum": 0.9, "centered": True}),
    ("Rprop", {}),
    ("SGD", {"momentum": 0.9}),
]
# The first row of the gradient is always zero, as of an embedding's row in no batch.
GRADIENT = torch.tensor([[0.0, 0.0], [1.0, -2.0], [0.5, 0.25]])
RATES = [0.0, 0.0, 0.0, 0.01, 0.02, 0.03]


def trained(name: str, kwargs: Any, dtype: torch.dtype, as_tensor: bool, way: str) -> Tensor:
    """Return the value of a parameter of ones after a warmup from 0."""
    p = nn.Parameter(torch.ones(3, 2, dtype=dtype))
    rate = torch.tensor(0.0) if as_tensor else 0.0
    optimizer: Optimizer = getattr(torch.optim, name)([p], lr=rate, **kwargs)
    steps = {
        "eager": lambda: optimizer.step,
        "stock": lambda: torch.compile(optimizer.step, backend="aot_eager"),
        "collage": lambda: collage_fx.compile(optimizer, storage="remainder16"),
    }
    step = steps[way]()
    for now in RATES:
        for group in optimizer.param_groups:
            group["lr"] = group["lr"].fill_(now) if as_tensor else now
        p.grad = GRADIENT.to(dtype)
        step()
    return collage_fx.value(p)


def named(name: str, kwargs: dict[str, Any], as_tensor: bool) -> Any:
    """A case: most optimizers take a tensor as their rate in `make test-all` only."""
    slow = as_tensor and name not in ("Adagrad", "Adam", "AdamW", "NAdam", "RMSprop", "SGD")
    kind = "-".join([name, *kwargs, "tensor" if as_tensor else "float"])
    marks = pytest.mark.slow if slow else ()
    return pytest.param(name, kwargs, as_tensor, id=kind, marks=marks)


@pytest.mark.parametrize(
    ("name", "kwargs", "as_tensor"),
    [named(*case, as_tensor) for case in CASES for as_tensor in (False, True)],
)
@pytest.mark.quick("Adagrad-tensor", "AdamW-fused-float", "NAdam-tensor", "SGD-momentum-float")
def test_warmup_from_zero(name: str, kwargs: dict[str, Any], as_tensor: bool) -> None:
    if as_tensor and kwargs.get("foreach"):
        pytest.skip("PyTorch takes no tensor lr with foreach")
    exact = trained(name, kwargs, torch.float64, as_tensor, "eager")
    found = trained(name, kwargs, torch.bfloat16, as_tensor, "collage")
    # The moments that need no residual are rounded to bf16: 2^-8 of the way, or a little more.
    assert (found - exact).abs().max() <= 2**-6 * (1 - exact).abs().max()


@pytest.mark.slow
def test_optimizers_of_one_class_with_other_eps() -> None:
    """From the second on Dynamo makes eps a symbol."""
    for eps in (1e-8, 1e-6, 1e-5):
        p = nn.Parameter(torch.ones(2).bfloat16())
        step = collage_fx.compile(torch.optim.AdamW([p], lr=0.0, eps=eps))
        p.grad = torch.tensor([0.0, 1.0]).bfloat16()
        step()
        assert torch.equal(p.detach(), torch.ones(2).bfloat16())


def test_stock_compile_makes_nan() -> None:
    """If this fails, torch has mended it: docs/stock-defects.md and denominator.py can go."""
    exact = trained("Adam", {"foreach": False}, torch.float64, False, "eager")
    stock = trained("Adam", {"foreach": False}, torch.float32, False, "stock")
    assert exact.isfinite().all()
    assert stock[0].isnan().all()


@pytest.mark.parametrize("storage", ["mcf2", "remainder16"])
def test_states_primed_by_distributed_checkpoint(storage: str) -> None:
    model = nn.Linear(3, 2).bfloat16()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer.step = collage_fx.compile(optimizer, storage=storage)  # type: ignore[method-assign]
    get_optimizer_state_dict(model, optimizer)
    assert all(
        torch.equal(p.detach(), old) for p, old in zip(model.parameters(), before, strict=True)
    )
