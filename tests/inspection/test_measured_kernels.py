"""Members measured by a compiled kernel: the sums of PyTorch's operations on the same members.

For passes.codegen.printers.measured_kernel, inspection.update_stats and diagnosis.stats.
"""

import ctypes
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from support.interpreter import without_compiler
from torch import Tensor, optim
from torch.fx import Graph

import collage_fx
from collage_fx.diagnosis.stats import UpdateStats
from collage_fx.inspection import update_stats
from collage_fx.inspection.update_stats import _of_compiled, stats_of
from collage_fx.passes.codegen.printers import cpp_kernel, measured_kernel
from collage_fx.passes.codegen.printers.cpp_kernel import print_cpp_kernel
from collage_fx.passes.codegen.printers.measured_kernel import sums_of
from collage_fx.passes.ir.exact import Function, Member, piece_for
from collage_fx.runtime.kernels.update_sums import compiled

COUNTS = ("count", "lost_plain_count", "lost_count", "infinities")
CLOSE = 1e-12
Both = list[tuple[UpdateStats | None, UpdateStats]]
"""Sums of each state of each member: by its kernel, if it has one, and by PyTorch's operations."""


class Signs(optim.Optimizer):
    """Moves parameters by the sign of an average, and by functions that PyTorch has by itself."""

    update: Callable[[Tensor, Tensor], Tensor]

    def __init__(self, params: Any, update: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__(params, {})
        self.update = update

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Take one step."""
        for p in self.param_groups[0]["params"]:
            state, g = self.state[p], p.grad
            if not state:
                state.update(a=torch.zeros_like(p), b=torch.zeros_like(p, dtype=torch.float32))
            state["b"].mul_(0.99).addcmul_(g.float(), g.float(), value=0.01)
            p.add_(self.update(state["a"], state["b"]), alpha=-1e-3)
            state["a"].lerp_(g, 0.01)


def _lion(a: Tensor, b: Tensor) -> Tensor:
    return a.sign()


def _many(a: Tensor, b: Tensor) -> Tensor:
    x = torch.tanh(a / (b.pow(0.3) + 1e-8)) + a.exp().log1p() * b.rsqrt().clamp(max=2.0)
    return torch.where(x > 0, torch.maximum(x, b), torch.sigmoid(x)).to(a.dtype)


def _unprintable(a: Tensor, b: Tensor) -> Tensor:
    return (a * torch.lgamma(b + 1)).to(a.dtype)


CASES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "AdamW": (functools.partial(optim.AdamW, lr=1e-4, amsgrad=True), "mcf2"),
    "Adam": (functools.partial(optim.Adam, lr=1e-4, weight_decay=0.1), "remainder16"),
    "SGD": (functools.partial(optim.SGD, lr=1e-3, momentum=0.9, nesterov=True), "remainder16"),
    "Adagrad": (functools.partial(optim.Adagrad, lr=1e-3), "mcf3"),
    "Lion": (functools.partial(Signs, update=_lion), "mcf2"),
    "fp16": (functools.partial(optim.AdamW, lr=1e-3, eps=1e-4), "ulp8"),
    "functions of the C library": (functools.partial(Signs, update=_many), "ulp8"),
}


def _params(dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """Transposed, flat, and one of more than one piece with a last block that is not full."""
    torch.manual_seed(0)
    long = piece_for(torch.device("cpu")) + 77
    made = [torch.randn(6, 4).t(), torch.randn(33), torch.randn(long)]
    return [p.to(dtype).requires_grad_() for p in made]


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> Iterator[Both]:
    """Measure all members in both ways."""
    found: Both = []

    def measured(members: Sequence[Member], least: float) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(measured_kernel, "compiled", compiled)
            by_threads = []
            for threads in (1, 3):
                patch.setattr(torch, "get_num_threads", lambda n=threads: n)
                by_threads.append(sums_of(members, least))
            sums, again = by_threads
        assert sums == again, "bit for bit, by however many threads"
        for member, one in zip(members, sums, strict=True):
            slow: dict[int, UpdateStats] = {}
            for state, *tensors in member.updates():
                before = slow.get(state.data_ptr(), UpdateStats())
                slow[state.data_ptr()] = before + stats_of(*tensors)
            dtypes = [words.high.dtype for words in member.new]
            fast = [_of_compiled(list(x), d) for x, d in zip(one or (), dtypes, strict=False)]
            found.extend(zip(fast or [None] * len(slow), slow.values(), strict=True))
        return sums

    monkeypatch.setattr(update_stats, "sums_of", measured)
    yield found


def _train(optimizer: Any, storage: str, *, steps: int = 3, finite: bool = False) -> Any:
    """Take some steps, of which the last is measured, with some infinities if not `finite`."""
    optimizer.step = collage_fx.compile(optimizer, storage=storage)
    monitor = collage_fx.monitor(optimizer, every=steps)
    params = optimizer.param_groups[0]["params"]
    with without_compiler():
        for step in range(steps):
            for p in params:
                p.grad = (torch.randn_like(p, dtype=torch.float32) * 0.1).to(p.dtype)
            if step == steps - 1 and not finite:
                params[0].grad[:2] = 0
                params[1].grad[3], params[2].grad[5] = math.inf, math.nan
                params[2].data[7] = math.inf
            optimizer.step()
    assert not monitor.problem and len(monitor.history) == 1
    return monitor


def _equal(one: UpdateStats, other: UpdateStats) -> bool:
    names = [n for n in UpdateStats.__slots__ if n not in COUNTS]
    near = [getattr(one, n) == pytest.approx(getattr(other, n), rel=CLOSE, abs=0) for n in names]
    return all(near) and all(getattr(one, n) == getattr(other, n) for n in COUNTS)


@pytest.mark.kernels
@pytest.mark.parametrize("case", CASES)
@pytest.mark.quick("AdamW")
def test_sums_are_those_of_pytorch_operations(case: str, both: Both) -> None:
    make, storage = CASES[case]
    _train(make(_params(torch.float16 if case == "fp16" else torch.bfloat16)), storage)
    assert len(both) >= 3
    for fast, slow in both:
        assert fast is not None and _equal(fast, slow), (fast, slow)
    assert sum(slow.infinities for _, slow in both) >= 3, "the control: some are not finite"
    assert all(slow.count for _, slow in both) and any(slow.lost_plain_count for _, slow in both)


@pytest.mark.kernels
def test_a_kernel_that_rounds_to_fp32_is_found(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: sums of updates that are rounded to fp32 are not close enough."""
    original = measured_kernel.print_measured_kernel

    def rounding(function: Function, signature: Any) -> str:
        def rounded(*values: Tensor) -> tuple[Tensor, ...]:
            return tuple(x.float().double() for x in function(*values))

        return original(rounded, signature)

    monkeypatch.setattr(measured_kernel, "print_measured_kernel", rounding)
    _train(optim.SGD(_params(), lr=1e-3), "mcf2")
    for fast, slow in both:
        assert fast is not None and not _equal(fast, slow)
        assert fast.exact_square == pytest.approx(slow.exact_square, rel=0.01)


def _spread() -> list[Tensor]:
    return [torch.randn(8, 8).bfloat16()[:, ::2].requires_grad_() for _ in range(2)]


def _scalars() -> list[Tensor]:
    return [torch.randn(()).bfloat16().requires_grad_() for _ in range(2)]


@pytest.mark.kernels
def test_operations_that_only_measured_kernels_have_are_those_of_pytorch() -> None:
    graph, values = Graph(), [torch.rand(100, dtype=torch.float64) + 0.1 for _ in range(3)]
    inputs, expected = [graph.placeholder(f"x{i}") for i in range(3)], []
    made = []
    for op in cpp_kernel._LIBM:
        takes = ["Tensor" in str(a.type) for a in op._schema.arguments if not a.kwarg_only]
        kwargs = {a.name: -0.7 for a in op._schema.arguments if a.kwarg_only}
        numbers = [0.3] * takes.count(False)
        made.append(graph.call_function(op, (*inputs[: sum(takes)], *numbers), kwargs))
        expected.append(op(*values[: sum(takes)], *numbers, **kwargs))
    memory = [graph.placeholder(f"memory{k}") for k in range(len(made))]
    graph.output(tuple(made))
    for node in graph.nodes:
        node.meta["dtype"] = torch.float64
    stored = range(3, 3 + len(memory))
    source, _ = print_cpp_kernel(
        graph, [False] * (3 + len(made)), stored, range(len(made)), libm=True
    )
    found = [torch.empty_like(x) for x in expected]
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (*values, *found)]
    compiled(source).kernel(*pointers, ctypes.c_int64(100))
    for op, x, y in zip(cpp_kernel._LIBM, found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-14, atol=1e-15, msg=str(op))


LEFT: dict[str, Callable[[], Any]] = {
    "an operation without text": lambda: Signs(_params(), _unprintable),
    "fp8": lambda: optim.SGD(_params(torch.float8_e5m2), lr=1e-3),
    "0-d": lambda: optim.SGD(_scalars(), lr=1e-3),
    "not dense": lambda: optim.SGD(_spread(), lr=1e-3),
}


@pytest.mark.parametrize("case", LEFT)
@pytest.mark.quick("not dense", "0-d", "fp8")
def test_other_members_are_left_to_pytorch_operations(case: str, both: Both) -> None:
    monitor = _train(LEFT[case](), "mcf2", finite=True)
    assert both and all(fast is None and slow.count for fast, slow in both)
    assert len(monitor.latest["states"]) == len(both)


def test_without_a_compiler_of_cpp_members_are_left_too(
    both: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []
    monkeypatch.setitem(globals(), "compiled", tried.append)
    monitor = _train(optim.SGD(_params(), lr=1e-3), "mcf2", finite=True)
    assert len(tried) == 1, "of three members that are alike"
    assert both and all(fast is None for fast, _ in both)
    assert len(monitor.latest["states"]) == len(both)
