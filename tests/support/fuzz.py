"""Runs random optimizer programs: `make fuzz SECONDS=600`, `make fuzz PROGRAMS=2000 SEED=7`.

A program that fails is shrunk, and printed as a script of its own. Memory that recorded operations
hand out before it has data is NaN.
"""

import argparse
import contextlib
import gc
import logging
import time
from collections import Counter
from collections.abc import Iterator
from pickle import UnpicklingError

import hypothesis
import torch
from as_traced import differing, recorded_and_traced
from generated import programs
from hypothesis import HealthCheck, Phase
from interpreter import untimed_guards
from known import known, of_stock
from oracle import judge
from poison import poisoned
from programs import Program
from runs import eager

WAYS = ("compile", "string", "function", "engine")
RECORDED = ("record", "at once")
SURROUNDINGS = (
    "draws",
    "events",
    "methods",
    "joins",
    "dtypes",
    "layout",
    "gradients",
    "infinite",
    "cut",
    "wrapped",
    "frozen",
)


@contextlib.contextmanager
def few_objects() -> Iterator[None]:
    """Let what `check` keeps from the collector go in the end.

    Otherwise what looks for optimizers among all objects takes as long as a compilation.
    """
    with untimed_guards():
        try:
            yield
        finally:
            gc.unfreeze()


def check(program: Program, counts: Counter[str]) -> None:
    """Count what becomes of a program; raise AssertionError with its script if it fails."""
    try:
        eager(program, getattr(torch, program.dtype))
        eager(program, torch.float64)
    except (RuntimeError, ValueError, UnpicklingError) as error:
        counts[f"not run, since eager PyTorch does not: {str(error)[:50]}"] += 1
        return
    gc.collect()
    gc.freeze()
    try:
        verdict = judge(program)
    except Exception as error:
        if defect := of_stock(program, error):
            counts[f"raises as stock torch.compile does: {defect}"] += 1
            return
        raise AssertionError("\n".join(["", program.script(), repr(error)])) from error
    if verdict.failures:
        if defect := known(program, verdict.run):
            counts[f"fails for a known defect: {defect}"] += 1
            return
        raise AssertionError("\n".join(["", program.script(), *verdict.failures]))
    counts["programs"] += 1
    counts[f"way: {program.way}"] += 1
    for name in ("clip_grad_norm", "zero_grads", "changed"):
        counts[f"with {name}"] += name in dict(program.options)
    for name in SURROUNDINGS:
        counts[f"with {name}"] += bool(getattr(program, name))
    if verdict.excuse:
        counts[f"said so: {verdict.excuse}"] += 1
    elif verdict.lost > 1:
        counts["plain 16-bit training would fail"] += 1
    if program.way == "record":
        check_beside_traced(program, counts)


def check_beside_traced(program: Program, counts: Counter[str]) -> None:
    """Count whether a recorded program has the bits of Dynamo's graphs; raise if it has others."""
    if (both := recorded_and_traced(program)) is None:
        counts["recorded: not by the passes alone"] += 1
    elif names := differing(*both):
        others = f"{', '.join(names)}: other bits than by the graphs that Dynamo traces"
        raise AssertionError("\n".join(["", program.script(), others]))
    else:
        counts["recorded: the bits of Dynamo's graphs"] += 1


def run(seed: int, count: int, ways: tuple[str, ...] = WAYS) -> Counter[str]:
    """Check some random programs.

    Args:
        seed: which programs.
        count: how many.
        ways: of which kinds.

    Raises:
        AssertionError: one fails; its message is the script of the smallest that fails likewise.
    """
    counts: Counter[str] = Counter()

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
        print_blob=False,
        report_multiple_bugs=False,
    )
    @hypothesis.given(programs(ways))
    def all_hold(program: Program) -> None:
        check(program, counts)

    with few_objects(), poisoned():
        all_hold()
    return counts


def main() -> None:
    """Run programs until the time is over, or as many as were asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=0)
    parser.add_argument("--programs", type=int, default=0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--ways", default=",".join((*WAYS, *RECORDED)))
    parser.add_argument("--chunk", type=int, default=50)
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    start, seed, total, failed = time.monotonic(), given.seed, Counter[str](), 0
    while True:
        try:
            total += run(seed, given.chunk, tuple(given.ways.split(",")))
        except AssertionError as error:
            failed += 1
            print(f"# seed {seed} fails:{error}", flush=True)
        seed += 1
        passed = time.monotonic() - start
        done = total["programs"]
        print(
            f"seeds {given.seed} to {seed - 1}, {passed:.0f} s: {done} programs hold, "
            f"{failed} seeds fail",
            flush=True,
        )
        if passed > given.seconds if given.seconds else done >= (given.programs or 200):
            break
    for name, n in sorted(total.items()):
        print(f"{n:6} {name}")
    raise SystemExit(failed > 0)


if __name__ == "__main__":
    main()
