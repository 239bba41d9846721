"""Guards that Dynamo forgets: states that a step makes, uneven DTensors, counts in float64.

For hooks.traces.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from interpreter import without_compiler
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import Parameter
from torch.testing._internal.distributed.fake_pg import FakeStore

import collage_fx
from collage_fx.dynamo import backend
from collage_fx.hooks import traces
from collage_fx.runtime.torch_versions import installed

pytestmark = pytest.mark.filterwarnings("ignore:.*nothing needed compensation")


class Wrapper(torch.optim.Optimizer):
    """Hands steps on, as wrappers do that share groups and states with what they wrap."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer.param_groups, {})
        self.param_groups, self.state = optimizer.param_groups, optimizer.state
        self.optimizer = optimizer

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        self.optimizer.step()


def by_wrapper(optimizer: Any) -> Callable[[], Any]:
    return collage_fx.compile(Wrapper(optimizer))


def by_function(optimizer: Any) -> Callable[[], Any]:
    def step() -> None:
        optimizer.step()

    return collage_fx.compile(step)


def by_string(optimizer: Any) -> Callable[[], Any]:
    step: Callable[[], Any] = torch.compile(Wrapper(optimizer).step, backend="collage")
    return step


def value_after(step: Callable[[], Any], p: Tensor) -> Tensor:
    """Return a parameter after four steps with gradients of one."""
    with without_compiler():
        for _ in range(4):
            p.grad = torch.ones_like(p)
            step()
    return collage_fx.value(p).detach()


def momentum(compiled: Callable[[Any], Callable[[], Any]], dtype: torch.dtype) -> Tensor:
    """Return a parameter after steps of SGD, the group before it being frozen."""
    torch.compiler.reset()
    frozen, p = (torch.zeros(2, 2, dtype=dtype, requires_grad=True) for _ in range(2))
    optimizer = torch.optim.SGD([{"params": [frozen]}, {"params": [p]}], lr=0.125, momentum=0.5)
    return value_after(compiled(optimizer), p)


@pytest.mark.parametrize("compiled", [by_wrapper, by_function, by_string])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.quick("dtype0-by_wrapper")
def test_a_state_that_the_step_makes_is_used_by_the_next(
    compiled: Callable[[Any], Callable[[], Any]], dtype: torch.dtype
) -> None:
    exact = momentum(lambda optimizer: optimizer.step, torch.float64)
    assert torch.allclose(momentum(compiled, dtype), exact, rtol=0, atol=1e-6)


class Numbered(torch.optim.Optimizer):
    """Counts its steps where the classes of torch.optim make their states."""

    def _init_group(self, group: dict[str, Any], counts: list[int]) -> None:
        for p in group["params"]:
            counts.append(self.state[p].setdefault("k", 0))
            self.state[p]["k"] += 1

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            counts: list[int] = []
            self._init_group(group, counts)
            for p, k in zip(group["params"], counts, strict=True):
                p.sub_(p.grad * (1e-3 / (1 + k)))


def way_of_counting(compiled: Callable[[Any], Callable[[], Any]], dtype: torch.dtype) -> Tensor:
    torch.compiler.reset()
    p = torch.ones(2, dtype=dtype, requires_grad=True)
    return value_after(compiled(Numbered([p], {})), p)


@pytest.mark.parametrize("compiled", [collage_fx.compile, by_wrapper, by_function, by_string])
@pytest.mark.quick("compile", "by_string")
def test_what_init_group_counts_is_counted_in_each_step(
    compiled: Callable[[Any], Callable[[], Any]],
) -> None:
    exact = way_of_counting(lambda optimizer: optimizer.step, torch.float64)
    assert torch.allclose(way_of_counting(compiled, torch.bfloat16), exact, rtol=0, atol=1e-6)


class Aged(torch.optim.AdamW):
    """Makes a tensor where AdamW makes its states."""

    def _init_group(self, group: Any, *lists: Any) -> Any:
        found = super()._init_group(group, *lists)  # type: ignore[misc]
        for p in group["params"]:
            self.state[p].setdefault("age", torch.zeros(()))
        return found


def test_what_only_makes_tensors_is_called_as_torch_has_it_called() -> None:
    torch.compiler.reset()
    p = torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
    optimizer = Aged([p], lr=1e-4, foreach=True)
    step = collage_fx.compile(optimizer)
    assert float(1 - value_after(step, p)[0]) == pytest.approx(4e-4, rel=2e-2)
    served = {s.name: (s.graph, s.joined) for s in collage_fx.report(step).states}
    assert set(served.values()) == {(3, 1)}, served
    assert optimizer.state[p]["age"] == 0


class Listed(torch.optim.Optimizer):
    """Makes its states, and puts its parameters in a list, by one call."""

    def _init_group(self, group: dict[str, Any], params: list[Tensor]) -> None:
        for p in group["params"]:
            self.state[p].setdefault("m", torch.zeros_like(p))
            params.append(p)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            params: list[Tensor] = []
            self._init_group(group, params)
            for p in params:
                p.sub_(self.state[p]["m"].mul_(0.9).add_(p.grad), alpha=1e-4)


def moved(cls: Any, compiled: Callable[[Any], Callable[[], Any]], dtype: torch.dtype) -> float:
    torch.compiler.reset()
    p = torch.ones(2, dtype=dtype, requires_grad=True)
    return float(1 - value_after(compiled(cls([p], {})), p)[0])


