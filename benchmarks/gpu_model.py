"""Prediction for H100 and H200 from the machine code of the kernels of classes.

Nothing is run. Each kernel is compiled for sm_90 as it would be on such a device, and the loop over
whole blocks is looked at in its machine code:

    instructions   for each element, without the paths that only subnormal or huge operands take
    bytes          for each element, read and written
    by execution   the least nanoseconds that a device needs to issue them, for 1000 elements; a
                   multiprocessor issues four instructions of 32 threads in a clock, of those on
                   integers, comparisons and packed conversions (ALU) two, and of square roots,
                   reciprocals and single conversions (XU) half of one
    by memory      what moving the bytes takes, at 0.9 of the nominal bandwidth, which is about what
                   a copy reaches
    share          of a copy's bandwidth: the most, where both overlap perfectly, and the least,
                   where they do not at all
    last wave      the share of a device that has work on average, for a number of elements and a
                   size of chunks: programs run in waves, and the last is not full

Written to benchmarks/results/gpu_model.json.
"""

import argparse
import json
import math
import re
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/support"))
import triton
from kernels import CASES, SM90, assembled, captured, kernel_of
from steps import conditions

from collage_fx.passes.ir.program import Settings
from collage_fx.runtime.kernels.triton_launch import WARPS

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
COPY = 0.9
LANES = {"issue": 128, "ALU": 64, "XU": 16}
"""Instructions of a kind that a multiprocessor starts in a clock, counted by threads."""
ALU = [
    "F2FP",
    "FCHK",
    "FMNMX",
    "FSEL",
    "FSETP",
    "HSETP2",
    "IADD3",
    "ISETP",
    "LEA",
    "LOP3",
    "P2R",
    "PLOP3",
    "PRMT",
    "SEL",
    "SHF",
    "VIADD",
]
XU = ["F2F", "F2I", "I2F", "MUFU"]
WIDE = Settings("plus", "wide", "mcf2")
KERNELS = {
    "light eft": ("adamw-light", CASES["adamw-light"].settings),
    "plus eft": ("adamw-plus", CASES["adamw-plus"].settings),
    "plus wide": ("adamw-plus", WIDE),
    "remainder16": ("adamw-remainder16", CASES["adamw-remainder16"].settings),
    "sr": ("adamw-sr", CASES["adamw-sr"].settings),
    "ulp4": ("adamw-ulp4", CASES["adamw-ulp4"].settings),
}
SIZES = {"26M": 26_000_000, "7B shapes, 1.6B": 1_620_000_000}
CHUNKS = (4096, 8192, 16384)


class Card(NamedTuple):
    """A device."""

    multiprocessors: int
    gigahertz: float
    """Clock under load."""
    terabytes: float
    """A second, nominally."""


CARDS = {"H100 SXM": Card(132, 1.755, 3.35), "H200 SXM": Card(132, 1.755, 4.8)}


@dataclass
class Loop:
    """The loop over whole blocks in a kernel's machine code."""

    instructions: Counter[str]
    """Count of each on the path that is usually taken."""
    moved: int
    """Bytes that a thread reads and writes, 16 at a time."""


