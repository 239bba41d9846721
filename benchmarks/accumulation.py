"""Gradients of 64 micro-batches, summed in four ways: the sums, the losses, the bytes and the time.

A byte-level transformer (examples/byte_model.py, width 64, 135,488 weights in bf16) is trained on
the standard library's source by AdamW, 64 micro-batches of two sequences a step. For each seed all
ways begin with the same weights and take the same batches.

    bf16   gradients are summed in bf16, as PyTorch does; the step is that of `collage_fx.compile_`
    mcf2   the same after `collage_fx.accumulate(model)`
    ulp8   the same after `collage_fx.accumulate(model, "ulp8")`
    fp32   gradients are summed in fp32, and fp32 copies of the weights are trained

Of each sum the error beside the float64 sum of the same gradients, in the first and the last step;
validation losses; bytes of an element of the gradients while they are summed; and the time of a
micro-batch, the ways taking turns. Written to benchmarks/results/accumulation_cpu.json.
"""

import argparse
import itertools
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from steps import conditions
from torch import Tensor, nn

import collage_fx

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples"))
import byte_model  # noqa: E402
import train_bytes  # noqa: E402

WAYS = ("bf16", "mcf2", "ulp8", "fp32")
MICRO, LR, HELD_OUT = 64, 2e-3, 40
SIZE = byte_model.Size(width=64, batch=2)
RESULTS = ROOT / "benchmarks/results/accumulation_cpu.json"


class Way:
    """A model that is trained in one way."""

    def __init__(self, name: str, seed: int) -> None:
        torch.manual_seed(seed)
        self.name, self.model = name, byte_model.ByteModel(SIZE).bfloat16()
        self.weights = list(self.model.parameters())
        self.trained = self.weights
        if name == "fp32":
            self.trained = [nn.Parameter(p.detach().float()) for p in self.weights]
        self.optimizer = torch.optim.AdamW(self.trained, lr=LR)
        if name != "fp32":
            collage_fx.compile_(self.optimizer)
        if name in ("mcf2", "ulp8"):
            collage_fx.accumulate(self.model, name)
        self.milliseconds: list[float] = []

    def add(self, batch: byte_model.Batch, exact: list[Tensor] | None) -> None:
        """Add the gradients of a micro-batch; to float64 sums too, if there are any."""
        loss = byte_model.loss_of(self.model, *batch) / MICRO
        if exact is not None:
            own = torch.autograd.grad(loss, self.weights, retain_graph=True)
            torch._foreach_add_(exact, [g.double() for g in own])
        start = time.perf_counter()
        loss.backward()
        if self.name == "fp32":
            for master, p in zip(self.trained, self.weights, strict=True):
                assert p.grad is not None
                fresh, p.grad = p.grad.float(), None
                master.grad = fresh if master.grad is None else master.grad.add_(fresh)
        self.milliseconds.append(1e3 * (time.perf_counter() - start))

    def error(self, exact: list[Tensor]) -> float:
        """Return the error of the sums, over their size."""
        found = [collage_fx.value(p.grad).double() for p in self.trained]  # type: ignore[arg-type]
        errors = [(f - e).square().sum() for f, e in zip(found, exact, strict=True)]
        sizes = [e.square().sum() for e in exact]
        return float((sum(errors) / sum(sizes)) ** 0.5)

    def bytes(self) -> float:
        """Return the bytes of an element of the sums, residuals included."""
        grads = [p.grad for p in self.trained if p.grad is not None]
        held = sum(t.nbytes for g in grads for t in (g, *collage_fx.residuals(g)))
        return held / sum(g.numel() for g in grads)

    def step(self) -> None:
        """Take a step, and begin new sums."""
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.name == "fp32":
            torch._foreach_copy_([p.data for p in self.weights], [m.data for m in self.trained])


def train(seed: int, steps: int) -> list[dict[str, Any]]:
    """Train in all ways, which take turns; return a row for each."""
    text, other = byte_model.read_text()
    held_out = list(itertools.islice(byte_model.batches(other, 7, "cpu", SIZE), HELD_OUT))
    batches = byte_model.batches(text, 100 + seed, "cpu", SIZE)
    ways = [Way(name, seed) for name in WAYS]
    rows: list[dict[str, Any]] = [
        {"way": name, "seed": seed, "errors": [], "losses": []} for name in WAYS
    ]
    for step in range(steps):
        taken = list(itertools.islice(batches, MICRO))
        for way, row in zip(ways, rows, strict=True):
            exact = None
            if step in (0, steps - 1):
                exact = [torch.zeros_like(p, dtype=torch.float64) for p in way.weights]
            for batch in taken:
                way.add(batch, exact)
            if exact is not None:
                row["errors"].append(way.error(exact))
            row["bytes"] = way.bytes()
            way.step()
            if (step + 1) % 10 == 0:
                row["losses"].append((step + 1, train_bytes.validate(way.model, held_out)))
        shown = ", ".join(f"{r['way']} {r['losses'][-1][1]:.4f}" for r in rows if r["losses"])
        if (step + 1) % 10 == 0:
            print(f"seed {seed}, step {step + 1} of {steps}: {shown}", file=sys.stderr)
    for way, row in zip(ways, rows, strict=True):
        row["ms"] = statistics.median(way.milliseconds[2 * MICRO :])
    return rows


def main() -> None:
    """Train with all seeds; write the file after each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=80)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for seed in range(chosen.seeds):
        rows += train(seed, chosen.steps)
        RESULTS.write_text(
            json.dumps({**conditions(), "micro": MICRO, "rows": rows}, indent=1) + "\n"
        )
    for name in WAYS:
        own = [r for r in rows if r["way"] == name]
        gap = [
            r["losses"][-1][1] - f["losses"][-1][1]
            for r, f in zip(own, (r for r in rows if r["way"] == "fp32"), strict=True)
        ]
        print(
            f"{name}: errors {own[0]['errors'][0]:.1e} and {own[0]['errors'][-1]:.1e}, "
            f"{own[0]['bytes']:.2f} bytes, {statistics.median(r['ms'] for r in own):.2f} ms, "
            f"loss {statistics.fmean(r['losses'][-1][1] for r in own):.4f}, "
            f"beside fp32 {', '.join(f'{g:+.4f}' for g in gap)}"
        )


if __name__ == "__main__":
    main()
