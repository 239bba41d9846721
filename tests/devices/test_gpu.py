"""On a CUDA device: the kernels against the eager reference, and CUDA graphs. `pytest -m gpu`.

Where there is no such device each test runs on the CPU, by way of the C++ kernels and without CUDA
graphs, in as few cases as show that the test itself works.

For runtime.kernels.triton_launch and passes.codegen.printers.triton_kernel.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphs import differing
from interpreted import members_of, reference, renewed
from kernel_memory import columns_of
from kernels import CASES, kernel_of, rewritten
from torch import Tensor, optim
from torch.optim import Optimizer

import collage_fx
from collage_fx.runtime.torch_versions import installed

pytestmark = pytest.mark.kernels

SHAPES = ((64, 48), (7,), (130, 131), (1,), (3, 5, 7), (1024,), (33, 3), (256, 256))
LAUNCHES = 5
"""All of it takes less than 100 seconds on one GPU, most of which compiles."""


def on(device: str, *values: Any, often: bool = True) -> Any:
    """Return parameters of a test, which needs a GPU unless the device is the CPU."""
    marks = [pytest.mark.gpu] if device == "cuda" else [] if often else [pytest.mark.slow]
    return pytest.param(device, *values, marks=marks)


@pytest.mark.parametrize(
    ("device", "name"), [on("cpu", "sgd-light"), *(on("cuda", name) for name in CASES)]
)
def test_launches_are_the_steps_of_the_eager_reference(device: str, name: str) -> None:
    """Of the reference on the CPU and of that on the device."""
    of_class = rewritten(CASES[name])
    kernel = kernel_of(of_class)
    ours = members_of(of_class, device=device)
    references = [members_of(of_class, device=d) for d in ("cpu", device)]
    assert all(x.data_ptr() % 16 for x in ours[-1] if x.dim())  # a second launch, two bytes at once
    for step in range(LAUNCHES):
        sizes = [max(x.numel() for x in inputs) for inputs in ours]
        with columns_of(kernel, ours) as columns:
            kernel.run(columns, sizes)
        for theirs in references:
            for m, n in zip(ours, theirs, strict=True):
                reference(of_class, n)
                found = [differing(a.cpu(), b.cpu()) for a, b in zip(m, n, strict=True)]
                assert found == [0] * len(n)
                for i in kernel.read:
                    renewed(n[i], step)
        for m, n in zip(ours, references[0], strict=True):
            for i in kernel.read:
                m[i].copy_(n[i])


def trained(
    kind: type[Optimizer], device: str, steps: int = 10, **options: Any
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the parameters after some steps, and their residuals."""
    chosen = {k: options.pop(k) for k in ("multi_tensor", "mode", "arithmetic") if k in options}
    generator = torch.Generator().manual_seed(0)
    params = [
        torch.randn(shape, generator=generator).bfloat16().to(device).requires_grad_()
        for shape in SHAPES
    ]
    for p in params:
        p.grad = torch.empty_like(p)
    step = collage_fx.compile(kind(params, **options), level="plus", **chosen)
    for _ in range(steps):
        for p in params:
            assert p.grad is not None
            p.grad.copy_(torch.randn(p.shape, generator=generator).bfloat16())
        step()
    values = [p.detach().cpu() for p in params]
    return values, [collage_fx.residuals(p)[0].cpu() for p in params]


def total(a: tuple[list[Tensor], ...], b: tuple[list[Tensor], ...]) -> int:
    """Return at how many elements two results differ."""
    pairs = (pair for x, y in zip(a, b, strict=True) for pair in zip(x, y, strict=True))
    return sum(differing(x, y) for x, y in pairs)


