"""Losses of an optimizer's updates by layer over a training run, and the cost of measuring them.

The transformer of examples/byte_model.py is trained in bf16 by a compensated AdamW, with a cosine
from the peak rate. A monitor measures every n-th step: of each layer the share of updates that
plain bf16 would have lost whole, and the share that was lost as they are stored. Steps without a
measurement and steps with one alternate in the same run, so that the difference of their medians is
its cost. Written to benchmarks/results/monitor.json, and, with --plot, to a picture.
"""

import argparse
import json
import statistics
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
import train_bytes  # noqa: E402

PARTS = ("forward and backward", "optimizer step", "measured step")
OFTEN = 100
"""Steps between a user's measurements; the run measures more often, to have more points."""


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Train, and return the shares by layer and the seconds of each part of a step."""
    torch.manual_seed(0)
    size = byte_model.Size(batch=args.batch)
    model = byte_model.ByteModel(size).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    collage_fx.compile_(optimizer, storage=args.storage)
    found = collage_fx.monitor(optimizer, every=args.every, model=model)
    data = byte_model.batches(byte_model.read_text()[0], 1, "cpu", size)
    seconds: dict[str, list[float]] = {part: [] for part in PARTS}
    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = train_bytes.learning_rate(step, args.steps, args.lr)
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = byte_model.loss_of(model, *next(data))
        loss.backward()
        middle = time.perf_counter()
        optimizer.step()
        measured = PARTS[2] if (step + 1) % args.every == 0 else PARTS[1]
        seconds[PARTS[0]].append(middle - start)
        seconds[measured].append(time.perf_counter() - middle)
        if measured == PARTS[2]:
            print(f"step {step + 1} of {args.steps}: loss {loss.item():.3f}", file=sys.stderr)
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "tokens in a step": size.batch * size.context,
        "seconds": {part: statistics.median(times[2:]) for part, times in seconds.items()},
        "steps": [one.step for one in found.history],
        "layers": [{n: s.to_dict() for n, s in one.layers().items()} for one in found.history],
        "kinds": [{n: s.to_dict() for n, s in one.kinds().items()} for one in found.history],
    }


def cost(seconds: dict[str, float]) -> float:
    """Return the share of the training time that a measurement in every hundredth step takes."""
    whole = seconds[PARTS[0]] + seconds[PARTS[1]]
    return (seconds[PARTS[2]] - seconds[PARTS[1]]) / (OFTEN * whole)


def plot(result: dict[str, Any], path: Path) -> None:
    """Draw the lost share of each layer: of plain bf16 as lines, of what is stored as dashes."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    names = [n for n in result["layers"][0] if n.startswith("blocks") or n in ("bytes", "head")]
    tops = sorted({".".join(n.split(".")[:2]) for n in names})
    colours = plt.get_cmap("viridis")
    for k, top in enumerate(tops):
        inside = [n for n in names if n == top or n.startswith(top + ".")]
        for key, style in (("lost_plain", "-"), ("lost", "--")):
            shares = [
                100 * statistics.mean(one[n][key] for n in inside) for one in result["layers"]
            ]
            label = top if key == "lost_plain" else None
            colour = colours(k / len(tops))
            axes.plot(result["steps"], shares, style, color=colour, label=label)
    axes.set(xlabel="step", ylabel="updates lost whole, percent", ylim=(-2, 102))
    axes.set_title(f"lines: plain bf16 would lose; dashes: lost with storage {result['storage']!r}")
    axes.grid(alpha=0.3)
    axes.legend(title="layer", ncols=2, fontsize="small")
    figure.savefig(path, dpi=110)


def main() -> None:
    """Train, print the shares and the cost, and write both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--batch", type=int, default=byte_model.BATCH)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--storage", default="mcf2")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/monitor.json")
    args = parser.parse_args()
    result = {"conditions": conditions(), "storage": args.storage, **train(args)}
    result["cost at every=100"] = cost(result["seconds"])
    last = result["kinds"][-1]["parameter"]
    print(f"lost by plain bf16 {last['lost_plain']:.1%}, as stored {last['lost']:.2%}, in the last")
    for part, median in result["seconds"].items():
        print(f"{part:22} {1e3 * median:9.1f} ms")
    print(f"every=100 costs {result['cost at every=100']:.2%} of the training time")
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    if args.plot:
        plot(result, args.plot)


if __name__ == "__main__":
    main()
