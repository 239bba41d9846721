"""Replayed kernel calls over the same members, by address tables that compiled code fills."""

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from collage_fx.compilation.partition import KernelCall
from collage_fx.passes.codegen.multi_tensor_kernel import MULTI_TENSOR_KERNELS
from collage_fx.runtime.kernels.cpp_loop import Loop
from collage_fx.runtime.kernels.tensor_snapshot import Addresses, TensorSnapshot
from collage_fx.runtime.kernels.triton_launch import (
    ALIGNMENT,
    Launch,
    Members,
    Ready,
    is_capturing,
)
from collage_fx.runtime.residuals.checks import Checks

_WORD = 8
"""The bytes of an address; a number takes as many at most."""
_ANYWHERE = 1
"""An address that is not aligned, as that of what is another in each step may be."""


class Unrepeatable(Exception):
    """A step that is not done again without Python; the reason."""


class Launches(Protocol):
    """The calls of all kernels of a step."""

    def fit(self, snapshot: TensorSnapshot) -> bool:
        """Return True if they can be done on the device as it is, for the addresses of now."""

    def run(self, snapshot: TensorSnapshot, first: int, values: Sequence[Tensor]) -> None:
        """Call the kernels.

        Args:
            snapshot: has the addresses of tensors.
            first: the place of the first of the values among these.
            values: numbers, which lie elsewhere in each step, here or on the device.
        """


def launches(
    calls: Sequence[KernelCall],
    places: list[int],
    tensors: list[Any],
    first: int,
    zero: int,
    checks: dict[int, Checks],
) -> Launches:
    """Return the calls of kernels, to be done again.

    Args:
        calls: their operands are numbered.
        places: for each number, which address it is.
        tensors: for each number what was there, None for a seed, a fake tensor for what Inductor's
            part makes.
        first: the place of the first address that is another in each step.
        zero: the place of an address that is 0, from which positions are counted.
        checks: those of tensors, by the ids of these. Kernels that note some take them out.

    Raises Unrepeatable.
    """
    devices = {call.device for call in calls}
    rows = [_Rows(call, places, tensors, first, zero) for call in calls]
    taken = {n for one in rows for column in one.numbers.values() for n in column}
    if len(devices) != 1 or any(
        [places[n] < first and tensors[n].device not in devices for n in taken]
    ):
        raise Unrepeatable("its kernels take tensors of several devices")
    device = devices.pop()
    if device.type == "cpu":
        return _OnCpu(rows, checks)
    if device.type != "cuda":
        raise Unrepeatable(f"its kernels run on {device.type}")
    return _OnCuda(rows, device)


class _Rows:
    """The operands of one call: for each member and input an address, and bytes from there on."""

    def __init__(
        self,
        call: KernelCall,
        places: list[int],
        tensors: list[Any],
        first: int,
        zero: int,
    ) -> None:
        kernel = MULTI_TENSOR_KERNELS[call.key]
        written, read, vectors = call.operands
        self.numbers: dict[int, Any] = {**kernel.columns(written, read)}
        """Input -> for each member, the number of its operand; vectors are left out."""
        own = self.numbers[kernel.full[0]]
        self.sizes = [tensors[n].numel() for n in own]
        if not all([type(size) is int and size for size in self.sizes]):
            raise Unrepeatable("its kernels have nothing to do for some members, or sizes change")
        self.runner = kernel.runner(call.device)
        self.entries = {i: [(places[n], 0) for n in column] for i, column in self.numbers.items()}
        for i, number in zip(kernel.vectors, vectors, strict=True):
            width = kernel.dtypes[i].itemsize
            self.entries[i] = [(places[number], m * width) for m in range(len(self.sizes))]
        if kernel.position is not None:
            self.entries[kernel.position] = [(zero, start) for start in call.starts]
        self.full = [i for i in self.numbers if not kernel.scalar[i]]
        """The inputs of which each member has a tensor that is no number."""
        self.written = kernel.written
        self.at = places, tensors, first

    def starts(self) -> list[list[int]]:
        """Return the addresses of these tensors now."""
        places, tensors, first = self.at
        return [
            [tensors[n].data_ptr() if places[n] < first else _ANYWHERE for n in self.numbers[i]]
            for i in self.full
        ]

    def checked(self, checks: dict[int, Checks]) -> dict[int, list[Checks]]:
        """Return the inputs that the kernel writes and that have checks: those of all members."""
        found, (_, tensors, _) = {}, self.at
        for i in self.written:
            members = map(tensors.__getitem__, self.numbers[i])
            column = list(map(checks.get, map(id, members)))
            if None not in column:
                found[i] = column
        return found  # type: ignore[return-value]

    def addresses(self, inputs: Sequence[int], members: Sequence[int] | None = None) -> Addresses:
        """Return the addresses of these inputs, those of a member one after the other."""
        chosen = range(len(self.sizes)) if members is None else members
        return Addresses([self.entries[i][m] for m in chosen for i in inputs])


