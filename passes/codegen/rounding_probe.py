"""Probe that compiled code keeps the roundings from which residuals are computed.

Inductor keeps 16-bit values in fp32 within a kernel, and only our own lowerings have them
rounded there. A torch that elides such a rounding would train in plain bf16, and nothing would
show it. So before the first graph of a process for a device a small kernel is compiled in the same
way, and has to give what the eager functions give, bit for bit. The result is kept on disk.
"""

import importlib.metadata
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.fx import Graph

from collage_fx.passes.codegen import kernel_cache
from collage_fx.passes.rewrite.lower import lowered_function
from collage_fx.runtime import cpp_compiler, progress
from collage_fx.runtime.errors import RoundingsLost
from collage_fx.runtime.expansion.eft import SIXTEEN_BITS, two_prod, two_sum
from collage_fx.runtime.storage.layouts import split
from collage_fx.runtime.torch_private import (
    _disable_current_modes,
    inductor_config,
)

Run: TypeAlias = Callable[[Graph, list[Tensor]], Sequence[Tensor]]
"""Compiles a lowered graph, and returns its results for operands."""
COUNT = 509
"""Elements of the operands: whole vectors, and some that are left over."""
_DTYPES = (*SIXTEEN_BITS, torch.float32)
_OF_CODE = ("cpp.", "triton.", "cuda.", "eager_numerics.", "emulate_precision_casts")
"""Beginnings of the names of the settings."""
_LOST: dict[str, str] = {}
"""Key of the compiled code -> the dtypes in which it loses roundings, in words."""


def check_roundings(device: torch.device, way: str, run: Run) -> None:
    """Raise RoundingsLost if what is compiled for a device leaves out a rounding.

    Args:
        device: where it runs; nothing is tried on one that this machine has not.
        way: the name of the way to the compiler.
        run: takes that way.
    """
    if device.type != "cpu" and not torch.get_device_module(device).is_available():
        return  # nothing runs there: the code is looked at
    settings = _settings()
    key = repr((str(device), way, settings))
    if key not in _LOST:
        place = kernel_cache.path_of(f"{way} {_machine(device)}", settings)
        lost = kernel_cache.read(place).get("lost")
        if not isinstance(lost, str):
            with progress.work(lambda: "compiling", "a probe of the compiler's roundings"):
                lost = ", ".join(_differing(device, run))
            kernel_cache.write(place, {"lost": lost})
        _LOST[key] = lost
    if _LOST[key]:
        flags = ", as a C++ compiler does that is told -ffast-math" if device.type == "cpu" else ""
        raise RoundingsLost(
            f"torch {torch.__version__} leaves out roundings of {_LOST[key]} in what it compiles "
            f"for {device.type}, {way}{flags}"
        )


def _settings() -> list[tuple[str, Any]]:
    """Return the settings of Inductor on which the code of an operation depends."""
    every = inductor_config.save_config_portable().items()
    return sorted((name, value) for name, value in every if name.startswith(_OF_CODE))


def _machine(device: torch.device) -> str:
    """Return the compiler that makes the code of a device, and the hardware that runs it."""
    if device.type == "cpu":
        compiler = cpp_compiler.compiler()
        return repr((device.type, compiler, cpp_compiler.version_of(compiler)))
    triton = importlib.metadata.version("triton") if find_spec("triton") else ""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return repr((device.type, name, triton))


def operands(device: torch.device) -> list[Tensor]:
    """Return two operands of each dtype, whose sums cancel and whose products have errors."""
    draw = torch.Generator("cpu").manual_seed(0)
    found = []
    for dtype in _DTYPES:
        a, b = (torch.randn(COUNT, generator=draw, device="cpu") for _ in range(2))
        scale = torch.randint(-8, 9, (COUNT,), generator=draw, device="cpu")
        found += [x.to(dtype).to(device) for x in (a, b * 2.0**scale)]
    return found


def transformed(*xs: Tensor) -> tuple[Tensor, ...]:
    """Return the results of error-free transformations of the operands; each is rounded."""
    found: list[Tensor] = []
    for a, b in zip(xs[::2], xs[1::2], strict=True):
        found += (*two_sum(a, b), *two_prod(a, b), a * b - a)
        if a.dtype in SIXTEEN_BITS:
            found += split(xs[-2] * xs[-1], a.dtype)
    return tuple(found)


def _differing(device: torch.device, run: Run) -> list[str]:
    """Return the dtypes of the results in which compiled code and eager functions differ."""
    with _disable_current_modes(), torch.no_grad():
        lowered = lowered_function(transformed, [(d, False) for d in _DTYPES for _ in range(2)])
        given = operands(device)
        expected = transformed(*given)
        pairs = zip(run(lowered, given), expected, strict=True)
        found = {str(e.dtype).removeprefix("torch.") for r, e in pairs if not _same_bits(r, e)}
    return sorted(found)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    bits = torch.int16 if b.dtype in SIXTEEN_BITS else torch.int32
    return a.dtype == b.dtype and torch.equal(a.view(bits), b.view(bits))
