"""Classes of few members: on a CPU our own kernels whatever their number, on a GPU Inductor's.

For passes.codegen.multi_tensor_kernel.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphs import capture_optimizer, differing
from torch import Tensor
from virtual_gpu import on_gpu, virtual_gpu

import collage_fx
from collage_fx.passes.codegen.multi_tensor_kernel import MULTI_TENSOR_KERNELS
from collage_fx.passes.ir.program import Settings
from collage_fx.passes.rewrite import expand

STEPS = 12
KINDS: dict[str, Callable[[list[Tensor]], Any]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-4),
    "SGD": lambda params: torch.optim.SGD(params, lr=1e-4, momentum=0.9),
}
WAYS: dict[str, dict[str, Any]] = {
    "eft": {"level": "plus"},
    "remainder16": {"level": "plus", "storage": "remainder16"},
}


def start(count: int, dtype: torch.dtype) -> list[Tensor]:
    """Parameters of different sizes, one of which is more than a vector."""
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(2 + 31 * i, 3, generator=generator).bfloat16() for i in range(count)]
    return [v.to(dtype).requires_grad_() for v in values]


def trained(params: list[Tensor], step: Callable[[], Any]) -> None:
    """Take steps on a fixed stream of gradients."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator).bfloat16().to(p.dtype)
        step()


def words(params: list[Tensor], optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """High words and residuals of all states."""
    states = [t for p in params for t in (p.detach(), *optimizer.state[p].values())]
    return [word for t in states for word in (t, *collage_fx.residuals(t))]


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.quick("AdamW-eft-1", "SGD-eft-3")
def test_a_class_of_any_number_has_one_kernel_on_a_cpu(kind: str, way: str, count: int) -> None:
    """The bits of Inductor's kernels; each class is updated as a whole."""
    torch.compiler.reset()
    found = {}
    for multi_tensor in ("auto", False):
        params = start(count, torch.bfloat16)
        optimizer = KINDS[kind](params)
        options: dict[str, Any] = {**WAYS[way], "multi_tensor": multi_tensor}
        step = collage_fx.compile(optimizer, **options)
        session = step._collage  # type: ignore[attr-defined]
        session.keep = True
        trained(params, step)
        apart = {r.apart for c in session.compiled for r in c.program.rewritten}
        assert apart == ({""} if multi_tensor else {"multi_tensor=False"})
        found[multi_tensor] = words(params, optimizer)
    assert not any(map(differing, found["auto"], found[False]))


@pytest.mark.kernels
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.quick("remainder16")
def test_compiled_kernels_of_one_and_of_three_follow_float64(way: str) -> None:
    """Ours, to what the storage keeps; plain bf16 is far from it, the control."""
    torch.compiler.reset()
    MULTI_TENSOR_KERNELS.clear()
    for count in (1, 3):
        exact = start(count, torch.float64)
        trained(exact, KINDS["AdamW"](exact).step)
        begin = start(count, torch.float64)
        params, plain = start(count, torch.bfloat16), start(count, torch.bfloat16)
        trained(params, collage_fx.compile(KINDS["AdamW"](params), **WAYS[way]))
        trained(plain, KINDS["AdamW"](plain).step)

        def lost(values: list[Tensor], exact: Any = exact, begin: Any = begin) -> float:
            """The error relative to the way that the parameters went."""
            off = torch.cat([(v - e).flatten() for v, e in zip(values, exact, strict=True)])
            moved = torch.cat([(b - e).flatten() for b, e in zip(begin, exact, strict=True)])
            return float(off.detach().norm() / moved.detach().norm())

        assert lost([collage_fx.value(p).detach() for p in params]) < 0.02
        assert lost([p.detach().double() for p in plain]) > 0.2
    kernels = MULTI_TENSOR_KERNELS.values()
    assert kernels and not any(k.by_inductor for k in kernels)
    assert all("#pragma omp simd" in k.sources["cpu"] for k in kernels)


def test_members_that_differ_in_strides_are_left_to_inductor() -> None:
    """And the reason is the one that they have, not their number."""
    p = torch.ones(2, 3, 4, 4).bfloat16().to(memory_format=torch.channels_last).requires_grad_()
    p.grad = torch.ones(2, 3, 4, 4).bfloat16()
    found = collage_fx.explain(torch.optim.SGD([p], lr=1e-4))
    (why,) = found.apart
    assert why.startswith("the tensors of a member differ in shape or strides")


@pytest.mark.parametrize("count, multi_tensor", [(7, "auto"), (8, "auto"), (1, True)])
def test_on_a_gpu_the_choice_is_by_number(count: int, multi_tensor: Any) -> None:
    capture = capture_optimizer(torch.optim.SGD, shapes=((4, 3),) * count, lr=1e-3)
    settings = Settings(multi_tensor=multi_tensor)
    with virtual_gpu():
        classes = on_gpu(capture, settings).rewritten
    assert [r.apart for r in classes] == ["fewer than 8 members" if count == 7 else ""]


class Beside(torch.optim.Optimizer):
    """A slow copy in another memory format, which the parameter is drawn to."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            h = p.grad + 0.1 * p
            state["z"].sub_(1e-3 * (h / (h.abs() + 1e-8)))
            p.lerp_(state["z"], 0.1)


def test_a_value_is_whole_where_it_is_copied_into_another_format(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def compiled(optimizer: torch.optim.Optimizer) -> Any:
        return collage_fx.compile(optimizer, storage="mcf2")

    def error() -> float:
        torch.compiler.reset()
        values = 1 + torch.randn(2, 3, 2, 2, generator=torch.Generator().manual_seed(0)) / 4
        low = values.bfloat16().to(memory_format=torch.channels_last)
        runs = []
        for p in (low.requires_grad_(), low.detach().double().requires_grad_()):
            optimizer = Beside([p], {})
            optimizer.state[p]["z"] = p.detach().clone(memory_format=torch.contiguous_format)
            step = optimizer.step if p.dtype == torch.float64 else compiled(optimizer)
            runs.append((p, step))
        for k in range(10):
            g = torch.randn(low.shape, generator=torch.Generator().manual_seed(k)).bfloat16()
            for p, step in runs:
                p.grad = torch.empty_like(p).copy_(g)
                step()
        ours, exact = (collage_fx.value(p) for p, _ in runs)
        return float((ours - exact).abs().max())

    assert error() < 1.5e-4  # updates are rounded to bf16 by eft
    monkeypatch.setattr(expand, "_COPIES", frozenset())
    assert error() > 5e-4
