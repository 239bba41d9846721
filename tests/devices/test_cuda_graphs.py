"""CUDA graphs, as far as that goes without CUDA: what is done while a stream is captured.

The device and the state of its stream are made up, and a kernel notes what it is launched with;
that a graph which is captured so replays as it should is for test_gpu.py.

For runtime.kernels.triton_launch, runtime.expansion.stochastic and compilation.session.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from graphs import BF16
from kernels import CASES, kernel_of, rewritten
from tensors import bf16, with_grads
from torch import Tensor
from torch._inductor.utils import get_first_incompatible_cudagraph_node
from torch.fx import Graph, GraphModule
from torch.utils._python_dispatch import TorchDispatchMode

import collage_fx
from collage_fx.compilation.session import Session
from collage_fx.config import CollageConfig
from collage_fx.errors import CaptureError
from collage_fx.runtime.expansion.stochastic import (
    Seeds,
    _capturing,
    advance,
    chance,
    round_by_chance,
    seed_of,
)
from collage_fx.runtime.kernels import triton_launch
from collage_fx.runtime.kernels.triton_launch import CHUNKS, Launch, Table
from collage_fx.step import small_updates

SIZES = [2, CHUNKS[0], 1]


class Allocations(TorchDispatchMode):
    """Refuses what would allocate on a device, or pin memory."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        pins = options.get("pin_memory") or "pin_memory" in str(func)
        assert not pins and torch.device(options.get("device") or "cpu").type == "cpu", func
        return func(*args, **options)


class Stream:
    """A stream of a device that is not there, and whether it is being captured."""

    def __init__(self) -> None:
        self.capturing = False
        self.launches: list[tuple[Any, ...]] = []
        self.waited: list[object] = []
        """The events that it waits for, each of which is the stream that has recorded it."""
        self.readers: dict[int, list[object]] = {}
        """id(tensor) -> the streams that keep its memory."""

    def record_event(self) -> object:
        return self

    def wait_event(self, event: object) -> None:
        self.waited.append(event)

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        return lambda *args, **options: self.launches.append(args)

    @contextlib.contextmanager
    def captured(self) -> Iterator[None]:
        self.capturing = True
        try:
            with Allocations():
                yield
        finally:
            self.capturing = False


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    """CPU tensors that are taken for those of a GPU."""
    made = Stream()

    def moved(values: Tensor, device: torch.device, kept: list[Tensor]) -> Tensor:
        assert not made.capturing
        return values

    def new_table(shape: torch.Size, device: torch.device) -> Table:
        assert not made.capturing
        return Table(*(torch.full(shape, -1) for _ in "ab"))

    def record_stream(tensor: Tensor, stream: object) -> None:
        made.readers.setdefault(id(tensor), []).append(stream)

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: made.capturing)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: made)
    monkeypatch.setattr(Tensor, "record_stream", record_stream)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(triton_launch, "device_of", lambda column: torch.device("cuda", 0))
    monkeypatch.setattr(triton_launch, "_is_near", lambda column, device: True)
    monkeypatch.setattr(triton_launch, "_moved", moved)
    monkeypatch.setattr(triton_launch, "_new_table", new_table)
    return made


def launch_of(stream: Stream) -> tuple[Launch, list[list[Tensor]]]:
    """Return a launch that is only noted, and tensors for it."""
    kernel = kernel_of(rewritten(CASES["sgd-light"]))
    launch = Launch(kernel.triton(), kernel.scalar)
    launch.kernel = stream
    return launch, [[torch.zeros(n, dtype=BF16) for n in SIZES] for _ in kernel.dtypes]


def test_a_captured_launch_takes_what_an_earlier_one_made(stream: Stream) -> None:
    launch, columns = launch_of(stream)
    launch.run(columns, SIZES)
    columns[0] = [x.clone() for x in columns[0]]  # gradients have other addresses in a graph
    with stream.captured():
        launch.run(columns, SIZES)
    before, captured = stream.launches[:2], stream.launches[2:]
    assert len(captured) == 2  # aligned members, and the one of a single element
    for old, new, members in zip(before, captured, ([0, 1], [2]), strict=True):
        table, *geometry = new
        expected = [[column[m].data_ptr() for column in columns] for m in members]
        assert table.tolist() == expected != old[0].tolist()
        assert all(a is b for a, b in zip(geometry, old[1:], strict=True))
        # What a replay reads again is there for as long as the launch is.
        assert any(g[0] is geometry[0] and t.near is table for g, t in launch.captured)


def test_what_is_not_ready_for_a_graph_is_an_error_of_ours(stream: Stream) -> None:
    launch, columns = launch_of(stream)
    with stream.captured(), pytest.raises(CaptureError, match="take a step that is not captured"):
        launch.run(columns, SIZES)
    assert not stream.launches
    launch.run(columns, SIZES)
    with stream.captured():
        launch.run(columns, SIZES)
        launch.run(columns, SIZES)
        with pytest.raises(CaptureError, match="another after each 2 graphs"):
            launch.run(columns, SIZES)
    launch.run(columns, SIZES)
    with stream.captured():
        launch.run(columns, SIZES)


