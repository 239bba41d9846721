"""Compile time of a compensated step, beside stock Inductor on the same optimizer.

Each optimizer and number of bf16 tensors, of mixed shapes, in a process of its own, with empty
caches (cold), and in three more with those that the first one left (warm: the median of the three):

    first     seconds of the first step
    second    seconds of the second step; where the first has made states, it is compiled again
    dynamo    of both, the seconds in which Dynamo traces and builds its guards, the same for both
    own       of both, the seconds after Dynamo and AOTAutograd: for stock, Inductor; for collage,
              the passes, the search for parameters that are alike, and the compilation of kernels
    passes    of that, the seconds in the passes of collage_fx
    memory    what compiling adds to the peak memory of the process, MiB

"AdamW in backward" is one optimizer for each tensor of a small transformer, stepped by a hook as
soon as its gradient is there; `alone` is the same with each optimizer compiled by itself
(`without=("share",)`), stock is each step given to torch.compile, which may keep as many graphs.

What a machine does once (the check of its vector instructions, the precompiled header) is done
before. Written to benchmarks/results/compile_time.json as the rows come, those of other optimizers
and sizes being kept.
"""

import argparse
import json
import multiprocessing
import os
import resource
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

IN_BACKWARD = "AdamW in backward"
SIZES = (30, 100, 300, 1000)
WARM = 3
"""Processes that start with warm caches."""


