"""Classes that share a kernel: their members must not see each other's new values.

For passes.codegen.multi_tensor_kernel and passes.codegen.inductor_kernel.
"""

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from graphs import OPTIMIZERS, capture_optimizer, named
from kernels import SM90, assembled
from torch import Tensor
from torch.optim import Optimizer

import collage_fx
from collage_fx.passes.codegen import inductor_kernel, kernel_cache, multi_tensor_kernel
from collage_fx.passes.codegen.inductor_kernel import CallPerMember
from collage_fx.passes.codegen.multi_tensor_kernel import MULTI_TENSOR_KERNELS
from collage_fx.passes.codegen.printers.cpp_kernel import Unprintable
from collage_fx.runtime.kernels.cpp_loop import CHUNK, Loop

COUNT = 5


class Written(Optimizer):
    """An optimizer whose step is a function of the parameters, the gradients and the states."""

    def __init__(self, params: list[Tensor], update: Callable[..., Any]) -> None:
        super().__init__(params, {})
        self.update = update
        for p in params:
            self.state[p] |= {"t": torch.tensor(1.0), "m": torch.zeros_like(p)}

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        params = self.param_groups[0]["params"]
        self.update(params, [p.grad for p in params], [self.state[p] for p in params])


def running_mean(params: list[Tensor], grads: list[Tensor], states: list[Any]) -> None:
    for p, g, s in zip(params, grads, states, strict=True):
        s["m"].mul_(s["t"])  # the old count
        s["t"].add_(1)
        s["m"].add_(g).div_(s["t"])
        p.add_(s["m"], alpha=-0.01)


def in_place_operators(params: list[Tensor], grads: list[Tensor], states: list[Any]) -> None:
    for p, g, s in zip(params, grads, states, strict=True):
        s["t"] += 1
        s["m"] *= 0.9
        s["m"] += 0.1 * g
        p -= 0.01 * s["m"] / (1 - 0.9 ** s["t"])


def of_the_next(params: list[Tensor], grads: list[Tensor], states: list[Any]) -> None:
    """Each parameter takes the momentum of the next one, before or after that is updated."""
    for i, (p, g) in enumerate(zip(params, grads, strict=True)):
        s, other = states[i], states[(i + 1) % len(states)]
        s["m"].mul_(0.9).add_(g)
        p.sub_(0.01 * other["m"].view_as(p))


def two_classes(params: list[Tensor], grads: list[Tensor], states: list[Any]) -> None:
    half = len(params) // 2
    pairs = zip(params[:half], params[half:], grads, states, strict=False)
    for p, q, g, s in pairs:
        p.mul_(0.999)
        s["m"].mul_(0.9).add_(g)
        q.sub_(0.01 * s["m"] * torch.sqrt(s["t"]))  # the old count, in another class
        s["t"].add_(1)
        p.sub_(0.01 * g / s["t"])


@pytest.mark.parametrize(
    "update",
    [
        running_mean,
        in_place_operators,
        of_the_next,
        pytest.param(two_classes, marks=pytest.mark.kernels),
    ],
)
@pytest.mark.quick("two_classes")
def test_a_shared_step_is_equal_to_one_of_single_kernels(update: Callable[..., Any]) -> None:
    results = []
    for multi_tensor in (False, True):
        generator = torch.Generator().manual_seed(0)
        params = [
            torch.randn(4, 3, generator=generator).bfloat16().requires_grad_() for _ in range(COUNT)
        ]
        for p in params:
            p.grad = torch.randn(4, 3, generator=generator).bfloat16()
        optimizer = Written(params, update)
        step = collage_fx.compile(optimizer, multi_tensor=multi_tensor, storage="mcf2")
        for _ in range(4):
            step()
        states = [t for p in params for t in (p, *optimizer.state[p].values())]
        results.append(torch.cat([collage_fx.value(t).flatten() for t in states]))
    assert torch.equal(*results)


@pytest.fixture
def _own_kernels() -> Iterator[None]:
    """Give graphs that other tests have left their kernels back."""
    with mock.patch.dict(MULTI_TENSOR_KERNELS):
        yield


