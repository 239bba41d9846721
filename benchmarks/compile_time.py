"""What compiling a compensated AdamW step costs, beside stock Inductor on the same tensors.

For each number of bf16 tensors, of mixed shapes, in one process and without any cache:

    stock      first step under backend="inductor", seconds; and Inductor's own part of it
    collage    first step under backend="collage" (eft), seconds
    rewrite    time in the passes of collage_fx alone, and its ratio to Inductor's own part

Written to benchmarks/results/compile_time.json.
"""

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch._inductor.compile_fx import compile_fx, compile_fx_inner

from collage_fx.backend import Session
from collage_fx.config import CollageConfig

SHAPES = [(64, 64), (64,), (128, 64), (64, 128), (256, 64), (31,)]


def first_step(count: int, backend: Callable[..., Any]) -> float:
    """Return the seconds that the first step of AdamW over count tensors takes."""
    torch.compiler.reset()
    torch.manual_seed(0)
    params = [torch.randn(SHAPES[i % len(SHAPES)]).bfloat16() for i in range(count)]
    for p in params:
        p.requires_grad_().grad = torch.randn_like(p)
    step = torch.compile(torch.optim.AdamW(params, lr=1e-3).step, backend=backend)
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def measure(count: int) -> dict[str, Any]:
    """Return the row of the table for count tensors."""
    own: list[float] = []

    def timed_inner(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        result = compile_fx_inner(*args, **kwargs)
        own.append(time.perf_counter() - start)
        return result

    def stock(gm: Any, inputs: Any) -> Any:
        with torch._functorch.config.patch(enable_autograd_cache=False):
            return compile_fx(gm, inputs, inner_compile=timed_inner)

    session = Session(CollageConfig(), keep=True)
    with torch._inductor.config.patch(fx_graph_cache=False):
        stock_seconds = first_step(count, stock)
        collage_seconds = first_step(count, session)
    passes = {k: v for c in session.compiled for k, v in c.program.seconds.items()}
    rewrite = sum(passes.values())
    return {
        "tensors": count,
        "classes": sum(len(c.program.rewritten) for c in session.compiled),
        "stock_first_step_s": round(stock_seconds, 2),
        "stock_inductor_s": round(sum(own), 2),
        "collage_first_step_s": round(collage_seconds, 2),
        "rewrite_s": round(rewrite, 3),
        "rewrite_over_inductor": round(rewrite / sum(own), 4),
        "collage_over_stock": round(collage_seconds / stock_seconds, 2),
        "passes_s": {k: round(v, 4) for k, v in passes.items()},
    }


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(description="compile time beside stock Inductor")
    parser.add_argument("--tensors", type=int, nargs="+", default=[6, 30, 60])
    default = Path(__file__).parent / "results/compile_time.json"
    parser.add_argument("--out", type=Path, default=default)
    args = parser.parse_args()
    first_step(2, "inductor")  # type: ignore[arg-type]  # one-time work: ISA check, precompiled header
    rows = []
    for count in args.tensors:
        row = measure(count)
        rows.append(row)
        print(
            f"{count:4} tensors: stock {row['stock_first_step_s']} s, "
            f"collage {row['collage_first_step_s']} s ({row['collage_over_stock']}x), "
            f"rewrite {row['rewrite_s']} s = {row['rewrite_over_inductor']:.1%} of "
            f"Inductor's own {row['stock_inductor_s']} s",
            flush=True,
        )
    conditions = {
        "command": " ".join(["python", *sys.argv]),
        "date": time.strftime("%Y-%m-%d"),
        "device": f"cpu, {platform.machine()}, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
    }
    args.out.parent.mkdir(exist_ok=True)
    args.out.write_text(json.dumps({"conditions": conditions, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