def test_a_number_on_the_host_is_no_part_of_a_graph(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch, columns = launch_of(stream)
    launch.run(columns, SIZES)
    monkeypatch.setattr(triton_launch, "_is_near", lambda column, device: False)
    with stream.captured(), pytest.raises(CaptureError, match="capturable=True"):
        launch.run(columns, SIZES)


def test_a_geometry_is_kept_for_each_stream_that_reads_it(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory belongs to the stream that made it, which may use it again once it is free."""
    launch, columns = launch_of(stream)
    launch.run(columns, SIZES)
    other = Stream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: other)
    launch.run(columns, SIZES)
    geometries = [ready.geometry for ready in launch.ready.values()]
    assert len(geometries) == 2  # of aligned members, and of the others
    for tensor in (t for geometry in geometries for t in geometry):
        assert stream.readers[id(tensor)] == [stream, other]
    # Nor does it read what the first is still to write.
    assert other.waited == [stream, stream]


def test_the_check_on_allocations_can_fail() -> None:
    with Allocations(), pytest.raises(AssertionError):
        torch.zeros(3).pin_memory()


def test_a_captured_step_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    params = with_grads([bf16(4, 3)])
    small = small_updates.SmallUpdates(Session(CollageConfig(), {}))
    looked = []
    monkeypatch.setattr(small_updates, "moving_parameters", lambda o: looked.append(o) or [])
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    optimizer = torch.optim.SGD(params)
    for capturing in (True, False):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda c=capturing: c)
        small.steps = small_updates.FIRST
        assert small.step(lambda optimizer: 7, optimizer) == 7
        assert bool(looked) != capturing


def test_inductor_leaves_the_kernels_of_classes_out_of_its_graphs() -> None:
    graph = Graph()
    for target in (torch.ops.aten.add.Tensor, torch.ops.collage.multi_tensor.default):
        graph.call_function(target, ())
    graph.output(())
    found = get_first_incompatible_cudagraph_node(GraphModule(torch.nn.Module(), graph))
    assert found is not None and found.target is torch.ops.collage.multi_tensor.default


def test_a_mode_with_cuda_graphs_traces_one_parameter_of_a_class(traced: list[int]) -> None:
    params = with_grads([bf16(4, 3) for _ in range(9)])
    step = collage_fx.compile(torch.optim.AdamW(params), mode="reduce-overhead")
    for _ in range(3):
        step()
    assert traced == [4]  # the parameter, its gradient and both moments


def test_a_captured_seed_advances_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """One launch of `advance` is what a graph replays."""
    device = torch.device("cpu")
    capturing = False
    monkeypatch.setattr("collage_fx.runtime.expansion.stochastic._capturing", lambda d: capturing)
    seeds = Seeds(0, [device])
    first = int(seeds.draw(7)[0])
    assert first == int(seeds.draw(7)[0]) != int(seeds.draw(8)[0]) == seed_of(0, 8)
    capturing, expected = True, seed_of(0, 8)
    (tensor,) = seeds.draw(9)
    for _ in range(100):
        expected = (expected * 48271 + 1) % (2**31 - 1)
        assert tensor.dtype == torch.int32 and int(tensor) == expected
        advance(tensor)
    with pytest.raises(CaptureError, match="seed of stochastic rounding"):
        Seeds(0, [device])


def test_a_seed_asks_the_stream_of_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    current = [0]

    @contextlib.contextmanager
    def device(wanted: torch.device) -> Iterator[None]:
        current.append(wanted.index)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: current[-1] == 1)
    assert [_capturing(torch.device("cuda", i)) for i in range(3)] == [False, True, False]
    assert not _capturing(torch.device("cpu")) and current == [0]


def test_seeds_that_advance_round_without_bias() -> None:
    x = torch.full((64,), 1 + 0.3 * 2**-7)
    at = torch.arange(64, dtype=torch.int32)
    seed = torch.tensor(1, dtype=torch.int32)
    ups, seen = 0, set()
    for _ in range(1000):
        advance(seed)
        seen.add(int(seed))
        ups += int((round_by_chance(x, BF16, chance(x, seed, at)) > 1).sum())
    assert len(seen) == 1000
    share, deviation = ups / 64000, (0.3 * 0.7 / 64000) ** 0.5
    assert abs(share - 0.3) < 5 * deviation
    stuck = (round_by_chance(x, BF16, chance(x, seed, at)) > 1).double().mean()
    assert abs(float(stuck) - 0.3) > 5 * deviation  # one seed again and again would be seen
