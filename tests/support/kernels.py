"""Triton kernels without a GPU: compiled for one, and run by an interpreter that has been repaired.

Triton's interpreter rounds float32 to bfloat16 half up at best and loses the carry and the
subnormals, so its conversion is replaced (`repaired_interpreter`); the replacement is tested
against torch's in `interpreted.py`.
"""

import contextlib
import math
import re
import subprocess
import tempfile
import types
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from fp8_steps import Adam8
from graphs import Captured, capture_optimizer
from torch import Tensor, optim
from torch._inductor.codecache import PyCodeCache
from torch._inductor.runtime import triton_helpers
from torch.fx import Node
from torch.optim import Optimizer
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import interpreter

from collage_fx.passes.codegen.multi_tensor_kernel import (
    MULTI_TENSOR_KERNELS,
    MultiTensorKernel,
    register_multi_tensor,
)
from collage_fx.passes.ir.program import Arithmetic, Level, Rewritten, Settings, graph_of
from collage_fx.runtime.kernels.triton_launch import BLOCK, CHUNKS, WARPS

SM90 = GPUTarget("cuda", 90, 32)
GFX942 = GPUTarget("hip", "gfx942", 64)
PER_THREAD = BLOCK // (WARPS * 32)
"""Elements of a thread on SM90."""


SHAPES = ((4, 3),) * 8


class Trust(Optimizer):
    """A user's optimizer."""

    def __init__(
        self, params: list[Tensor], *, squash: bool = False, trend: torch.dtype | None = None
    ) -> None:
        super().__init__(params, {"lr": 1e-4, "squash": squash})
        for p in params:
            self.state[p]["trend"] = torch.zeros_like(p, dtype=trend)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        for p in group["params"]:
            trend = self.state[p]["trend"]
            new = torch.tanh(p.grad) if group["squash"] else p.grad
            trend.mul_(0.999).add_(new, alpha=0.001)
            p.sub_((group["lr"] * trend / (1 + p.grad.abs())).to(p.dtype))


class Case(NamedTuple):
    kind: type[Optimizer]
    options: dict[str, Any]
    level: Level
    traffic: int
    """Bytes read and written for each element."""
    storage: str = "mcf2"
    dtype: torch.dtype = torch.bfloat16
    by_chance: bool = False
    changed: bool = False

    @property
    def settings(self) -> Settings:
        arithmetic: Arithmetic = "wide" if self.by_chance else "eft"
        return Settings(
            self.level,
            arithmetic,
            self.storage,
            stochastic_rounding=self.by_chance,
            changed=self.changed,
        )


CASES = {
    "adamw-light": Case(optim.AdamW, {}, "light", 18),
    "adamw-plus": Case(optim.AdamW, {}, "plus", 22),
    "adamw-tensor-rate": Case(optim.AdamW, {"lr": torch.tensor(1e-3)}, "plus", 22),
    "adamw-remainder16": Case(optim.AdamW, {}, "plus", 22, "remainder16"),
    "adamw-changed": Case(optim.AdamW, {}, "plus", 22, "remainder16", changed=True),
    "adamw-mcf3": Case(optim.AdamW, {}, "plus", 30, "mcf3"),
    "adamw-ulp8": Case(optim.AdamW, {}, "plus", 18, "ulp8"),
    "adamw-ulp4": Case(optim.AdamW, {}, "plus", 16, "ulp4"),
    "adamw-sr": Case(optim.AdamW, {}, "plus", 14, "sr"),
    "adamw-mcf2-by-chance": Case(optim.AdamW, {}, "plus", 22, "mcf2", by_chance=True),
    "adamw-double-single": Case(optim.AdamW, {}, "all", 52, "double_single", torch.float32),
    "adam-e4m3fn": Case(Adam8, {"moments": torch.float8_e4m3fn}, "plus", 18),
    "adam-e5m2-mcf3": Case(Adam8, {"moments": torch.float8_e5m2}, "plus", 26, "mcf3"),
    "sgd-light": Case(optim.SGD, {"momentum": 0.9, "weight_decay": 0.01}, "light", 14),
    "trust-light": Case(Trust, {}, "light", 14),
    "trust-in-fp32": Case(Trust, {"trend": torch.float32}, "light", 18),
}
PARTS = ("adamw-light", "trust-light")
"""Cases whose operations others have too: they wait in `make test-all`."""
NO_REFERENCE = ("adamw-double-single",)
"""Cases of which eager PyTorch makes other words: with AVX512 one root of 70 in float64 is a unit
in the last place off."""
LIBRARY = Case(Trust, {"squash": True}, "light", 14)
"""Case with a function that Triton takes from a library, which the interpreter cannot call."""


