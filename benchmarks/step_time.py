"""How long a compensated AdamW step takes, beside what else there is, on the same tensors.

    plain         bf16 parameters and states, torch.compile (on a GPU fused=True as well)
    light, plus   collage_fx at that level, in eft or wide arithmetic; "each" compiles a kernel for
                  each tensor (multi_tensor=False), the others one for all
    remainder16   level plus in storage remainder16, which holds fp32 exactly
    master        fp32 master weights and states, fused, with bf16 gradients and a bf16 copy

For each: the 20th, 50th and 80th percentile of a step in milliseconds; the bytes that its tables of
states ask to be read and written for each parameter; and those divided by the time, as a share of
what a plain copy of the same bytes reaches on the device in the same run. The ways take turns, a
round of steps each. Written to benchmarks/results/step_time_<device>.json.
"""

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from steps import MIXED, Shapes, conditions, parameters
from torch import Tensor

import collage_fx

Step = Callable[[], Any]


def gpt(layers: int, width: int, vocabulary: int = 50304) -> Shapes:
    """Return the shapes of a GPT's parameters."""
    block = [(3 * width, width), (3 * width,), (width, width), (width,), (4 * width, width)]
    block += [(4 * width,), (width, 4 * width), *[(width,)] * 5]
    return [(vocabulary, width), *block * layers, (width,), (width,)]


SETS: dict[str, dict[str, Shapes]] = {
    "cpu": {
        "300 of 64 elements": [(64,)] * 300,
        "300 mixed, 1.5M": [MIXED[i % len(MIXED)] for i in range(300)],
        "GPT, 26M": gpt(4, 512, 8192),
    },
    "cuda": {
        "300 of 64 elements": [(64,)] * 300,
        "GPT, 1.3B": gpt(24, 2048),
        "300 of 7B shapes, 2B": [(4096, 4096), (4096,), (11008, 1024)] * 100,
    },
}
BYTES = {"plain": 14, "light": 18, "plus": 22, "remainder16": 22, "master": 40}
"""For each parameter; master: gradient widened (6), fused step (28), parameter copied (6)."""


def ways(shapes: Shapes, device: str) -> dict[str, Step]:
    """Return the steps to be measured, each over tensors of its own."""
    found: dict[str, Step] = {"plain": torch.compile(_adamw(shapes, device).step)}
    if device == "cuda":
        found["plain fused"] = _adamw(shapes, device, fused=True).step
    found["master"] = _master(shapes, device)
    for level in ("light", "plus"):
        for arithmetic in ("eft", "wide"):
            found[f"{level} {arithmetic}"] = collage_fx.compile(
                _adamw(shapes, device), level=level, arithmetic=arithmetic, multi_tensor=True
            )
    found["remainder16"] = collage_fx.compile(
        _adamw(shapes, device), level="plus", storage="remainder16", multi_tensor=True
    )
    found["plus eft each"] = collage_fx.compile(
        _adamw(shapes, device), level="plus", multi_tensor=False
    )
    return found


def _adamw(shapes: Shapes, device: str, **options: Any) -> torch.optim.Optimizer:
    if device == "cuda":
        options = {"capturable": True, **options}
    return torch.optim.AdamW(parameters(shapes, device), lr=1e-4, **options)


def _master(shapes: Shapes, device: str) -> Step:
    params: list[Tensor] = parameters(shapes, device)
    masters = [p.detach().float().requires_grad_() for p in params]
    for master in masters:
        master.grad = torch.empty_like(master)
    optimizer = torch.optim.AdamW(masters, lr=1e-4, fused=True)

    @torch.no_grad()
    def step() -> None:
        torch._foreach_copy_([m.grad for m in masters], [p.grad for p in params])
        optimizer.step()
        torch._foreach_copy_(params, masters)

    return step


def seconds(step: Step, steps: int, device: str) -> list[float]:
    """Return the time of each of some steps."""
    found = []
    for _ in range(steps):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        if device == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - start)
    return found


def measure(shapes: Shapes, device: str, rounds: int, steps: int, only: list[str]) -> list[Any]:
    """Return the rows of one set of shapes."""
    count = sum(torch.Size(s).numel() for s in shapes)
    steppers = {name: way for name, way in ways(shapes, device).items() if not only or name in only}
    a, b = (torch.empty(count * 4, dtype=torch.bfloat16, device=device) for _ in range(2))
    steppers["copy"] = lambda: a.copy_(b)
    times: dict[str, list[float]] = {name: [] for name in steppers}
    for name, step in steppers.items():
        seconds(step, 3, device)
        print(f"  {name} compiled", flush=True)
    for _ in range(rounds):
        for name, step in steppers.items():
            times[name] += seconds(step, steps, device)
    copied = 4 * count * 4 / statistics.median(times["copy"])
    rows = []
    for name, found in times.items():
        p20, p50, p80 = (sorted(found)[int(q * len(found))] for q in (0.2, 0.5, 0.8))
        each = BYTES.get(name.split()[0])
        row: dict[str, Any] = {"way": name, "p20_ms": p20, "p50_ms": p50, "p80_ms": p80}
        row = {k: round(v * 1e3, 4) if k != "way" else v for k, v in row.items()}
        if each is not None:
            row |= {"bytes": each, "share_of_copy": round(each * count / p50 / copied, 3)}
        rows.append(row)
    return rows


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(description="step time beside other ways")
    parser.add_argument("--device", choices=SETS, default="cpu")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--sets", nargs="+", help="names of sets of shapes; all by default")
    parser.add_argument("--only", nargs="+", default=[], help="names of ways; all by default")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    out = args.out or Path(__file__).parent / f"results/step_time_{args.device}.json"
    results = []
    for name, shapes in SETS[args.device].items():
        if args.sets and name not in args.sets:
            continue
        for threads in args.threads if args.device == "cpu" else [torch.get_num_threads()]:
            torch.set_num_threads(threads)
            torch.compiler.reset()
            print(f"{name}, {threads} threads", flush=True)
            rows = measure(shapes, args.device, args.rounds, args.steps, args.only)
            results.append({"shapes": name, "threads": threads, "rows": rows})
            for row in rows:
                share = row.get("share_of_copy")
                times = f"{row['p20_ms']:9.3f} {row['p50_ms']:9.3f} {row['p80_ms']:9.3f} ms"
                print(f"  {row['way']:16} {times}" + (f"  {share:.0%} of copy" if share else ""))
            out.parent.mkdir(exist_ok=True)
            result = {"conditions": conditions(args.device), "results": results}
            out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
