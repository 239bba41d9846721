"""Backward passes that are compiled, called where operations of a step are noted.

For hooks.nested_compile, record.dispatch_modes and runtime.torch_private.
"""

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule
from torch.nn import Parameter

import collage_fx
from collage_fx.hooks import nested_compile
from collage_fx.runtime.residuals.memory import address
from collage_fx.runtime.torch_private import call_func_at_runtime_with_args

pytestmark = pytest.mark.filterwarnings("ignore:.*nothing needed compensation")

LR = 1e-3
STEPS = 4


def loss_of(p: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return a loss whose backward pass computes elements of a matrix product."""
    return ((p + (p @ a).sin()) @ b).tanh().sum()


def kernels(gm: GraphModule, _: Any) -> Callable[..., Any]:
    """Return a graph whose products are operations of PyTorch, and read by their addresses."""

    class Kernels(torch.fx.Interpreter):
        def run_node(self, n: torch.fx.Node) -> Any:
            made = super().run_node(n)
            if n.target is not torch.ops.aten.mm.default:
                return made
            found = torch.empty(made.shape, dtype=made.dtype)
            ctypes.memmove(address(found), address(made), made.nbytes)
            return found

    return make_boxed_func(Kernels(gm).run)


def compiled(backend: str) -> Callable[..., Tensor]:
    if backend == "inductor":
        return torch.compile(loss_of)
    return torch.compile(loss_of, backend=aot_autograd(fw_compiler=kernels))


def update(p: Tensor, grad: Tensor) -> None:
    with torch.no_grad():
        p.sub_(grad * LR)


def given(p: Parameter, loss: Tensor) -> None:
    (grad,) = torch.autograd.grad(loss, p)
    update(p, grad)


def moved(dtype: torch.dtype, backend: str | None, **options: Any) -> Tensor:
    """Return how far a function moves weights to which it is given a loss."""
    torch.compiler.reset()
    generator = torch.Generator().manual_seed(0)
    p, a, b = (torch.randn(16, 16, generator=generator) * x for x in (1, 0.3, 0.3))
    a, b, start = (x.bfloat16().to(dtype) for x in (a, b, p))
    p, loss, step = Parameter(start.clone()), loss_of, given
    if backend is not None:
        loss, step = compiled(backend), collage_fx.compile(given, **options)
    for _ in range(STEPS):
        step(p, loss(p, a, b))
    return collage_fx.value(p).detach() - start.double()


def error(dtype: torch.dtype, backend: str, **options: Any) -> float:
    exact, found = moved(torch.float64, None), moved(dtype, backend, **options)
    return float((found - exact).norm() / exact.norm())


BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@BOTH
def test_it_finds_the_data_of_what_was_noted(dtype: torch.dtype) -> None:
    limit = 1e-4 if dtype is torch.float32 else 1e-2
    assert error(dtype, "kernels", record=True) < limit


@BOTH
@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"record": True}, {"record": False}], ids=str)
def test_inductors_kernels_do(dtype: torch.dtype, options: dict[str, Any]) -> None:
    assert error(dtype, "inductor", **options) < (1e-4 if dtype is torch.float32 else 1e-2)


@pytest.mark.slow
@BOTH
def test_a_function_that_computes_gradients(dtype: torch.dtype) -> None:
    def whole(p: Parameter, a: Tensor, b: Tensor) -> None:
        loss_of(p, a, b).backward()
        assert p.grad is not None
        update(p, p.grad)
        p.grad = None

    torch.compiler.reset()
    generator = torch.Generator().manual_seed(0)
    start, a, b = (torch.randn(16, 16, generator=generator).bfloat16() for _ in range(3))
    exact, found = (Parameter(start.to(d).clone()) for d in (torch.float64, dtype))
    step = collage_fx.compile(whole)
    for _ in range(STEPS):
        whole(exact, a.double(), b.double())
        step(found, a.to(dtype), b.to(dtype))
    way = (exact.detach() - start.double()).norm()
    assert (collage_fx.value(found) - exact).norm() / way < (
        1e-4 if dtype is torch.float32 else 0.1
    )


def test_control_under_the_mode_it_finds_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nested_compile, "_run_compiled", call_func_at_runtime_with_args)
    assert not error(torch.float32, "kernels", record=True) < 1e-4


def test_nothing_is_patched_between_steps() -> None:
    from torch._functorch._aot_autograd import runtime_wrappers

    moved(torch.float32, "kernels", record=True)
    assert runtime_wrappers.call_func_at_runtime_with_args is call_func_at_runtime_with_args