def parametrized(cases: dict[str, Case]) -> pytest.MarkDecorator:
    """Run a test for each case."""
    marks = {name: pytest.mark.slow if name in PARTS else () for name in cases}
    each = [pytest.param(case, id=name, marks=marks[name]) for name, case in cases.items()]
    return pytest.mark.parametrize("case", each)


def captured(case: Case, shapes: Sequence[tuple[int, ...]] = SHAPES) -> Captured:
    """Return the graph of a case's step."""
    return capture_optimizer(case.kind, shapes=shapes, dtype=case.dtype, **case.options)


def rewritten(case: Case) -> Rewritten:
    """Return the class that all parameters of a case are in."""
    return captured(case).only(case.settings)


def kernel_of(rewritten: Rewritten) -> MultiTensorKernel:
    """Return the kernel over a class."""
    return MULTI_TENSOR_KERNELS[register_multi_tensor(rewritten)]


def assembled(
    source: str, target: GPUTarget, *, aligned: bool = True, fusion: bool = False
) -> dict[str, Any]:
    """Compile the source of a kernel as `Launch` does; return what each stage left."""
    integers = {"table": "*i64", "members": "*i32", "starts": "*i64", "sizes": "*i64"}
    constants = {"left_out": None, "ALIGNED": aligned, "CHUNK": CHUNKS[0], "BLOCK": BLOCK}
    kernel = ASTSource(
        PyCodeCache.load(source).multi_tensor,
        signature={**integers, **dict.fromkeys(constants, "constexpr")},
        constexprs=constants,
    )
    options = {"num_warps": WARPS, "enable_fp_fusion": fusion}
    return triton.compile(kernel, target=target, options=options).asm


def instructions(ptx: str) -> Counter[str]:
    """Return how often each PTX instruction stands in the text."""
    return Counter(re.findall(r"^\s+(?:@!?%p\d+ )?([a-z][\w.:]+)\s", ptx, re.MULTILINE))


def matching(counts: Counter[str], pattern: str) -> int:
    """Return how many instructions match a pattern as a whole."""
    return sum(n for name, n in counts.items() if re.fullmatch(pattern, name))


def moved(ptx: Counter[str]) -> int:
    """Return the bytes that a thread reads and writes, 16 at a time or the eight int8 it has."""
    eights = matching(ptx, r"(ld|st)\.global\.v2\.b32")
    return 16 * matching(ptx, r"(ld|st)\.global\.v4\.b32") + 8 * eights


def moved_in_tails(ptx: Counter[str]) -> int:
    """Return the bytes that a thread of a class's kernel reads and writes one by one."""
    return 2 * matching(ptx, r"(ld|st)\.global\.b16") + matching(ptx, r"(ld|st)\.global\.b8")


def rounded(ptx: Counter[str]) -> int:
    """Return how many results are rounded to bf16 or fp8.

    LLVM makes a bf16 instruction of a float32 one and its rounding, which is the same; those for
    two elements count twice.
    """
    double = matching(ptx, r"(cvt\.rn\.bf16x2\.f32|(add|sub|mul)\.rn\.bf16x2)")
    double += matching(ptx, r"cvt\.rn\.satfinite\.(e4m3|e5m2)x2\.f32")
    return matching(ptx, r"(cvt\.rn\.bf16\.f32|(add|sub|mul)\.rn\.bf16)") + 2 * double


