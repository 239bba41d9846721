"""A graph done again in float64: the same numbers as by a float64 copy of the optimizer.

For passes.ir.exact and inspection.monitor.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import repeated_steps, shared_runs
from support.interpreter import without_compiler
from torch import Tensor, optim

import collage_fx
from collage_fx.diagnosis.stats import UpdateStats
from collage_fx.errors import CollageWarning
from collage_fx.inspection.monitor import _Copy, _states
from collage_fx.inspection.update_stats import GraphUpdates
from collage_fx.passes.ir import exact
from collage_fx.runtime.storage.state_name import StateName


class Clipped(optim.Optimizer):
    """Averages of gradients that are divided by the norm of all, in fp32 and in bf16."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-3})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Take one step."""
        params = self.param_groups[0]["params"]
        norm = torch.stack([p.grad.float().norm() for p in params]).norm()
        for p in params:
            state, g = self.state[p], p.grad.float() / norm.clamp(min=1)
            if not state:
                state.update(a=torch.zeros_like(p), b=torch.zeros_like(p, dtype=torch.float32))
            state["a"].lerp_(g.to(p.dtype), 0.01)
            state["b"].mul_(0.99).add_(g * g, alpha=0.01)
            update = torch.tanh(state["a"].float() / (state["b"].sqrt() + 1e-8))
            p.add_(update.to(p.dtype), alpha=-self.param_groups[0]["lr"])


