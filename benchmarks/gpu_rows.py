"""Rows of the GPU check: one for each measurement, in a file as soon as it is made.

A row has the part and the name of what was measured, its median, 10th and 90th percentile and
repeats, and the conditions: bandwidth of a copy in the same process, clocks, device, versions,
commit, command and date. A verdict has `ok`; what went wrong has `error`.
"""

import io
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from steps import triton_version

Row = dict[str, Any]
CONDITIONS = ("clocks", "device", "torch", "triton", "cuda", "python", "commit", "command", "date")


def spread(values: Sequence[float]) -> Row:
    """Return median, 10th and 90th percentile, and the number of values."""
    ordered = sorted(values)
    low, high = (ordered[round(q * (len(ordered) - 1))] for q in (0.1, 0.9))
    return {
        "median": statistics.median(ordered),
        "p10": low,
        "p90": high,
        "repeats": len(ordered),
    }


def commit(root: Path) -> str:
    """Return the commit that is checked out, 'unknown' where git does not say."""
    command = ["git", "-C", str(root), "rev-parse", "--short=12", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() or "unknown"


def clocks() -> str:
    """Return SM and memory clocks in MHz, temperature and power draw, 'unknown' without NVML."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(torch.cuda.current_device())
        sm, memory = (pynvml.nvmlDeviceGetClockInfo(handle, kind) for kind in (1, 2))
        heat, watts = pynvml.nvmlDeviceGetTemperature(handle, 0), pynvml.nvmlDeviceGetPowerUsage
        return f"SM {sm}, memory {memory} MHz, {heat} C, {watts(handle) / 1e3:.0f} W"
    except Exception:  # without the package, the library or a device that it knows
        return "unknown"


class Rows:
    """The rows of one part, written to a file whenever one is added."""

    def __init__(
        self,
        file: Path,
        part: str,
        device: str,
        command: str,
        *,
        commit: str = "unknown",
        folder: Path = Path(),
    ) -> None:
        self.file = file
        self.folder = folder
        self.part = part
        self.device = device
        self.rows: list[Row] = []
        self.dumped: Row = {}
        self.copied: Callable[[], Row] = dict
        """Returns the bandwidth of a copy in this process."""
        self.fixed = {"commit": commit, "command": command, "date": time.strftime("%Y-%m-%d")}

    def add(self, name: str, **found: Any) -> Row:
        """Add a row, with the conditions as they are now."""
        row = {"part": self.part, "name": name, **found, **self._conditions()}
        self.rows.append(row)
        _write(self.file, json.dumps(self.rows, default=str).encode())
        return row

    def dump(self, name: str, tensors: Any) -> None:
        """Keep tensors of a row in the part's own file, beside those of its rows before."""
        self.dumped[name] = tensors
        room = io.BytesIO()
        torch.save(self.dumped, room)
        _write(self.folder / f"differing_{self.part.replace(' ', '_')}.pt", room.getvalue())

    def measure(self, name: str, values: Sequence[float], unit: str = "ms", **more: Any) -> Row:
        """Add a row for repeated measurements of the same."""
        return self.add(name, unit=unit, **spread(values), **more)

    def check(self, name: str, ok: bool, **more: Any) -> Row:
        """Add a verdict."""
        return self.add(name, ok=bool(ok), **more)

    def _conditions(self) -> Row:
        cuda = self.device == "cuda"
        return {
            **self.copied(),
            "clocks": clocks() if cuda else "unknown",
            "device": torch.cuda.get_device_name() if cuda else f"cpu, {platform.machine()}",
            "torch": torch.__version__,
            "triton": triton_version,
            "cuda": torch.version.cuda,
            "python": platform.python_version(),
            **self.fixed,
        }


def _write(file: Path, content: bytes) -> None:
    """Write a file whole, whenever this process is ended."""
    new = file.with_suffix(".new")
    new.write_bytes(content)
    new.replace(file)


def wrong(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with an error or a verdict that is not as it should be.

    On an emulated device (tests/support/cuda_emulator) kernels compute nothing: no verdict counts.
    """
    return [
        row for row in rows if "error" in row or (row.get("ok") is False and not _emulated(row))
    ]


def _emulated(row: Row) -> bool:
    return "(emulated)" in row.get("device", "")


def table(rows: Sequence[Row]) -> str:
    """Return a line for each row: all that it has but the conditions, which are the same."""
    return "\n".join(map(_line, rows))


def _line(row: Row) -> str:
    hidden = {"part", "name", "median", "p10", "p90", "repeats", "unit", "copy, GB/s", *CONDITIONS}
    found = [f"{row['part']}: {row['name']}:"]
    if "median" in row:
        low, high = _short(row["p10"]), _short(row["p90"])
        found.append(f"{_short(row['median'])} {row['unit']} [{low}, {high}] x{row['repeats']}")
    found += [f"{key} {_short(value)}" for key, value in row.items() if key not in hidden]
    return " ".join(found)


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = " ".join(str(value).split())
    return text if len(text) <= 160 else f"{text[:60]} ... {text[-95:]}"