class _OnCpu:
    def __init__(self, rows: Sequence[_Rows], checks: dict[int, Checks]) -> None:
        self.calls: list[tuple[Loop, Addresses, tuple[array[int], ...]]] = []
        self.checks = list(checks.values())
        """`Checks` of the tensors that the kernels write."""
        for one in rows:
            if not isinstance(one.runner, Loop):
                raise Unrepeatable("its kernels are no loops")
            found = one.addresses(one.runner.order)
            table = array("q", bytes(_WORD * len(found)))
            columns = one.checked(checks)
            noted = [c.address for row in zip(*columns.values(), strict=True) for c in row]
            checked = map(one.runner.order.index, columns)
            arrays = (table, array("q", one.sizes), array("q", checked), array("q", noted))
            self.calls.append((one.runner, found, arrays))
            for i in columns:
                for n in one.numbers[i]:
                    checks.pop(id(one.at[1][n]), None)

    def fit(self, snapshot: TensorSnapshot) -> bool:
        return True

    def run(self, snapshot: TensorSnapshot, first: int, values: Sequence[Tensor]) -> None:
        for at, t in enumerate(values, first):
            snapshot.addresses[at] = t.data_ptr()
        for loop, found, arrays in self.calls:
            snapshot.gather(found, arrays[0].buffer_info()[0])
            loop.launch(*arrays)


@dataclass
class _DeviceCall:
    """Launch over those members of a call that are aligned, or over the others."""

    launch: Launch
    ready: Ready
    members: Members
    found: Addresses
    first: int
    """Row of the launch's first entry in the table of all launches."""


class _OnCuda:
    """Launches on CUDA: all tables, and numbers on the host, are copied to the device at once."""

    def __init__(self, rows: Sequence[_Rows], device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.current_stream(device)
        self.calls: list[_DeviceCall] = []
        self.length = 0
        aligned: list[tuple[int, int]] = []
        for one in rows:
            if not isinstance(one.runner, Launch):
                raise Unrepeatable("its kernels are no launches")
            for is_aligned, at in one.runner.groups(one.starts(), one.sizes).items():
                members = Members(tuple(one.sizes[m] for m in at), is_aligned, device)
                ready = one.runner.ready_for(members)
                ready.used_by(self.stream)
                found = one.addresses(range(len(one.entries)), at)
                self.calls.append(_DeviceCall(one.runner, ready, members, found, self.length))
                self.length += len(found) + len(found) % 2  # Triton has other code for odd ones
                if is_aligned:
                    aligned += [one.entries[i][m] for m in at for i in one.full]
        self.aligned = Addresses(aligned)

    def fit(self, snapshot: TensorSnapshot) -> bool:
        """See `Launches`: on the same stream, and where nothing is to be made ready."""
        return not (
            torch.cuda.current_device() != self.device.index
            or torch.cuda.current_stream(self.device) != self.stream
            or is_capturing()
            or not all(call.ready.is_full for call in self.calls)
            or snapshot.bits(self.aligned) % ALIGNMENT
        )

    def run(self, snapshot: TensorSnapshot, first: int, values: Sequence[Tensor]) -> None:
        size = self.length + len(values)
        host = torch.empty(size, dtype=torch.int64, device="cpu", pin_memory=True)
        near = torch.empty(size, dtype=torch.int64, device=self.device)
        for k, t in enumerate(values):
            snapshot.addresses[first + k] = t.data_ptr()
            if t.device != self.device:
                place = _WORD * (self.length + k)
                ctypes.memmove(host.data_ptr() + place, t.data_ptr(), t.nbytes)
                snapshot.addresses[first + k] = near.data_ptr() + place
        for call in self.calls:
            snapshot.gather(call.found, host.data_ptr() + _WORD * call.first)
        near.copy_(host, non_blocking=True)
        for call in self.calls:
            table = near.narrow(0, call.first, len(call.found))
            call.launch.call(table, call.ready.geometry, call.members)
