"""One Triton kernel over many tensors in one launch, by way of a table of their addresses."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._inductor.codecache import PyCodeCache

from collage_fx.runtime.errors import CollageError

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
    """A kernel that `passes/kernel.py` printed, and how to call it."""

    source: str
    scalar: Sequence[bool]
    """For each input whether it is 0-d; such inputs may be on the CPU."""
    kernel: Any = None
    geometries: dict[tuple[Any, ...], Geometry] = field(default_factory=dict)
    captured: list[Any] = field(default_factory=list)
    """What a CUDA graph reads again whenever it is replayed."""

    def __post_init__(self) -> None:
        self.kernel = PyCodeCache.load(self.source).sweep

    def run(self, members: Sequence[Sequence[Tensor]]) -> None:
        """Update all members, in two launches at most: those aligned to 16 bytes, and the others.

        Args:
            members: the inputs of each. Those that are not 0-d have elements, as many as each
                other within a member, lie densely in memory, and are on one device.

        Raises:
            CollageError: a CUDA graph is being captured, and a 0-d tensor is on the CPU.
        """
        groups: dict[bool, list[Sequence[Tensor]]] = {True: [], False: []}
        full = [i for i, scalar in enumerate(self.scalar) if not scalar]
        for tensors in members:
            aligned = not any(tensors[i].data_ptr() % _ALIGNMENT for i in full)
            groups[aligned].append(tensors)
        for aligned, group in groups.items():
            if group:
                self._launch(group, full[0], aligned)

    def _launch(self, members: Sequence[Sequence[Tensor]], first: int, aligned: bool) -> None:
        device = members[0][first].device
        cuda = device.type == "cuda"
        with torch.cuda.device(device) if cuda else contextlib.nullcontext():
            capturing = cuda and torch.cuda.is_current_stream_capturing()
            geometry = self._geometry(tuple(m[first].numel() for m in members), device)
            kept: list[Tensor] = []
            columns = [
                _addresses([m[i] for m in members], device, capturing, kept)
                for i in range(len(self.scalar))
            ]
            table = _moved(torch.tensor(columns).T.contiguous(), device, kept)
            if capturing:
                self.captured += [*geometry, *kept]
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

    def _geometry(self, sizes: tuple[int, ...], device: torch.device) -> Geometry:
        key = (sizes, device)
        if key not in self.geometries:
            elements = torch.tensor(sizes)
            chunks = (elements + CHUNK - 1) // CHUNK
            members = torch.arange(len(sizes)).repeat_interleave(chunks)
            before = (chunks.cumsum(0) - chunks)[members]
            starts = (torch.arange(members.numel()) - before) * CHUNK
            if len(self.geometries) == _GEOMETRIES:
                self.geometries.pop(next(iter(self.geometries)))
            self.geometries[key] = Geometry(
                members.to(device, torch.int32), starts.to(device), elements.to(device)
            )
        return self.geometries[key]


def _addresses(
    column: list[Tensor], device: torch.device, capturing: bool, kept: list[Tensor]
) -> list[int]:
    """Return the addresses of one input of each member; copies of those that are elsewhere."""
    if all(t.device == device for t in column):
        return [t.data_ptr() for t in column]
    if capturing:
        raise CollageError(
            "a CUDA graph is being captured, and a step count, learning rate or other 0-d tensor "
            "is on the CPU, whose value the graph would repeat for ever; make the optimizer with "
            "capturable=True and such tensors on the device"
        )
    near = _moved(torch.stack([t.cpu() for t in column]), device, kept)
    return [near.data_ptr() + k * near.element_size() for k in range(len(column))]


def _moved(values: Tensor, device: torch.device, kept: list[Tensor]) -> Tensor:
    """Return values on the device, without waiting for it; what the copy needs goes to `kept`."""
    if device.type == "cpu":
        kept.append(values)
        return values
    pinned = values.pin_memory()
    moved = pinned.to(device, non_blocking=True)
    kept += [pinned, moved]
    return moved