@pytest.mark.parametrize("compiled", [collage_fx.compile, by_string])
def test_each_parameter_is_in_a_list_once(
    compiled: Callable[[Any], Callable[[], Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control tries `_init_group` with the list that Dynamo then calls it with."""

    exact = moved(Listed, lambda optimizer: optimizer.step, torch.float64)
    assert moved(Listed, compiled, torch.bfloat16) == pytest.approx(exact, rel=1e-3)
    original = traces._args

    def one_list(item: Any, *args: Any, **kwargs: Any) -> Any:
        return known.setdefault(id(item), original(item, *args, **kwargs))

    known: dict[int, Any] = {}
    monkeypatch.setattr(traces, "_args", one_list)
    assert moved(Listed, compiled, torch.bfloat16) > 1.5 * exact


class ByName(Listed):
    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            params: list[Tensor] = []
            self._init_group(group=group, params=params)
            for p in params:
                p.sub_(self.state[p]["m"].mul_(0.9).add_(p.grad), alpha=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("compiled", [collage_fx.compile, by_string])
def test_a_list_that_is_given_by_name_is_filled(
    compiled: Callable[[Any], Callable[[], Any]],
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The control: stock leaves it empty, so that nothing is updated."""

    exact = moved(ByName, lambda optimizer: optimizer.step, torch.float64)
    assert moved(ByName, compiled, dtype) == pytest.approx(exact, rel=1e-3)
    monkeypatch.setattr(traces, "_python_args", traces._args)
    assert moved(ByName, compiled, dtype) < 0.5 * exact


def test_it_would_be_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "_python_args", traces._args)
    exact = way_of_counting(lambda optimizer: optimizer.step, torch.float64)
    assert float((way_of_counting(by_string, torch.bfloat16) - exact).abs().min()) > 1e-3


def test_it_would_be_made_anew_in_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "_guard_states", traces._guard_most)
    assert float(momentum(by_function, torch.float32)[0, 0]) == -0.5


def of_none(dtype: torch.dtype, compiled: Callable[[Any], Callable[[], Any]]) -> Tensor:
    """Return a parameter after steps of SGD whose momentum is None at first."""
    torch.compiler.reset()
    p = torch.zeros(2, 2, dtype=dtype, requires_grad=True)
    optimizer = torch.optim.SGD([p], lr=0.125, momentum=0.5)
    optimizer.state[p]["momentum_buffer"] = None
    return value_after(compiled(optimizer), p)


def test_a_state_that_was_none_is_used_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = of_none(torch.float64, lambda optimizer: optimizer.step)
    assert torch.allclose(of_none(torch.float32, collage_fx.compile).double(), exact)
    monkeypatch.setattr(traces, "_PLAIN", set())
    assert float(of_none(torch.float32, collage_fx.compile)[0, 0]) == -0.5


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """The first of two processes."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def added_rows(mesh: DeviceMesh, rows: list[int]) -> list[float]:
    """Return what a function adds that adds to a parameter how many rows it has."""

    def add_rows(p: Tensor) -> None:
        p.add_(p.shape[0])

    added, step = [], collage_fx.compile(add_rows)
    with without_compiler():
        for count in rows:
            whole = {"shape": torch.Size([count, 2]), "stride": (2, 1)}
            mine = torch.zeros(-(-count // 2), 2, dtype=torch.bfloat16)
            p = DTensor.from_local(mine, mesh, [Shard(0)], run_check=False, **whole)
            step(p)
            added.append(float(p.to_local()[0, 0]))
    return added


def test_a_dtensor_of_another_size_whose_shard_is_alike_is_another(mesh: DeviceMesh) -> None:
    assert added_rows(mesh, [4, 3, 4, 3]) == [4, 3, 4, 3]
    torch.compiler.reset()
    assert added_rows(mesh, [3, 4, 8, 16, 7]) == [3, 4, 8, 16, 7]


def test_it_would_be_taken_for_the_first(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "_is_uneven", lambda _: False)
    assert added_rows(mesh, [4, 3]) == [4, 4]


class Counting(torch.optim.Optimizer):
    """Counts in a tensor of float64, in ones and a half."""

    def __init__(self, params: list[Parameter]) -> None:
        super().__init__(params, {})
        for p in params:
            self.state[p]["step"] = torch.tensor(0.0, dtype=torch.float64)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            self.state[p]["step"].add_(1.5)
            p.sub_(p.grad / self.state[p]["step"], alpha=1e-3)


def counted(compiled: Any) -> tuple[float, float]:
    """Return the count of four steps, and how far they are off."""
    torch.compiler.reset()
    p = Parameter(torch.ones(4).bfloat16())
    optimizer = Counting([p])
    value = value_after(compiled(optimizer), p)
    off = float((value - (1 - 1e-3 * (1 + 1 / 2 + 1 / 3 + 1 / 4) / 1.5)).abs().max())
    return float(optimizer.state[p]["step"]), off


def test_a_count_in_float64_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    count, off = counted(collage_fx.compile)
    assert count == 6 and off < 1e-4
    monkeypatch.setattr(backend, "writes_number", lambda _: False)
    assert (counted(collage_fx.compile)[0] < 6) == (installed() < (2, 14))  # which has mended it


def test_the_string_does_so_too() -> None:
    count, off = counted(lambda optimizer: torch.compile(optimizer.step, backend="collage"))
    assert count == 6 and off < 1e-4
