"""One Triton kernel over many tensors in one launch, by way of a table of their addresses."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._inductor.codecache import PyCodeCache

from collage_fx.runtime.errors import CollageError
from collage_fx.runtime.kernels.argument_table import Column, addresses, device_of, select

CHUNK = 1 << 14
"""Elements that one program works on; 12 bytes say which, a 2700th of a 16-bit tensor's."""
BLOCK = 1024
WARPS = 4
"""With 1024 elements in 128 threads each thread has 8: 16 bytes of a 16-bit tensor."""
_ALIGNMENT = 16
_GEOMETRIES = 8
"""How many are kept; members come and go with gradients that are None."""


class Geometry(NamedTuple):
    """Who works where, for members of certain sizes; on their device."""

    members: Tensor
    """For each program its member; int32."""
    starts: Tensor
    """For each program its first element; int64."""
    sizes: Tensor
    """For each member its elements; int64."""


@dataclass
class Launch:
    """A kernel that `passes/codegen/printers/triton_kernel.py` printed, and how to call it."""

    source: str
    scalar: Sequence[bool]
    """For each input whether it is 0-d; such inputs may be on the CPU."""
    kernel: Any = field(init=False)
    geometries: dict[tuple[Any, ...], Geometry] = field(default_factory=dict)
    captured: list[Any] = field(default_factory=list)
    """What a CUDA graph reads again whenever it is replayed."""

    def __post_init__(self) -> None:
        self.kernel = PyCodeCache.load(self.source).multi_tensor

    def run(self, columns: Sequence[Column], sizes: Sequence[int]) -> None:
        """Update all members, in two launches at most: those aligned to 16 bytes, and the others.

        See `Runner`. Raises CollageError if a CUDA graph is being captured, and a 0-d tensor is on
        the CPU.
        """
        full = [addresses(c) for c, scalar in zip(columns, self.scalar, strict=True) if not scalar]
        groups: dict[bool, list[int]] = {True: [], False: []}
        for m, starts in enumerate(zip(*full, strict=True)):
            aligned = sizes[m] > 1 and not any(start % _ALIGNMENT for start in starts)
            groups[aligned].append(m)
        for aligned, members in groups.items():
            if len(members) == len(sizes):
                self._launch(columns, sizes, aligned)
            elif members:
                some = [select(column, members) for column in columns]
                self._launch(some, [sizes[m] for m in members], aligned)

    def _launch(self, columns: Sequence[Column], sizes: Sequence[int], aligned: bool) -> None:
        device = device_of(columns[list(self.scalar).index(False)])
        cuda = device.type == "cuda"
        with torch.cuda.device(device) if cuda else contextlib.nullcontext():
            capturing = cuda and torch.cuda.is_current_stream_capturing()
            kept: list[Tensor] = []
            geometry = self._geometry(tuple(sizes), device, kept if capturing else None)
            near = [_near(column, device, capturing, kept) for column in columns]
            table = torch.tensor([list(addresses(column)) for column in near], device="cpu")
            table = _moved(table.T.contiguous(), device, kept)
            if capturing:
                self.captured += kept
            self.kernel[(geometry.members.numel(),)](
                table,
                *geometry,
                ALIGNED=aligned,
                CHUNK=CHUNK,
                BLOCK=BLOCK,
                num_warps=WARPS,
                # A product that is contracted with a sum is not rounded before it.
                enable_fp_fusion=False,
            )

    def _geometry(
        self, sizes: tuple[int, ...], device: torch.device, captured: list[Tensor] | None
    ) -> Geometry:
        """Return the geometry of members of these sizes; a CUDA graph has one of its own."""
        key = (sizes, device)
        if captured is None and key in self.geometries:
            return self.geometries[key]
        kept: list[Tensor] = []
        geometry = Geometry(*(_moved(t, device, kept) for t in _chunks(sizes)))
        if captured is not None:
            captured += kept
            return geometry
        if len(self.geometries) == _GEOMETRIES:
            self.geometries.pop(next(iter(self.geometries)))
        self.geometries[key] = geometry
        return geometry


def _chunks(sizes: tuple[int, ...]) -> Geometry:
    """Return the geometry, on the CPU."""
    with torch.device("cpu"):
        elements = torch.tensor(sizes)
        chunks = (elements + CHUNK - 1) // CHUNK
        members = torch.arange(len(sizes)).repeat_interleave(chunks)
        before = (chunks.cumsum(0) - chunks)[members]
        starts = (torch.arange(members.numel()) - before) * CHUNK
        return Geometry(members.to(torch.int32), starts, elements)


def _near(column: Column, device: torch.device, capturing: bool, kept: list[Tensor]) -> Column:
    """Return the column, or a vector of copies on the device if it is elsewhere."""
    if all(t.device == device for t in ([column] if isinstance(column, Tensor) else column)):
        return column
    if capturing:
        raise CollageError(
            "a CUDA graph is being captured, and a step count, learning rate or other 0-d tensor "
            "is on the CPU, whose value the graph would repeat for ever; make the optimizer with "
            "capturable=True and such tensors on the device"
        )
    far = column if isinstance(column, Tensor) else torch.stack([t.cpu() for t in column])
    return _moved(far, device, kept)


def _moved(values: Tensor, device: torch.device, kept: list[Tensor]) -> Tensor:
    """Return values on the device, without waiting for it; what the copy needs goes to `kept`."""
    if device.type == "cpu":
        kept.append(values)
        return values
    pinned = values.pin_memory()
    moved = pinned.to(device, non_blocking=True)
    kept += [pinned, moved]
    return moved
