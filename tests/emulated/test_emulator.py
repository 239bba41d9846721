"""The emulated device itself: what it counts, its memory, and what a capture forbids.

For tests/support/cuda_emulator.
"""

import ctypes
import gc
import os
import subprocess
import sys
from collections.abc import Callable

import cuda_emulator as emulator
import pytest
import torch
from cuda_emulator import counted
from emulated_steps import captured
from torch import Tensor

GIB = 1 << 30


@pytest.fixture
def x() -> Tensor:
    """Return zeros that were copied there: no kernel could make them."""
    return torch.zeros(64).to("cuda")


def test_there_is_a_device() -> None:
    assert torch.cuda.is_available() and torch.cuda.device_count() == 1
    assert torch.cuda.get_device_capability() == (9, 0)
    assert torch.cuda.mem_get_info()[1] == emulator.memory().limit


def test_memory_has_a_limit_and_comes_back() -> None:
    before = emulator.memory().used
    half = torch.empty(emulator.memory().limit // 2 + GIB, dtype=torch.uint8, device="cuda")
    assert emulator.memory().used >= before + half.numel()
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty_like(half)
    del half
    gc.collect()
    torch.cuda.empty_cache()
    assert emulator.memory().used == before


def test_kernels_are_counted_by_name(x: Tensor) -> None:
    found = counted(lambda: [x.add_(1), x.mul_(2), x.add_(1), x @ x])
    assert found["kernels"] == 4 and not any("sync" in name for name in found)
    assert emulator.kernels() == {
        "CUDAFunctorOnSelf_add": 2,
        "AUnaryFunctor": 1,
        "cublasSdot_v2": 1,
    }


def test_copies_are_counted_by_kind(x: Tensor) -> None:
    pageable = torch.zeros(64)
    pinned = pageable.pin_memory()
    kinds = {
        "D2D": lambda: x.copy_(torch.empty_like(x)),
        "H2D pinned": lambda: x.copy_(pinned, non_blocking=True),
        "H2D pageable": lambda: x.copy_(pageable, non_blocking=True),
        "D2H pinned": lambda: pinned.copy_(x, non_blocking=True),
        "D2H pageable": lambda: pageable.copy_(x, non_blocking=True),
    }
    for kind, act in kinds.items():
        found = {name: n for name, n in counted(act).items() if name.startswith(("copy", "sync"))}
        assert found == {f"copy: {kind}": 1}


def test_copies_copy(x: Tensor) -> None:
    x.copy_(torch.arange(64.0))
    assert x.tolist() == list(range(64))


def test_waiting_is_counted(x: Tensor) -> None:
    event = torch.cuda.Event()
    event.record()
    waits = {
        "device": torch.cuda.synchronize,
        "stream": x.sum().item,
        "event": event.synchronize,
    }
    for kind, act in waits.items():
        found = {name: n for name, n in counted(act).items() if name.startswith("sync")}
        assert found == {f"sync: {kind}": 1}


def test_time_between_events_is_positive() -> None:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
    for event in events:
        event.record()
    first, second, third = events
    assert 0 < first.elapsed_time(second) < first.elapsed_time(third)
    assert second.elapsed_time(first) < 0


def test_a_graph_is_counted_when_it_is_replayed(x: Tensor) -> None:
    pinned = torch.ones(64).pin_memory()
    emulator.reset()
    graph = captured(lambda: [x.copy_(pinned, non_blocking=True), x.add_(1), x @ x])
    found = emulator.read()
    assert found["captures"] == found["copies captured"] == 1
    assert found["kernels captured"] == 2 and "copy: H2D pinned" not in found
    assert emulator.kernels().get("CUDAFunctorOnSelf_add") is None
    assert x.tolist() == [0] * 64
    found = counted(lambda: [graph.replay(), graph.replay()])
    assert found["graph launches"] == found["copies replayed"] == 2
    assert found["kernels replayed"] == 4
    assert emulator.kernels()["CUDAFunctorOnSelf_add"] == 2
    assert x.tolist() == [1] * 64


def test_a_graph_takes_what_other_streams_do_for_it(x: Tensor) -> None:
    """A capture is that of a stream; another joins it by waiting for it."""
    side, apart = torch.cuda.Stream(), torch.cuda.Stream()

    def fork() -> None:
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            assert torch.cuda.is_current_stream_capturing()
            x.add_(1)
        main.wait_stream(side)
        with torch.cuda.stream(apart):
            assert not torch.cuda.is_current_stream_capturing()
            x.add_(1)

    emulator.reset()
    graph = captured(fork)
    assert emulator.kernels()["CUDAFunctorOnSelf_add"] == 1
    assert counted(graph.replay)["kernels replayed"] == 1
    assert emulator.kernels()["CUDAFunctorOnSelf_add"] == 1


def allocate_apart(x: Tensor) -> Tensor:
    """On a stream that is not captured, for which torch takes no memory of the graph's pool."""
    with torch.cuda.stream(torch.cuda.Stream()):
        return torch.empty(GIB, dtype=torch.uint8, device="cuda")


def query(x: Tensor) -> bool:
    event = torch.cuda.Event()
    with torch.cuda.stream(torch.cuda.Stream()):
        event.record()
    return event.query()


def copy(to: Tensor, source: Tensor) -> None:
    """As the runtime does it; torch itself refuses to while a stream is captured."""
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (to, source)]
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    size = ctypes.c_size_t(to.numel() * to.element_size())
    ctypes.CDLL(None).cudaMemcpyAsync(*pointers, size, 4, stream)


FORBIDDEN: dict[str, Callable[[Tensor], object]] = {
    "synchronize the device": lambda x: torch.cuda.synchronize(),
    "synchronize the stream": lambda x: torch.cuda.current_stream().synchronize(),
    "read a value": lambda x: x.sum().item(),
    "copy from pageable memory": lambda x: copy(x, torch.zeros(64)),
    "copy to pageable memory": lambda x: copy(torch.zeros(64), x),
    "allocate outside of the pool": allocate_apart,
    "query an event": query,
}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_a_capture_forbids(what: str, x: Tensor) -> None:
    emulator.reset()
    with pytest.raises(RuntimeError, match="failed due to a previous error during capture"):
        captured(lambda: FORBIDDEN[what](x))
    assert emulator.read()["capture violations"] == 1
    assert counted(captured(lambda: x.add_(1)).replay)["kernels replayed"] == 1


def test_a_capture_may_copy_pinned_memory(x: Tensor) -> None:
    pinned = torch.zeros(64).pin_memory()
    assert counted(captured(lambda: copy(x, pinned)).replay)["copies replayed"] == 1


def test_a_capture_may_leave_other_work_alone(x: Tensor) -> None:
    """In the modes of captures other than that which forbids the most."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="relaxed"):
        x.add_(1)
        query(x)
        allocate_apart(x)
    assert counted(graph.replay)["kernels replayed"] == 1


@pytest.mark.parametrize(("variable", "read"), [("ONES", [7.0, 1.0]), ("ZEROS", [0.0, 0.0])])
def test_small_reads_give_what_a_program_needs(variable: str, read: list[float]) -> None:
    program = "import torch; print([torch.tensor(x).to('cuda').item() for x in (7.0, 0.0)])"
    env = {**os.environ, f"CUDA_EMULATOR_{variable}": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True)
    assert done.stdout.strip() == str(read), done.stderr
