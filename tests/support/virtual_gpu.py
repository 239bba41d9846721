"""Inductor emits Triton for a GPU on a machine without one.

Two public doors are enough: Triton takes a driver, and Dynamo a device interface. Nothing is
launched. What Inductor emits is compiled for the GPU by Triton itself, or run by its interpreter.
"""

import contextlib
import copy
import linecache
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch._dynamo.device_interface as interfaces
import triton
from graphs import Captured
from kernels import SM90
from torch._inductor import config as inductor_config
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.runtime import triton_helpers, triton_heuristics
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.utils import get_code
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _triton as triton_support
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.compiler import ASTSource
from triton.runtime.driver import driver

from collage_fx.compilation.inductor import compile_rewritten
from collage_fx.compilation.partition import split
from collage_fx.passes.ir.graph_memory import mutations
from collage_fx.passes.ir.program import Program, Settings, graph_of
from collage_fx.passes.pipeline import run_passes

_PROPERTIES = types.SimpleNamespace(
    name="virtual",
    major=9,
    minor=0,
    multi_processor_count=132,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    total_memory=80 << 30,
)


class _Driver(DriverBase):  # type: ignore[misc]
    def __init__(self) -> None:
        pass

    @classmethod
    def is_active(cls) -> bool:
        return False

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> GPUTarget:
        return SM90

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)

    def get_benchmarker(self) -> Any:
        raise RuntimeError("a virtual GPU has no time")

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


class _Interface(interfaces.CudaInterface):
    class Worker:
        set_device = staticmethod(lambda device: None)
        current_device = staticmethod(lambda: 0)
        get_device_properties = staticmethod(lambda device=None: _PROPERTIES)

    current_device = staticmethod(lambda: 0)
    device_count = staticmethod(lambda: 1)
    set_device = staticmethod(lambda device: None)
    synchronize = staticmethod(lambda device=None: None)
    get_device_properties = staticmethod(lambda device=None: _PROPERTIES)
    get_raw_stream = staticmethod(lambda device: 0)
    is_available = staticmethod(lambda: True)
    is_bf16_supported = staticmethod(lambda including_emulation=False: True)
    get_compute_capability = staticmethod(lambda device=None: 90)
    is_triton_capable = staticmethod(lambda device=None: True)
    raise_if_triton_unavailable = staticmethod(lambda device=None: None)


def _forget() -> None:
    for remembered in (triton_support.has_triton, triton_support.triton_backend):
        remembered.cache_clear()
    triton_support.triton_hash_with_backend.cache_clear()
    DeviceProperties.create.__func__.cache_clear()  # type: ignore[attr-defined]


@contextlib.contextmanager
def virtual_gpu() -> Iterator[None]:
    """Let Inductor believe that there is a GPU of compute capability 9.0."""
    interfaces.get_registered_device_interfaces()  # which otherwise registers over ours
    active, before = driver._active, dict(interfaces.device_interfaces)
    try:
        driver.set_active(_Driver())
        for name in ("cuda", "cuda:0"):
            interfaces.register_interface_for_device(name, _Interface)
        _forget()
        with (
            inductor_config.patch(compile_threads=1, force_disable_caches=True),
            mock.patch.object(torch.cuda, "get_device_capability", lambda device=None: (9, 0)),
            mock.patch.object(torch.cuda, "get_device_properties", lambda device=None: _PROPERTIES),
        ):
            yield
    finally:
        driver._active = active
        interfaces.device_interfaces.clear()
        interfaces.device_interfaces.update(before)
        _forget()


def on_gpu(captured: Captured, settings: Settings, *, rate_on_host: bool = False) -> Program:
    """Run the passes on the graph of a step as it would be on a GPU.

    Args:
        captured: the step.
        settings: of the passes.
        rate_on_host: whether 0-d tensors that it does not write are on the CPU, where Dynamo has
            floats that change.
    """
    graph = copy.deepcopy(captured.functional)
    for node in graph.graph.nodes:
        # PyTorch makes constants beside a float that changes where that is.
        val = node.meta.get("val")
        constant = rate_on_host and getattr(val, "dtype", None) == torch.float64
        if "device" in node.kwargs and not constant:
            node.kwargs = {**node.kwargs, "device": torch.device("cuda", 0)}
    graph.recompile()
    placeholders = list(captured.functional.graph.find_nodes(op="placeholder"))
    metas = [node.meta for node in placeholders]
    written = mutations(captured.functional.graph)
    far = [rate_on_host and not n.meta["val"].dim() and n not in written for n in placeholders]
    assert any(far) == rate_on_host
    with FakeTensorMode():
        inputs = [
            torch.empty_strided(
                v.size(), v.stride(), dtype=v.dtype, device="cpu" if host else "cuda:0"
            )
            for v, host in zip((meta["val"] for meta in metas), far, strict=True)
        ]
        moved = make_fx(graph)(*inputs)
    for node, meta in zip(moved.graph.find_nodes(op="placeholder"), metas, strict=True):
        node.meta["desc"] = meta["desc"]
    return run_passes(Program(moved, settings, captured._describe))


