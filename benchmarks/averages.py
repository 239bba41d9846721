"""Time of an update of an exponential moving average of bf16 weights, beside other ways.

The weights are trained by a compiled AdamW in storage remainder16, a step before each update, so
that all of them have residuals and change. The ways take turns; the first update of each, which
compiles, is left out. Written to benchmarks/results/averages_cpu.json.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from step_time import SETS
from steps import Shapes, conditions, parameters
from torch import nn
from torch.optim import AdamW
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import collage_fx

DECAY = 0.9999
NAMES = ("GPT, 26M", "300 of 64 elements")


class Weights(nn.Module):
    """A module of some parameters."""

    def __init__(self, shapes: Shapes) -> None:
        super().__init__()
        self.all = nn.ParameterList(parameters(shapes))


def wide(model: nn.Module) -> Callable[[], None]:
    """Return an update of fp32 averages of the high words."""
    averages = [p.detach().float() for p in model.parameters()]

    @torch.no_grad()
    def update() -> None:
        values = [p.float() for p in model.parameters()]
        torch._foreach_lerp_(averages, values, 1 - DECAY)

    return update


def ways(model: nn.Module) -> dict[str, Callable[[], Any]]:
    """Return what is compared: name -> an update."""
    plain = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    found: dict[str, Callable[[], Any]] = {
        "AveragedModel in bf16": lambda: plain.update_parameters(model),
        "fp32, of bf16 weights": wide(model),
    }
    for storage in ("remainder16", "mcf2", "ulp8"):
        average = collage_fx.EMA(model, DECAY, storage=storage)
        found[f"EMA, {storage}"] = lambda average=average: average.update_parameters(model)
    return found


def measured(shapes: Shapes, rounds: int) -> dict[str, Any]:
    """Return the median of the time of each way in milliseconds, with the least and the most."""
    model = Weights(shapes)
    optimizer = AdamW(model.parameters(), lr=1e-5)
    collage_fx.compile_(optimizer)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    times: dict[str, list[float]] = {}
    each = ways(model)
    for _ in range(rounds + 3):
        for name, update in each.items():
            optimizer.step()
            start = time.perf_counter()
            update()
            times.setdefault(name, []).append(1e3 * (time.perf_counter() - start))
    kept = {name: sorted(found[3:]) for name, found in times.items()}
    return {
        name: {"median": statistics.median(found), "least": found[0], "most": found[-1]}
        for name, found in kept.items()
    }


def main() -> None:
    """Measure on one and two threads; write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=25)
    rounds = parser.parse_args().rounds
    rows: list[dict[str, Any]] = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for name in NAMES:
            found = measured(SETS["cpu"][name], rounds)
            rows.append({"set": name, "threads": threads, "ms": found})
            shown = ", ".join(f"{way} {row['median']:.2f}" for way, row in found.items())
            print(f"{name}, {threads} threads: {shown}", file=sys.stderr)
    path = Path(__file__).parent / "results" / "averages_cpu.json"
    path.write_text(json.dumps({**conditions(), "decay": DECAY, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
