"""Replay one recorded gradient stream through AdamW and compare with float64.

A small byte-level model is trained in bf16 for `--steps` steps and its gradients are recorded. The
same stream then drives AdamW (weight decay 0.1) in float64, in plain bf16 and compensated, for each
beta2 and learning rate. Printed and written to benchmarks/results/replay.json:

    E_theta = |theta - theta64| / |theta64 - theta0|,   E_v = |v - v64| / |v64|

with the 2-norm over all parameters and, for compensated states, the value of the whole expansion.
"""

import argparse
import json
import platform
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import collage_fx

BETA2 = (0.95, 0.99, 0.999)
RATES = (1e-3, 1e-4)
WEIGHT_DECAY = 0.1


class Model(nn.Module):
    """Predicts the next byte from eight bytes before it."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 8)
        self.body = nn.Sequential(
            nn.Linear(64, width), nn.GELU(), nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()
        )
        self.head = nn.Linear(width, 256)
        nn.init.normal_(self.embed.weight, std=0.02)  # as GPT-2 does; PyTorch's own is 1

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, 8) bytes to (batch, 256) logits."""
        logits: Tensor = self.head(self.body(self.embed(x).flatten(1)))
        return logits


def batches(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (batch, 8) contexts and (batch,) next bytes of the standard library's source."""
    stdlib = Path(sysconfig.get_path("stdlib"))
    text = b"".join(p.read_bytes() for p in sorted(stdlib.glob("*.py"))[:40])
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(seed)
    while True:
        at = torch.randint(len(data) - 9, (64,), generator=generator)
        yield torch.stack([data[i : i + 8] for i in at.tolist()]), data[at + 8]


def record(steps: int, seed: int = 0) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Return the initial bf16 parameters and, for each step, the bf16 gradients."""
    torch.manual_seed(seed)
    model = Model().bfloat16()
    start = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=WEIGHT_DECAY)
    stream = []
    for _, (x, y) in zip(range(steps), batches(seed), strict=False):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x).float(), y).backward()
        stream.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        optimizer.step()
    return start, stream


@dataclass
class Result:
    """Parameters and second moments after the last step, in float64."""

    theta: Tensor
    v: Tensor


def replay(
    start: list[Tensor],
    stream: list[list[Tensor]],
    beta2: float,
    lr: float,
    make_step: Callable[[torch.optim.Optimizer], Callable[[], object]],
    dtype: torch.dtype = torch.bfloat16,
) -> Result:
    """Run AdamW over the stream with parameters and states in dtype."""
    params = [p.to(dtype).requires_grad_() for p in (s.clone() for s in start)]
    optimizer = torch.optim.AdamW(
        params, lr=lr, betas=(0.9, beta2), weight_decay=WEIGHT_DECAY, foreach=True
    )
    step = make_step(optimizer)
    for gradients in stream:
        for p, g in zip(params, gradients, strict=True):
            p.grad = g.to(dtype)
        step()
    flat = [collage_fx.value(p).flatten() for p in params]
    moments = [collage_fx.value(optimizer.state[p]["exp_avg_sq"]).flatten() for p in params]
    return Result(torch.cat(flat), torch.cat(moments))


def errors(start: list[Tensor], exact: Result, found: Result) -> tuple[float, float]:
    """Return (E_theta, E_v)."""
    theta0 = torch.cat([s.double().flatten() for s in start])
    moved = (exact.theta - theta0).norm()
    return (
        float((found.theta - exact.theta).norm() / moved),
        float((found.v - exact.v).norm() / exact.v.norm()),
    )


VARIANTS: dict[str, Callable[[torch.optim.Optimizer], Callable[[], object]]] = {
    "plain bf16": lambda optimizer: optimizer.step,
    "collage light": lambda optimizer: collage_fx.compile(optimizer, level="light"),
    "collage plus": lambda optimizer: collage_fx.compile(optimizer, level="plus"),
    "collage plus, wide": lambda optimizer: collage_fx.compile(
        optimizer, level="plus", arithmetic="wide"
    ),
}


def compare(
    start: list[Tensor], stream: list[list[Tensor]], beta2: float, lr: float, names: list[str]
) -> dict[str, tuple[float, float]]:
    """Return name -> (E_theta, E_v) for these variants."""
    exact = replay(start, stream, beta2, lr, lambda o: o.step, torch.float64)
    found = {}
    for name in names:
        torch.compiler.reset()
        found[name] = errors(start, exact, replay(start, stream, beta2, lr, VARIANTS[name]))
    return found


def conditions(steps: int, start: list[Tensor]) -> dict[str, Any]:
    """Return what the results were measured with."""
    return {
        "command": " ".join(["python", *sys.argv]),
        "date": time.strftime("%Y-%m-%d"),
        "device": f"cpu, {platform.machine()}, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "steps": steps,
        "parameters": sum(s.numel() for s in start),
    }


def main() -> None:
    """Run every combination, print the table and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/replay.json")
    args = parser.parse_args()
    start, stream = record(args.steps)
    rows = []
    print(f"{'beta2':>6} {'lr':>7} {'variant':20} {'E_theta':>9} {'E_v':>9}", flush=True)
    for beta2 in BETA2:
        for lr in RATES:
            for name, (theta, v) in compare(start, stream, beta2, lr, list(VARIANTS)).items():
                print(f"{beta2:6} {lr:7.0e} {name:20} {theta:9.2e} {v:9.2e}", flush=True)
                rows.append({"beta2": beta2, "lr": lr, "variant": name, "E_theta": theta, "E_v": v})
    found = {**conditions(args.steps, start), "weight_decay": WEIGHT_DECAY}
    args.out.parent.mkdir(exist_ok=True)
    args.out.write_text(json.dumps({"conditions": found, "rows": rows}, indent=1) + "\n")
    print(f"written to {args.out}")


if __name__ == "__main__":
    main()
