"""Cost of a doctor: a thousand training steps with and without it, side by side.

In turn a hundred steps of each run, which are the same but for the doctor; time is that of the
clock, and what the doctor says that it took is beside it: run it on quiet cores. Written to
benchmarks/results/doctor_cost.json.

    python benchmarks/doctor_cost.py
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from steps import conditions

import collage_fx

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples"))
import byte_model  # noqa: E402

STEPS, TURN = 1000, 100
SIZES = {
    "2 layers of 64": byte_model.Size(width=64),
    "4 layers of 96": byte_model.Size(layers=4, width=96),
    "12 layers of 32": byte_model.Size(layers=12, width=32, heads=2),
}


class Run:
    """One training run."""

    def __init__(self, size: byte_model.Size, train: Any) -> None:
        torch.manual_seed(0)
        self.model = byte_model.ByteModel(size).bfloat16()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.batches = byte_model.batches(train, 1, "cpu", size)
        self.seconds = 0.0

    def go_on(self, steps: int) -> None:
        """Take steps."""
        began = time.perf_counter()
        for _, (inputs, targets) in zip(range(steps), self.batches, strict=False):
            self.optimizer.zero_grad()
            byte_model.loss_of(self.model, inputs, targets).backward()
            self.optimizer.step()
        self.seconds += time.perf_counter() - began


def measured(name: str, train: Any, steps: int) -> dict[str, Any]:
    """Return how long a thousand steps take, with and without a doctor."""
    size = SIZES[name]
    looked, plain = Run(size, train), Run(size, train)
    for run in (plain, looked):
        run.go_on(5)  # what PyTorch does once
    plain.seconds = 0.0
    began = time.perf_counter()
    doctor = collage_fx.doctor(looked.optimizer, looked.model)
    looked.seconds = time.perf_counter() - began
    for _ in range(steps // TURN):
        took = plain.seconds
        plain.go_on(TURN)
        clock = doctor.lookers[0].clock
        if clock.started is not None:  # looks have their share of the other run's time only
            clock.started += plain.seconds - took
        looked.go_on(TURN)
        print(f"{name}: {looked.seconds:.1f} s, without {plain.seconds:.1f} s", flush=True)
    began = time.perf_counter()
    finding = doctor.finding()
    told = time.perf_counter() - began
    doctor.stop()
    (looker,) = doctor.lookers
    return {
        "model": name,
        "parameters": len(list(looked.model.parameters())),
        "elements": sum(p.numel() for p in looked.model.parameters()),
        "steps": steps,
        "looks": looker.looks,
        "seconds": round(looked.seconds + told, 2),
        "seconds without": round(plain.seconds, 2),
        "share by its own clock": round((looker.clock.spent + told) / plain.seconds, 4),
        "status": finding.status,
        "bits equal": all(
            torch.equal(p, q)
            for p, q in zip(looked.model.parameters(), plain.model.parameters(), strict=True)
        ),
    }


def main() -> None:
    """Measure all sizes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/doctor_cost.json")
    arguments = parser.parse_args()
    train, _ = byte_model.read_text()
    rows = [measured(name, train, arguments.steps) for name in SIZES]
    arguments.out.write_text(json.dumps({**conditions(), "rows": rows}, indent=1) + "\n")
    for row in rows:
        print(row)


if __name__ == "__main__":
    main()
