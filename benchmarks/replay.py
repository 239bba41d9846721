"""Replay one recorded gradient stream through AdamW and compare with float64.

A small byte-level model is trained in bf16 for `--steps` steps and its gradients are recorded. The
same stream then drives AdamW (weight decay 0.1) in float64, in plain bf16 and compensated, for each
beta2 and learning rate. Printed and written to benchmarks/results/replay.json:

    E_theta = |theta - theta64| / |theta64 - theta0|,   E_v = |v - v64| / |v64|

with the 2-norm over all parameters and, for compensated states, the value of the whole expansion.

With `--before DIR`, where another version of collage_fx is installed (see other_version.py), both
versions take the compensated steps again, each trajectory in a process of its own with empty
caches, in turns. Rows then also say whether parameters and second moments are equal bit for bit
after the last step, words of the expansions taken together, or how far apart they are in the same
measure as the errors; and for both versions the seconds to the end of the second step, which
compiles what the first has made states for, and the median of the steps after that.
"""

import argparse
import itertools
import json
import os
import platform
import statistics
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from other_version import other_version
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
    seconds: list[float] = field(default_factory=list)
    """The time of each step."""


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
    seconds = []
    for gradients in stream:
        for p, g in zip(params, gradients, strict=True):
            p.grad = g.to(dtype)
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    flat = [collage_fx.value(p).flatten() for p in params]
    moments = [collage_fx.value(optimizer.state[p]["exp_avg_sq"]).flatten() for p in params]
    return Result(torch.cat(flat), torch.cat(moments), seconds)


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
    "collage light": lambda optimizer: collage_fx.compile(optimizer, level="light", storage="mcf2"),
    "collage plus": lambda optimizer: collage_fx.compile(optimizer, level="plus", storage="mcf2"),
    "collage plus, wide": lambda optimizer: collage_fx.compile(
        optimizer, level="plus", storage="mcf2", arithmetic="wide"
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


def trajectory(folder: str, beta2: float, lr: float, name: str) -> None:
    """Replay what lies in a folder, and leave the result there; in a process of its own."""
    start, stream = torch.load(f"{folder}/recorded")
    torch.save(vars(replay(start, stream, beta2, lr, VARIANTS[name])), f"{folder}/result")


def result_of(installed: Path | None, folder: str, **row: Any) -> Result:
    """Return the result of a version of collage_fx over what lies in a folder."""
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        with other_version(installed, torch.get_num_threads()) as other:
            other.call("replay", "trajectory", folder=folder, **row)
    return Result(**torch.load(f"{folder}/result"))


def beside(before: Path, folder: str, **row: Any) -> dict[str, Any]:
    """Return what a row says of this version and of another one."""
    now, then = (result_of(version, folder, **row) for version in (None, before))
    theta, v = errors(torch.load(f"{folder}/recorded")[0], then, now)
    found: dict[str, Any] = {"theta_equal": torch.equal(now.theta, then.theta)}
    found |= {"theta_apart": theta, "v_equal": torch.equal(now.v, then.v), "v_apart": v}
    for suffix, result in (("", now), ("_before", then)):
        found["first_s" + suffix] = round(sum(result.seconds[:2]), 2)
        found["step_ms" + suffix] = round(statistics.median(result.seconds[2:]) * 1e3, 3)
    return found


def conditions(steps: int, start: list[Tensor]) -> dict[str, Any]:
    """Return what the results were measured with."""
    return {
        "command": " ".join(["python", *sys.argv]),
        "date": time.strftime("%Y-%m-%d"),
        "load": round(os.getloadavg()[0], 1),
        "device": f"cpu, {platform.machine()}, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "steps": steps,
        "parameters": sum(s.numel() for s in start),
    }


def table(
    start: list[Tensor], stream: list[list[Tensor]], before: Path | None
) -> Iterator[dict[str, Any]]:
    """Yield the rows, and print them."""
    print(f"{'beta2':>6} {'lr':>7} {'variant':20} {'E_theta':>9} {'E_v':>9}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        torch.save((start, stream), f"{folder}/recorded")
        for beta2, lr in itertools.product(BETA2, RATES):
            for name, (theta, v) in compare(start, stream, beta2, lr, list(VARIANTS)).items():
                print(f"{beta2:6} {lr:7.0e} {name:20} {theta:9.2e} {v:9.2e}", flush=True)
                row = {"beta2": beta2, "lr": lr, "variant": name, "E_theta": theta, "E_v": v}
                if before is not None and name.startswith("collage"):
                    row |= (found := beside(before, folder, beta2=beta2, lr=lr, name=name))
                    print("    ", *(f"{k} {v}" for k, v in found.items()), flush=True)
                yield row


def main() -> None:
    """Run every combination, print the table and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--before", type=Path, help="where another version is installed")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/replay.json")
    args = parser.parse_args()
    start, stream = record(args.steps)
    found = {**conditions(args.steps, start), "weight_decay": WEIGHT_DECAY}
    args.out.parent.mkdir(exist_ok=True)
    rows = []
    for row in table(start, stream, args.before):
        rows.append(row)
        args.out.write_text(json.dumps({"conditions": found, "rows": rows}, indent=1) + "\n")
    print(f"written to {args.out}")


if __name__ == "__main__":
    main()
