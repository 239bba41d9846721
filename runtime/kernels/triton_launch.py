"""One Triton kernel over many tensors in one launch, by way of a table of their addresses."""

import contextlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from collage_fx.runtime.errors import CaptureError
from collage_fx.runtime.kernels.argument_table import Column, addresses, device_of, some_of
from collage_fx.runtime.kernels.left_out import number_on
from collage_fx.runtime.torch_private import PyCodeCache

CHUNKS = (1 << 12, 1 << 14)
"""Elements that one program works on; 12 bytes say which, a 680th of a 16-bit tensor's or less."""
MANY = 1 << 28
"""Elements from which on chunks are large. A large device runs some 700 programs at once: of fewer
elements large chunks would leave a fifth of it idle while the last of them run."""
BLOCK = 1024
WARPS = 4
"""Number of warps: of 1024 elements each of 128 threads has 8, 16 bytes of a 16-bit tensor."""
ALIGNMENT = 16
"""The bytes by which addresses are divisible, where a thread reads as many at once."""
_KEPT = 16
"""Number of lists of sizes kept; members come and go with gradients that are None."""
_SPARE = 2
"""Tables that are kept ready for each of them: as many CUDA graphs in a row take no other step."""


def is_capturing() -> bool:
    """Return True if a CUDA graph is being captured on the current stream."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


class Geometry(NamedTuple):
    """Division of work among programs, for members of certain sizes; on their device."""

    members: Tensor
    """Member of each program; int32."""
    starts: Tensor
    """First element of each program; int64."""
    sizes: Tensor
    """Number of elements of each member; int64."""


class Table(NamedTuple):
    """Addresses that one launch takes, on the host and on the device."""

    host: Tensor
    """Pinned: a CUDA graph copies it whenever it is replayed."""
    near: Tensor
    """Copy of the table on the device."""


@dataclass
class Ready:
    """Geometry and tables shared by launches over members of certain sizes, made by the first."""

    geometry: Geometry
    spare: list[Table] = field(default_factory=list)
    """Tables for CUDA graphs: while one is captured, only its memory can be allocated."""
    made: torch.cuda.Event | None = None
    """Event that a launch on another stream than that of the first waits for; None on a CPU."""

    @property
    def is_full(self) -> bool:
        """True if CUDA graphs find all that is kept ready for them."""
        return len(self.spare) >= _SPARE

    def used_by(self, stream: torch.cuda.Stream) -> None:
        """Let a stream read the geometry, which is not freed before it has."""
        if self.made is not None:
            stream.wait_event(self.made)
        for tensor in self.geometry:
            tensor.record_stream(stream)


class Members(NamedTuple):
    """Properties of members that launches depend on, beside their addresses."""

    sizes: tuple[int, ...]
    aligned: bool
    device: torch.device


@dataclass
class Launch:
    """A kernel that `passes/codegen/printers/triton_kernel.py` printed, and how to call it."""

    source: str
    scalar: Sequence[bool]
    """Flag of each input: True if it is 0-d; such inputs may be on the CPU. True for positions."""
    kernel: Any = field(init=False)
    ready: dict[Members, Ready] = field(default_factory=dict)
    captured: list[tuple[Geometry, Table]] = field(default_factory=list)
    """Tables that CUDA graphs read whenever they are replayed, for as long as this process runs."""

    def __post_init__(self) -> None:
        self.kernel = PyCodeCache.load(self.source).multi_tensor

    def run(self, columns: Sequence[Column], sizes: Sequence[int]) -> None:
        """Update all members, in two launches at most: those aligned to 16 bytes, and the others.

        See `Runner`. Raises CaptureError if a CUDA graph is being captured that would not do later
        what is to be done now.
        """
        full = [addresses(c) for c, scalar in zip(columns, self.scalar, strict=True) if not scalar]
        device = device_of(columns[list(self.scalar).index(False)])
        for aligned, at in self.groups(full, sizes).items():
            some = columns
            if len(at) < len(sizes):
                some = [some_of(column, at) for column in columns]
            self._launch(some, Members(tuple(sizes[m] for m in at), aligned, device))

    def groups(
        self, starts: Sequence[Sequence[int]], sizes: Sequence[int]
    ) -> dict[bool, list[int]]:
        """Return the members of each launch: those that are aligned (True), and the others.

        Args:
            starts: for each input that is not 0-d, the addresses of all members' tensors.
            sizes: the elements of each member.
        """
        found: dict[bool, list[int]] = {}
        for m, own in enumerate(zip(*starts, strict=True)):
            aligned = sizes[m] > 1 and not any(start % ALIGNMENT for start in own)
            found.setdefault(aligned, []).append(m)
        return dict(sorted(found.items(), reverse=True))

    def _launch(self, columns: Sequence[Column], members: Members) -> None:
        device = members.device
        cuda = device.type == "cuda"
        with torch.cuda.device(device) if cuda else contextlib.nullcontext():
            kept: list[Tensor] = []
            if cuda and torch.cuda.is_current_stream_capturing():
                geometry, table = self._for_capture(members, columns)
            else:
                near = [_near(column, device, kept) for column in columns]
                table = _moved(_table_of(near), device, kept)
                ready = self.ready_for(members)
                if cuda:
                    ready.used_by(torch.cuda.current_stream(device))
                geometry = ready.geometry
            self.call(table, geometry, members)

    def call(self, table: Tensor, geometry: Geometry, members: Members) -> None:
        """Launch the kernel on the current device.

        Args:
            table: the addresses, for each member those of its inputs.
            geometry: see `ready_for`.
            members: whose addresses these are.
        """
        self.kernel[(geometry.members.numel(),)](
            table,
            *geometry,
            left_out=number_on(members.device),
            ALIGNED=members.aligned,
            CHUNK=chunk_of(members.sizes),
            BLOCK=BLOCK,
            num_warps=WARPS,
            # A product that is contracted with a sum is not rounded before it.
            enable_fp_fusion=False,
        )

    def ready_for(self, members: Members) -> Ready:
        """Return the geometry and tables that launches over such members have in common."""
        sizes, _, device = members
        if members not in self.ready:
            if len(self.ready) == _KEPT:
                self.ready.pop(next(iter(self.ready)))
            ready = Ready(Geometry(*(_moved(t, device, []) for t in _chunks(sizes))))
            if device.type == "cuda":
                ready.made = torch.cuda.current_stream(device).record_event()
            self.ready[members] = ready
        ready = self.ready[members]
        while device.type == "cuda" and not ready.is_full:
            ready.spare.append(_new_table(torch.Size((len(sizes), len(self.scalar))), device))
        return ready

    def _for_capture(self, members: Members, columns: Sequence[Column]) -> tuple[Geometry, Tensor]:
        """Return geometry and table for a CUDA graph, which an earlier launch has left."""
        if not all(_is_near(column, members.device) for column in columns):
            raise CaptureError(
                "a CUDA graph is being captured, and a step count, learning rate or other 0-d "
                "tensor is on the CPU, whose value the graph would repeat for ever; make the "
                "optimizer with capturable=True and such tensors on the device"
            )
        ready = self.ready.get(members)
        if ready is None or not ready.spare:
            raise CaptureError(
                "a CUDA graph is being captured, and nothing was made ready for it: take a step "
                "that is not captured first, with the same tensors, on a side stream as PyTorch "
                f"wants it, and another after each {_SPARE} graphs"
            )
        table = ready.spare.pop()
        table.host.copy_(_table_of(columns))
        table.near.copy_(table.host, non_blocking=True)
        self.captured.append((ready.geometry, table))
        return ready.geometry, table.near


def _table_of(columns: Sequence[Column]) -> Tensor:
    """Return the addresses, a row for each member."""
    return torch.tensor([list(addresses(c)) for c in columns], device="cpu").T.contiguous()


def _new_table(shape: torch.Size, device: torch.device) -> Table:
    room = torch.empty(shape, dtype=torch.int64, device="cpu", pin_memory=True)
    return Table(room, torch.empty(shape, dtype=torch.int64, device=device))


def chunk_of(sizes: Sequence[int]) -> int:
    """Return the number of elements that one program works on, for members of these sizes."""
    return CHUNKS[sum(sizes) >= MANY]


def _chunks(sizes: tuple[int, ...]) -> Geometry:
    """Return the geometry, on the CPU."""
    chunk = chunk_of(sizes)
    with torch.device("cpu"):
        elements = torch.tensor(sizes)
        chunks = (elements + chunk - 1) // chunk
        members = torch.arange(len(sizes)).repeat_interleave(chunks)
        before = (chunks.cumsum(0) - chunks)[members]
        starts = (torch.arange(members.numel()) - before) * chunk
        return Geometry(members.to(torch.int32), starts, elements)


def _is_near(column: Column, device: torch.device) -> bool:
    """Return True if all of a column is on the device, or no tensors."""
    if isinstance(column, array):
        return True
    return all(t.device == device for t in ([column] if isinstance(column, Tensor) else column))


def _near(column: Column, device: torch.device, kept: list[Tensor]) -> Column:
    """Return the column, or copies on the device if it is elsewhere.

    A tensor that many members share, as a learning rate, is copied once.
    """
    if isinstance(column, array) or _is_near(column, device):
        return column
    if isinstance(column, Tensor):
        return _moved(column, device, kept)
    different = {id(t): t for t in column}
    moved = _moved(torch.stack([t.cpu() for t in different.values()]), device, kept)
    if len(different) == len(column):
        return moved
    copies = dict(zip(different, moved.unbind(), strict=True))
    return [copies[id(t)] for t in column]


def _moved(values: Tensor, device: torch.device, kept: list[Tensor]) -> Tensor:
    """Return values on the device, without waiting for it; what the copy needs goes to `kept`."""
    if device.type == "cpu":
        kept.append(values)
        return values
    pinned = values.pin_memory()
    moved = pinned.to(device, non_blocking=True)
    kept += [pinned, moved]
    return moved