@pytest.mark.kernels
@pytest.mark.usefixtures("_own_kernels")
def test_members_of_any_size_are_equal_by_our_kernel_and_by_inductors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a loop over it or, where there is none, called for each member."""

    def unprintable(*_: Any, **__: Any) -> None:
        raise Unprintable("for a test")

    results = []
    for kind, source in ((Loop, "round_bf16"), (Loop, "cpp_fused"), (CallPerMember, "cpp_fused")):
        MULTI_TENSOR_KERNELS.clear()
        monkeypatch.setattr(kernel_cache, "load", lambda place: None)
        if source == "cpp_fused":
            monkeypatch.setattr(multi_tensor_kernel, "print_cpp_kernel", unprintable)
        if kind is CallPerMember:
            monkeypatch.setattr(inductor_kernel, "loop_over", lambda *_: None)
        generator = torch.Generator().manual_seed(1)
        shapes = [(n, 3 + n % 2) for n in range(1, 6)]
        params = [torch.randn(s, generator=generator).bfloat16() for s in shapes]
        for p in params:
            p.requires_grad_().grad = torch.randn(p.shape, generator=generator).bfloat16()
        optimizer = Written(params, running_mean)
        step = collage_fx.compile(optimizer, multi_tensor=True, storage="mcf2")
        for _ in range(3):
            step()
        kernels = MULTI_TENSOR_KERNELS.values()
        assert kind in {type(k.runners["cpu"]) for k in kernels if source in k.sources["cpu"]}
        states = [t for p in params for t in (p, *optimizer.state[p].values())]
        results.append(torch.cat([collage_fx.value(t).flatten() for t in states]))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def flat_gradient(params: list[Tensor], flat: Tensor) -> None:
    """Views of one buffer, which is zeroed at the end."""
    start = 0
    for p in params:
        p.sub_(0.01 * flat[start : start + p.numel()].view(p.shape))
        start += p.numel()
    flat.zero_()


def delayed(params: list[Tensor], momenta: list[Tensor], grads: list[Tensor]) -> None:
    for p, m, g in zip(params, momenta, grads, strict=True):
        p.sub_(0.01 * m.view(p.shape))
        m.mul_(0.9).add_(g.flatten())


@pytest.fixture
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.kernels
@pytest.mark.usefixtures("_two_threads")
def test_threads_share_large_members_and_take_small_ones_in_turn() -> None:
    sizes = [1, 5, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 7, 64, 64]

    def trained(**options: Any) -> list[Tensor]:
        torch.manual_seed(0)
        params = [torch.randn(n).bfloat16().requires_grad_() for n in sizes]
        optimizer = torch.optim.SGD(params, lr=1e-3, momentum=0.9)
        step = collage_fx.compile(optimizer, **options)
        for _ in range(4):
            for p in params:
                p.grad = torch.randn_like(p)
            step()
        return [collage_fx.value(p).detach() for p in params]

    together, each = trained(multi_tensor=True), trained(multi_tensor=False)
    assert all(map(torch.equal, together, each))


def test_views_of_what_is_overwritten_are_read_before() -> None:
    results = []
    for multi_tensor in (False, True):
        generator = torch.Generator().manual_seed(0)

        def some(*shape: int, generator: torch.Generator = generator) -> list[Tensor]:
            return [torch.randn(shape, generator=generator).bfloat16() for _ in range(COUNT)]

        params, momenta, grads = some(4, 4), some(16), some(4, 4)
        options: dict[str, Any] = {"level": "light", "multi_tensor": multi_tensor}
        first = collage_fx.compile(flat_gradient, **options)
        second = collage_fx.compile(delayed, **options)
        for _ in range(3):
            first(params, torch.cat([g.flatten() for g in grads]))
            second(params, momenta, grads)
        results.append(torch.cat([collage_fx.value(t).flatten() for t in params + momenta]))
    assert torch.equal(*results)


@pytest.mark.parametrize("kind, options", OPTIMIZERS, ids=named)
@pytest.mark.quick("Rprop-foreach=True")
def test_every_kernel_of_torch_can_be_printed(kind: Any, options: dict[str, Any]) -> None:
    before = set(MULTI_TENSOR_KERNELS)
    program = capture_optimizer(kind, shapes=((4, 3),) * 2, **options).program()
    keys = {str(n.args[-1]) for n in program.result.graph.nodes if "multi_tensor" in str(n.target)}  # type: ignore[union-attr]
    assert keys and keys >= set(MULTI_TENSOR_KERNELS) - before
    for key in keys:
        assert "def multi_tensor(" in MULTI_TENSOR_KERNELS[key].triton()


def test_a_kernel_of_step_counts_is_compiled_for_a_gpu() -> None:
    program = capture_optimizer(torch.optim.AdamW, shapes=((4, 3),) * 2).program()
    kernels = [n for n in program.result.graph.nodes if "multi_tensor" in str(n.target)]  # type: ignore[union-attr]
    source = MULTI_TENSOR_KERNELS[str(kernels[0].args[-1])].triton()
    assert "libdevice.pow" in source
    assert "ptx" in assembled(source, SM90, aligned=False)