def adamw(device: str, **options: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Return what AdamW leaves, with its step counts on the device if that is a GPU."""
    return trained(optim.AdamW, device, **{"capturable": device == "cuda", **options})


@pytest.mark.parametrize("device", [on("cpu", often=False), on("cuda")])
def test_a_step_on_the_gpu_is_that_of_the_cpu(device: str) -> None:
    on_cpu = trained(optim.SGD, "cpu", momentum=0.9, lr=1e-3)
    for multi_tensor in (True, False):
        found = trained(optim.SGD, device, momentum=0.9, lr=1e-3, multi_tensor=multi_tensor)
        assert total(on_cpu, found) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("capturable", [False, True])
def test_one_launch_does_what_a_kernel_for_each_does(capturable: bool) -> None:
    together, apart = (
        adamw("cuda", capturable=capturable, multi_tensor=multi_tensor)
        for multi_tensor in (True, False)
    )
    if installed() < (2, 13):
        # In 2.11 Inductor's 1 / x is approximate. Powers of step counts, which the host takes for
        # a class if they are there, and a kernel of one parameter by itself, are equal: see
        # `decompose.is_rounded_power`.
        for a, b in zip(together[0], apart[0], strict=True):
            assert torch.allclose(a.float(), b.float(), rtol=2**-7, atol=1e-6)
        return
    assert total(together, apart) == 0


# Inductor captures an empty graph to begin with, of which PyTorch warns.
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
@pytest.mark.parametrize("device", [on("cpu", often=False), on("cuda")])
def test_a_replayed_cuda_graph_keeps_its_residuals(device: str) -> None:
    """Of kernels for single parameters: those of classes are launched beside Inductor's graphs."""
    launched, replayed = (
        adamw(device, mode=mode, multi_tensor=False) for mode in (None, "reduce-overhead")
    )
    assert total(launched, replayed) == 0
    assert sum(int(low.count_nonzero()) for low in replayed[1]) > 1000


def graph_of(step: Callable[[], Any]) -> Callable[[], Any]:
    """Take steps as PyTorch wants it, and capture one; return what replays it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


@pytest.mark.parametrize(
    ("device", "by_chance"),
    [on("cpu", True), on("cpu", False, often=False), on("cuda", True), on("cuda", False)],
)
def test_a_step_in_a_cuda_graph_of_the_user(device: str, by_chance: bool) -> None:
    """Replayed twice from the same state: the same words, but for rounding by chance."""
    params = [torch.randn(shape).bfloat16().to(device).requires_grad_() for shape in SHAPES]
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer = optim.AdamW(params, capturable=device == "cuda")
    arithmetic = "wide" if by_chance else "eft"
    step = collage_fx.compile(optimizer, arithmetic=arithmetic, stochastic_rounding=by_chance)
    for _ in range(3):
        step()
    replay = graph_of(step) if device == "cuda" else step
    tensors = [*params, *(t for p in params for t in optimizer.state[p].values())]
    # By .data, so that nothing seems to have been written from outside.
    words = [w.data for t in tensors for w in (t, *collage_fx.residuals(t))]
    start = [word.clone() for word in words]

    def after(advance: Callable[[], Any]) -> list[Tensor]:
        for word, begun in zip(words, start, strict=True):
            word.copy_(begun)
        advance()
        return [word.clone() for word in words]

    launched, *replayed = after(step), after(replay), after(replay)
    assert total((launched,), (start,)) > 1000
    assert (total((launched,), (replayed[0],)) > 0) == by_chance
    assert (total((replayed[0],), (replayed[1],)) > 0) == by_chance


@pytest.mark.parametrize("device", [on("cpu", often=False), on("cuda")])
def test_arithmetic_in_wide_is_near_that_in_eft(device: str) -> None:
    (wide, lows), (eft, _) = (
        adamw(device, arithmetic=arithmetic) for arithmetic in ("wide", "eft")
    )
    assert sum(int(low.count_nonzero()) for low in lows) > 1000
    for a, b in zip(wide, eft, strict=True):
        assert torch.allclose(a.float(), b.float(), rtol=2**-7, atol=1e-4)