def disassembled(cubin: bytes, tool: str, *options: str) -> str:
    """Return what one of CUDA's tools, which come with Triton, says of a binary."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(TOOLS / tool), *options, file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def main_loop(sass: str) -> Loop:
    """Return the loop that reads 16 bytes at a time.

    Raises ValueError unless there is exactly one.
    """
    lines, labels = _lines(sass)
    loops = []
    for end, line in enumerate(lines):
        begin = _target(line, labels)
        if begin is not None and begin <= end:
            body = range(begin, end + 1)
            wide = sum("LDG.E.128" in lines[i] or "STG.E.128" in lines[i] for i in body)
            if any("LDG.E.128" in lines[i] for i in body):
                loops.append((body, wide))
    if len(loops) != 1:
        raise ValueError(f"{len(loops)} loops read 16 bytes at a time")
    ((body, wide),) = loops
    rare = _rare(lines, labels, body)
    return Loop(Counter(_name(lines[i]) for i in body if i not in rare), 16 * wide)


def _lines(sass: str) -> tuple[list[str], dict[str, int]]:
    """Return the instructions, and which one each label stands before."""
    lines: list[str] = []
    labels: dict[str, int] = {}
    for line in sass.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = len(lines)
        elif instruction := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", line):
            lines.append(instruction[1])
    return lines, labels


def _target(line: str, labels: dict[str, int]) -> int | None:
    """Return where a branch goes."""
    found = re.search(r"\bBRA\b.*`\((\.L_x_\d+)\)", line)
    return labels.get(found[1]) if found else None


def _rare(lines: list[str], labels: dict[str, int], body: range) -> set[int]:
    """Return the instructions of a loop that are jumped over unless a function is called there.

    Those functions are what divisions and roots do with operands that are subnormal or huge.
    """
    found: set[int] = set()
    for at in body:
        end = _target(lines[at], labels) if lines[at].startswith("@") else None
        if end in body and end is not None and any("CALL" in x for x in lines[at:end]):
            found |= set(range(at + 1, end))
    return found


def _name(line: str) -> str:
    return re.sub(r"^@!?U?P\w+\s+", "", line).split()[0].partition(".")[0]


def predicted(loop: Loop, traffic: int, registers: int, card: Card) -> dict[str, Any]:
    """Return what is to be expected of a kernel on a device.

    Args:
        loop: of its machine code.
        traffic: bytes that it reads and writes for each element.
        registers: of a thread.
        card: the device.
    """
    elements = loop.moved / traffic
    kinds = {"issue": loop.instructions.total()}
    kinds |= {"ALU": sum(loop.instructions[n] for n in ALU)}
    kinds |= {"XU": sum(loop.instructions[n] for n in XU)}
    clocks = {kind: n / elements / LANES[kind] for kind, n in kinds.items()}
    busiest = max(clocks, key=lambda kind: clocks[kind])
    execution = 1000 * clocks[busiest] / (card.multiprocessors * card.gigahertz)
    memory = 1000 * traffic / (COPY * card.terabytes * 1000)
    blocks = min(2048 // (32 * WARPS), 65536 // (32 * WARPS * 8 * math.ceil(registers / 8)))
    waves: dict[str, Any] = {}
    for size, count in SIZES.items():
        for chunk in CHUNKS:
            wave = count / chunk / (card.multiprocessors * blocks)
            waves[f"{size}, chunks of {chunk}"] = round(wave / math.ceil(wave), 3)
    return {
        "busiest": busiest,
        "by execution, ns": round(execution, 2),
        "by memory, ns": round(memory, 2),
        "most, share of copy": round(memory / max(memory, execution), 3),
        "least, share of copy": round(memory / (memory + execution), 3),
        "blocks at once": blocks,
        "last wave": waves,
    }


def row(name: str) -> dict[str, Any]:
    """Return what is to be said of one kernel."""
    case, settings = KERNELS[name]
    kernel = kernel_of(captured(CASES[case]).only(settings))
    cubin = assembled(kernel.triton(), SM90)["cubin"]
    loop = main_loop(disassembled(cubin, "nvdisasm", "-c"))
    usage = re.search(r"REG:(\d+)", disassembled(cubin, "cuobjdump", "-res-usage"))
    if usage is None:
        raise ValueError("cuobjdump names no registers")
    traffic, registers = CASES[case].traffic, int(usage[1])
    elements = loop.moved / traffic
    return {
        "instructions": round(loop.instructions.total() / elements, 1),
        "bytes": traffic,
        "registers": registers,
        "counts in a loop": dict(loop.instructions.most_common()),
        **{card: predicted(loop, traffic, registers, CARDS[card]) for card in CARDS},
    }


def main() -> None:
    """Compile, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    out = args.out or Path(__file__).parent / "results/gpu_model.json"
    rows = {}
    for name in KERNELS:
        rows[name] = found = row(name)
        print(f"{name:12} {found['instructions']} instructions, {found['bytes']} bytes an element")
        for card in CARDS:
            print(f"    {card}: {found[card]}")
    result = {"prediction": "nothing was run on a GPU", "conditions": conditions(), "kernels": rows}
    out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