def stack_bytes(cubin: bytes) -> int:
    """Return the bytes of a thread's stack and local memory, which spilled registers need."""
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tools / "cuobjdump"), "-res-usage", file.name]
        report = subprocess.run(command, capture_output=True, text=True, check=True)
    found = re.search(r"STACK:(\d+).* LOCAL:(\d+)", report.stdout + report.stderr)
    assert found is not None, report
    return int(found[1]) + int(found[2])


def roundings(rewritten: Rewritten) -> int:
    """Return how many roundings a lowered slice has, but for those that LLVM drops."""
    nodes = graph_of(rewritten.lowered).graph.nodes
    rounded = [n.args[0] for n in nodes if n.target is torch.ops.collage.round.default]
    return sum(not _is_as_it_was(n) for n in rounded)


def _is_as_it_was(node: Node) -> bool:
    """Return True for a product with one, and for bits without the last 16, or NaN, in fp32."""
    if node.target is torch.ops.aten.where.ScalarOther:
        return math.isnan(node.args[2])
    return node.target is torch.ops.aten.mul.Tensor and 1.0 in node.args


_convert = interpreter._convert_float


_FP8 = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}


def _repaired(x: Any, source: Any, target: Any, mode: Any) -> Any:
    """float32 to bfloat16 or fp8 to nearest, ties to even, and back exactly; else as it was.

    Of what is beyond fp8 a GPU makes the largest number, of infinities too.
    """
    if source in _FP8:
        return torch.from_numpy(np.array(x)).view(_FP8[source]).float().numpy().reshape(x.shape)
    if target in _FP8:
        dtype = _FP8[target]
        largest = torch.finfo(dtype).max
        value = torch.from_numpy(np.array(x, dtype=np.float32)).clamp(-largest, largest)
        return value.to(dtype).view(torch.uint8).numpy().reshape(x.shape)
    if source == tl.float32 and target == tl.bfloat16:
        bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        nan = (bits & 0x7FFFFFFF) > 0x7F800000
        return np.where(nan, 0x7FC0, rounded).astype(np.uint16).reshape(x.shape)
    if source == tl.bfloat16 and target == tl.float32:
        return (np.ascontiguousarray(x).astype(np.uint32) << 16).view(np.float32).reshape(x.shape)
    return _convert(x, source, target, mode)


def _power(x: Any, y: Any) -> Any:
    """Take a power as eager PyTorch does, for what Triton takes from the device's library.

    Of each number by itself, as of a step count: of many at once it is another ulp.
    """
    numbers = map(np.ravel, np.broadcast_arrays(x.handle.data, y.handle.data))
    powers = [torch.pow(*map(torch.tensor, both)) for both in zip(*numbers, strict=True)]
    data = torch.stack(powers).numpy().reshape(y.handle.data.shape)
    return tl.core.tensor(interpreter.TensorHandle(data, y.dtype.scalar), y.type)


def _root(x: Any) -> Any:
    """The root of float64, which is the same everywhere."""
    return tl.core.tensor(interpreter.TensorHandle(np.sqrt(x.handle.data), x.dtype.scalar), x.type)


@contextlib.contextmanager
def repaired_interpreter() -> Iterator[Callable[..., Any]]:
    """Convert between float32 and bfloat16 as a GPU does; give Triton's own conversion."""
    library = types.SimpleNamespace(pow=_power, sqrt=_root)
    with (
        mock.patch.object(interpreter, "_convert_float", _repaired),
        mock.patch.object(triton_helpers, "libdevice", library),
        np.errstate(all="ignore"),  # a product that is not chosen may be 0 * inf
    ):
        yield _convert


def without_roundings(source: str) -> str:
    """Return the source of a kernel with the conversions to bf16 and back left out."""
    line = r"(\n +)(\w+) = (\w+)\.to\(tl\.bfloat16\)\n +(\w+) = \2\.to\(tl\.float32\)"
    return re.sub(line, r"\1\2 = \3\1\4 = \3", source)


def misaligned(x: Tensor) -> Tensor:
    """Return a copy that does not begin at a multiple of 16 bytes."""
    room = x.new_empty(x.numel() + 1)
    return room[1:].copy_(x.flatten()).view(x.shape)