def main() -> None:
    """Measure, print and write the table."""
    from steps import OPTIMIZERS, TRANSFORMER, conditions

    from collage_fx.runtime import progress

    parser = argparse.ArgumentParser(description="compile time beside stock Inductor")
    parser.add_argument("--tensors", type=int, nargs="+", default=SIZES)
    names = [*OPTIMIZERS, IN_BACKWARD]
    parser.add_argument("--optimizers", nargs="+", choices=names, default=names)
    parser.add_argument(
        "--stock-up-to", type=int, default=300, help="stock takes minutes for more tensors"
    )
    default = Path(__file__).parent / "results/compile_time.json"
    parser.add_argument("--out", type=Path, default=default)
    args = parser.parse_args()
    rows = json.loads(args.out.read_text())["rows"] if args.out.exists() else []
    for name in args.optimizers:
        one_each = name == IN_BACKWARD
        for count in [len(TRANSFORMER)] if one_each else args.tensors:
            row: dict[str, Any] = {"optimizer": name, "tensors": count}
            for way in ("collage", "alone", "stock") if one_each else ("collage", "stock"):
                if way != "stock" or count <= args.stock_up_to:
                    with tempfile.TemporaryDirectory() as cache:
                        processes = progress.over(
                            range(1 + WARM), "process", f"{name}, {count} tensors, {way}"
                        )
                        cold, *warm = (apart(way, name, count, cache) for _ in processes)
                        row[way] = {"cold": cold, "warm": sorted(warm, key=both)[WARM // 2]}
            place = row["optimizer"], row["tensors"]
            rows = [r for r in rows if (r["optimizer"], r["tensors"]) != place] + [row]
            print(line(row), flush=True)
            row["conditions"] = conditions()
            result = {"rows": rows}
            args.out.parent.mkdir(exist_ok=True)
            args.out.write_text(json.dumps(result, indent=1) + "\n")


def line(row: dict[str, Any]) -> str:
    """Return one row of the table as text."""
    ways = []
    for way in ("collage", "alone", "stock"):
        if way in row:
            cold, warm = row[way]["cold"], row[way]["warm"]
            ways.append(
                f"{way} {cold['first']:6.1f} + {cold['second']:5.1f} s (Dynamo {cold['dynamo']:.1f}"
                f", own {cold['own']:6.1f}), warm {warm['first']:5.1f} + {warm['second']:5.1f} s, "
                f"{cold['memory']:5.0f} MiB"
            )
    for way in ("alone", "stock"):
        if way in row:
            ratios = (both(row[way][t]) / both(row["collage"][t]) for t in ("cold", "warm"))
            ways.append("than {} {:.1f} times faster, warm {:.2f}".format(way, *ratios))
    return f"{row['optimizer']:6} {row['tensors']:5}: {'; '.join(ways)}"


def both(found: dict[str, float]) -> float:
    """Return the seconds of both steps."""
    return found["first"] + found["second"]


def apart(way: str, name: str, count: int, cache: str) -> dict[str, float]:
    """Measure in a process of its own."""
    os.environ |= {
        "TORCHINDUCTOR_CACHE_DIR": cache,
        "TRITON_CACHE_DIR": f"{cache}/triton",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        return pool.apply(measure, (way, name, count))


def measure(way: str, name: str, count: int) -> dict[str, float]:
    """Return the times of the first step."""
    import torch
    from steps import MIXED, OPTIMIZERS, TRANSFORMER, parameters
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    import collage_fx
    from collage_fx.compilation import aot
    from collage_fx.hooks.dynamo_settings import RECOMPILE_LIMIT
    from collage_fx.passes.codegen.multi_tensor_kernel import MultiTensorKernel
    from collage_fx.stand_in.stand_ins import StandIns
    from collage_fx.stand_in.steps import StandInSteps

    warnings.simplefilter("ignore")
    torch.compile(lambda x: x + 1)(torch.ones(9))
    own: list[float] = []
    passes: list[float] = []
    aot.narrow = timed(aot.narrow, own)
    StandIns.whole_graph = timed(StandIns.whole_graph, own)  # type: ignore[method-assign]
    StandInSteps._stand_ins = timed(StandInSteps._stand_ins, own)  # type: ignore[method-assign]
    aot.run_passes = timed(aot.run_passes, passes)
    aot.Compilation.inner = timed(aot.Compilation.inner, own)  # type: ignore[method-assign]
    made_for = timed(MultiTensorKernel._made_for, own)
    MultiTensorKernel._made_for = made_for  # type: ignore[method-assign]
    inner = timed(compile_fx_inner, own)

    def inductor(gm: Any, inputs: Any) -> Any:
        return compile_fx(gm, inputs, inner_compile=inner)

    def compiled(optimizer: Any) -> Any:
        if way == "stock":
            return torch.compile(optimizer.step, backend=inductor)
        return collage_fx.compile(optimizer, without=("share",) if way == "alone" else ())

    if name == IN_BACKWARD:
        torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
        step = in_backward(parameters(TRANSFORMER), compiled)
    else:
        step = compiled(OPTIMIZERS[name](parameters([MIXED[i % len(MIXED)] for i in range(count)])))
    before, start = peak(), time.perf_counter()
    step()
    first = time.perf_counter()
    step()
    second = time.perf_counter()
    found = {"first": first - start, "second": second - first, "own": sum(own)}
    found |= {"dynamo": dynamo(), "passes": sum(passes), "memory": peak() - before}
    return {k: round(v, 2) for k, v in found.items()}


def in_backward(params: Any, compiled: Callable[[Any], Any]) -> Callable[[], None]:
    """Return a backward pass in which each parameter is updated by an optimizer of its own."""
    from steps import OPTIMIZERS

    def hook(p: Any) -> None:
        steps[p]()
        p.grad = None

    steps = {p: compiled(OPTIMIZERS["AdamW"]([p])) for p in params}
    for p in params:
        p.grad = None
        p.register_post_accumulate_grad_hook(hook)

    def step() -> None:
        loss: Any = sum(p.float().square().sum() for p in params)
        loss.backward()

    return step


def dynamo() -> float:
    """Return the seconds that Dynamo has spent in tracing and in building guards."""
    from torch._dynamo.utils import compilation_time_metrics as spent

    return sum(sum(spent.get(name, ())) for name in ("bytecode_tracing", "build_guards"))


def timed(function: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    """Return function with its time noted."""

    def run(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            seconds.append(time.perf_counter() - start)

    return run


def peak() -> float:
    """Return the most memory that this process has had so far, MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