class Noisy(optim.SGD):
    """Adds noise to its gradients."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        """Take one step."""
        for p in self.param_groups[0]["params"]:
            p.grad.add_(torch.randn_like(p))
        return super().step(closure)


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "AdamW": functools.partial(optim.AdamW, lr=1e-4, amsgrad=True),
    "NAdam, foreach": functools.partial(optim.NAdam, lr=1e-4, foreach=True),
    "one of the user's": Clipped,
}


def _params(*, some: int = 3) -> list[Tensor]:
    """Transposed, flat, one of more than one piece, 0-d, and empty; more on request."""
    torch.manual_seed(0)
    made = [torch.randn(6, 4).t(), torch.randn(33), torch.randn(2, exact._ON_CPU)]
    made += [torch.randn(()), torch.randn(0), *(torch.randn(8) for _ in range(some - 3))]
    return [p.bfloat16().requires_grad_() for p in made]


Stats = dict[StateName, UpdateStats]


def _step(optimizer: Any) -> tuple[Stats, Stats | str, str]:
    """Take a step; return what its graphs say of the updates, what a copy does, and why not."""
    for p in optimizer.param_groups[0]["params"]:
        p.grad = torch.randn_like(p) * 0.1
    copy, graphs = _Copy(optimizer, (), {}), GraphUpdates(_states(optimizer))
    with without_compiler():
        graphs.run(optimizer.step, (), {})
    by_copy = copy.exact if isinstance(copy.exact, str) else copy.stats(_states(optimizer))
    return graphs.found if graphs.complete else {}, by_copy, graphs.problem


@pytest.mark.parametrize("storage", ["mcf2", "remainder16"])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.quick("one of the user's-remainder16")
def test_the_numbers_are_those_of_a_float64_copy(name: str, storage: str) -> None:
    optimizer = OPTIMIZERS[name](_params(some=12 if "foreach" in name else 3))
    optimizer.step = collage_fx.compile(optimizer, storage=storage)
    for _ in range(3):
        _step(optimizer)
    found, by_copy, problem = _step(optimizer)
    assert not problem and isinstance(by_copy, dict) and found.keys() == by_copy.keys()
    for state, stats in by_copy.items():
        one, other = found[state].to_dict(), stats.to_dict()
        # Noise is the length of an error, as large as those of which the other numbers are sums.
        assert one.pop("noise") == pytest.approx(other.pop("noise"), rel=1e-4, abs=2e-5), state
        assert one == pytest.approx(other, rel=1e-4, abs=4e-6), state
        assert math.isfinite(one["ulps"]) and found[state].count
    lost = {state for state, stats in found.items() if stats.lost_plain > stats.lost}
    assert lost, "the control: plain bf16 would have lost some"


def test_what_is_made_of_matrices_in_16_bits_is_left_to_a_copy() -> None:
    params = [torch.randn(8, 8).bfloat16().requires_grad_() for _ in range(2)]
    optimizer = optim.Muon(params, lr=1e-3)
    optimizer.step = collage_fx.compile(optimizer)  # type: ignore[method-assign]
    monitor = collage_fx.monitor(optimizer, every=1)
    for _ in range(3):
        found, by_copy, problem = _step(optimizer)
    assert not found and "made of what aten" in problem
    assert isinstance(by_copy, dict) and len(by_copy) == 4
    assert not monitor.problem and len(monitor.latest["states"]) == 4


def test_graphs_that_are_too_large_to_keep_are_left_to_a_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exact, "LARGEST", 10)
    optimizer = optim.SGD(_params(), lr=1e-3)
    optimizer.step = collage_fx.compile(optimizer)  # type: ignore[method-assign]
    monitor = collage_fx.monitor(optimizer, every=2)
    for _ in range(2):
        found, by_copy, problem = _step(optimizer)
    assert not found and not problem and isinstance(by_copy, dict)
    assert not monitor.problem and len(monitor.latest["states"]) == 4


def test_steps_that_a_copy_cannot_take_are_measured_by_their_graphs() -> None:
    optimizer: Any = Noisy(_params(), lr=1e-2)
    optimizer.step = collage_fx.compile(optimizer)
    optimizer.register_step_post_hook(lambda *_: None)
    monitor = collage_fx.monitor(optimizer, every=2)
    for _ in range(4):
        found, by_copy, problem = _step(optimizer)
    assert isinstance(by_copy, str), "the control: it has hooks, and draws random numbers"
    assert not problem and not monitor.problem
    assert len(found) == len(monitor.latest["states"]) == 4
    # Gradients are drawn by one graph, and used by another: with others it would be off by one.
    assert all(abs(stats.edq - 1) < 5e-3 for stats in found.values())


class Decaying(optim.SGD):
    """Writes its parameters twice in a step, the first time in a graph of its own."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        """Take one step."""
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p.mul_(0.99)
        return super().step(closure)


def _clamp(optimizer: Any, *_: Any) -> None:
    with torch.no_grad():
        for p in optimizer.param_groups[0]["params"]:
            p.clamp_(-0.5, 0.5)


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.quick("3")
def test_a_state_that_is_written_twice_is_left_to_a_copy(every: int) -> None:
    optimizer: Any = Decaying(_params(), lr=1e-3)
    optimizer.step = collage_fx.compile(optimizer)
    monitor = collage_fx.monitor(optimizer, every=every)
    for _ in range(6):
        found, by_copy, _ = _step(optimizer)
        assert not found
    assert isinstance(by_copy, dict)
    assert not monitor.problem and len(monitor.history) == 6 // every
    for name, stats in by_copy.items():
        assert monitor.latest["states"][str(name)] == pytest.approx(stats.to_dict())
        assert stats.count <= (1 << 16), "the control: counted once"


@pytest.mark.slow
def test_what_a_hook_writes_is_no_update_of_a_graph() -> None:
    optimizer: Any = optim.AdamW(_params(), lr=1e-3)
    optimizer.step = collage_fx.compile(optimizer)
    optimizer.register_step_post_hook(_clamp)
    monitor = collage_fx.monitor(optimizer, every=3)
    with pytest.warns(CollageWarning, match="steps with hooks are not compared"):
        for _ in range(3):
            found, _, _ = _step(optimizer)
            assert not found
    assert monitor.problem and not monitor.history


@pytest.mark.slow
def test_nothing_is_copied_where_graphs_show_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise MemoryError("a copy is made")

    optimizer: Any = optim.AdamW(_params(), lr=1e-3)
    optimizer.step = collage_fx.compile(optimizer)
    monitor = collage_fx.monitor(optimizer, every=4)
    with monkeypatch.context() as patch:
        patch.setattr("collage_fx.inspection.monitor.exact_step", refuse)
        for _ in range(4):
            for p in optimizer.param_groups[0]["params"]:
                p.grad = torch.randn_like(p)
            with without_compiler():
                optimizer.step()
        assert len(monitor.latest["states"]) == 12 and not monitor.problem
        # The control: an optimizer that is not compiled is measured by a copy, and goes on.
        plain = optim.SGD(_params(), lr=1e-3)
        other = collage_fx.monitor(plain, every=1)
        with pytest.warns(CollageWarning, match="MemoryError: a copy is made"):
            plain.step()
    assert other.problem and not other.history


def test_random_numbers_in_an_update_are_said() -> None:
    class Langevin(optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {})

        @torch.no_grad()
        def step(self) -> None:  # type: ignore[override]
            for p in self.param_groups[0]["params"]:
                p.add_(p.grad + torch.randn_like(p), alpha=-1e-3)

    optimizer: Any = Langevin(_params())
    optimizer.step = collage_fx.compile(optimizer)
    monitor = collage_fx.monitor(optimizer, every=2)
    with pytest.warns(CollageWarning, match="cannot measure the updates"):
        for _ in range(2):
            found, by_copy, problem = _step(optimizer)
    assert not found and problem and isinstance(by_copy, str) and monitor.problem


@pytest.mark.kernels
def test_the_steps_between_are_repeated_without_python(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = []
    for watched in (False, True):
        torch.compiler.reset()
        optimizer = repeated_steps.made(optim.AdamW, "mcf2", lr=1e-3)
        monitor = collage_fx.monitor(optimizer, every=4) if watched else None
        with repeated_steps.counted(monkeypatch, allowed=True) as repeats:
            repeated_steps.trained(optimizer, 16)
        ends.append(repeated_steps.values(optimizer))
    assert monitor is not None and [one.step for one in monitor.history] == [4, 8, 12, 16]
    # Counted from 0.
    assert not {7, 11, 15} & set(repeats) and {8, 9, 10, 12, 13, 14} <= set(repeats)
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


@pytest.mark.kernels
def test_a_graph_that_optimizers_share_shows_each_its_own_states() -> None:
    params = shared_runs.parameters()
    optimizers = shared_runs.compiled(lambda some: optim.AdamW(some, lr=1e-4), params)
    monitors = [collage_fx.monitor(one, every=2) for one in optimizers]
    shared_runs.train(optimizers, 4)
    for p, optimizer, monitor in zip(params, optimizers, monitors, strict=True):
        p.grad = torch.ones_like(p)
        found, by_copy, problem = _step(optimizer)
        assert isinstance(by_copy, dict) and not problem and not monitor.problem
        assert found.keys() == by_copy.keys() and len(found) == 3
        for state, stats in by_copy.items():
            assert found[state].to_dict() == pytest.approx(stats.to_dict(), rel=1e-4, abs=4e-6)