@dataclass
class Kernel:
    """A kernel in Inductor's output code."""

    name: str
    source: str

    def load(self) -> tuple[Any, dict[str, Any]]:
        """Return Triton's function, and the arguments of the heuristics that decorate it."""
        meta: dict[str, Any] = {}

        def heuristics(**options: Any) -> Callable[[Any], Any]:
            meta.update(options)
            return lambda function: function

        file = f"<{self.name}>"
        linecache.cache[file] = (len(self.source), None, self.source.splitlines(True), file)
        scope: dict[str, Any] = {"__file__": file, "__name__": self.name}
        with (
            mock.patch.object(triton_heuristics, "pointwise", heuristics),
            mock.patch.object(triton_heuristics, "foreach", heuristics),
            mock.patch.object(triton_helpers, "set_driver_to_gpu", lambda: None),
        ):
            exec(compile(self.source, file, "exec"), scope)
        return scope[self.name], meta

    def assembled(
        self, *, block: int = 1024, warps: int = 4, target: GPUTarget = SM90, fusion: bool = False
    ) -> dict[str, Any]:
        """Compile it with the options that Inductor asks for; return what the stages left.

        `fusion` lets products be contracted all the same.
        """
        function, meta = self.load()
        signature = meta["triton_meta"]["signature"]
        constants = {name: block for name, kind in signature.items() if kind == "constexpr"}
        source = ASTSource(
            fn=function,
            signature=signature,
            constexprs={**constants, **meta["triton_meta"]["constants"]},
            attrs=meta["triton_meta"]["configs"][0],
        )
        options = {
            "num_warps": warps,
            "num_stages": 1,
            "enable_fp_fusion": fusion or meta["triton_meta"]["enable_fp_fusion"],
        }
        return triton.compile(source, target=target, options=options).asm

    def run(self, *args: Any, stream: int) -> None:
        """Run it by Triton's interpreter, in a process that has TRITON_INTERPRET=1."""
        function, meta = self.load()
        assert meta["inductor_meta"]["grid_type"] == "Grid1D"
        block = 1024
        function[(triton.cdiv(args[-1], block), 1, 1)](*args, XBLOCK=block)


@contextlib.contextmanager
def _without_cuda() -> Iterator[None]:
    with (
        mock.patch.object(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, create=True),
        mock.patch.object(torch.cuda, "_DeviceGuard", lambda device: contextlib.nullcontext()),
        mock.patch.object(torch.cuda, "set_device", lambda device: None),
    ):
        yield


@dataclass
class Emitted:
    """Code that Inductor emits for a rewritten graph."""

    kernels: list[Kernel]
    call: Callable[[list[torch.Tensor]], Any]
    """The wrapper: the graph on CPU tensors, by Triton's interpreter."""


def inductor(program: Program) -> Emitted:
    """Let Inductor emit a rewritten graph for the virtual GPU."""
    kernels: list[Kernel] = []

    def keep(_: Any, name: str, source: str, *__: Any, **___: Any) -> Kernel:
        kernels.append(Kernel(name, source))
        return kernels[-1]

    gm = graph_of(program.result)
    fakes = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    with fakes[0].fake_mode:
        code, *_ = get_code(lambda: compile_rewritten(gm, split(gm), fakes, {}))
    scope: dict[str, Any] = {}
    with mock.patch.object(AsyncCompile, "triton", keep), _without_cuda():
        exec(code, scope)
    scope["empty_strided_cuda"] = lambda size, stride, dtype: torch.empty_strided(
        size, stride, dtype=dtype
    )

    def call(inputs: list[torch.Tensor]) -> Any:
        with _without_cuda():
            return scope["call"](inputs)

    return Emitted(kernels, call)
