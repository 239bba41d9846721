"""Times of steps that Dynamo does not trace whole, beside the same steps in plain bf16.

For each optimizer and set of parameters: the median and the 95th percentile of a step as a multiple
of plain bf16's median in the same run, steps of all ways taking turns, and the seconds to the end
of the first and of the third step, with what they compile. An optimizer whose package is not
installed is named as absent. With --before DIR another version (other_version.py) takes its turns
in a process of its own. Written to benchmarks/results/recorded_<device>.json.
"""

import argparse
import contextlib
import importlib
import json
import logging
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from other_version import OtherVersion, other_version
from steps import conditions
from torch import Tensor
from torch.optim import Optimizer

import collage_fx

SETS = {"4 of 1024 x 1024": ((1024, 1024), 4), "100 of 64 elements": ((64,), 100)}
WAYS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "wide": {"storage": "mcf2", "arithmetic": "wide"},
    "eft": {"storage": "mcf2"},
    "remainder16": {},
}


class DataAdam(Optimizer):
    """Adam as it was written before torch.no_grad: through p.data, with numbers of Python."""

    def step(self) -> None:  # type: ignore[override]
        """Take one step."""
        for p in self.param_groups[0]["params"]:
            state, grad = self.state[p], p.grad.data
            if not state:
                state.update(k=0, m=torch.zeros_like(p.data), v=torch.zeros_like(p.data))
            state["k"] += 1
            state["m"].mul_(0.9).add_(grad, alpha=0.1)
            state["v"].mul_(0.999).addcmul_(grad, grad, value=0.001)
            denominator = state["v"].sqrt().add_(1e-8)
            rate = 1e-4 * (1 - 0.999 ** state["k"]) ** 0.5 / (1 - 0.9 ** state["k"])
            p.data.addcdiv_(state["m"], denominator, value=-rate)
            if self.defaults["checks"]:
                assert state["m"].isfinite().all()


def of_package(module: str, name: str, **options: Any) -> Callable[[list[Tensor]], Optimizer]:
    """Return what makes an optimizer of a package that may be absent."""

    def make(params: list[Tensor]) -> Optimizer:
        optimizer: Optimizer = getattr(importlib.import_module(module), name)(params, **options)
        if hasattr(optimizer, "train"):
            optimizer.train()
        return optimizer

    return make


OPTIMIZERS: dict[str, Callable[[list[Tensor]], Optimizer]] = {
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=1e-3),
    "Adam through .data": lambda params: DataAdam(params, {"checks": True}),
    "Prodigy": of_package("prodigyopt", "Prodigy", lr=1.0),
    "ScheduleFree AdamW": of_package("schedulefree", "AdamWScheduleFree", lr=1e-3),
    "LBFGS": lambda params: torch.optim.LBFGS(params, lr=0.1, max_iter=2, history_size=4),
}


class Run:
    """One optimizer in one way."""

    def __init__(self, name: str, kind: str, way: str, device: str) -> None:
        shape, count = SETS[kind]
        torch.manual_seed(0)
        made = [torch.randn(shape, device=device) for _ in range(count)]
        self.params = [p.bfloat16().requires_grad_() for p in made]
        self.grads = [torch.randn(shape, device=device).bfloat16() * 0.01 for _ in made]
        optimizer = OPTIMIZERS[name](self.params)
        options = WAYS[way]
        self.run = optimizer.step if options is None else collage_fx.compile(optimizer, **options)
        self.needs_closure = name == "LBFGS"
        self.times: list[float] = []

    def _closure(self) -> Tensor:
        for p, g in zip(self.params, self.grads, strict=True):
            p.grad = g + 0.001 * p.detach()
        return torch.zeros(())

    def step(self) -> None:
        """Take one step, and note how long it took."""
        self._closure()
        start = time.perf_counter()
        if self.needs_closure:
            self.run(self._closure)
        else:
            self.run()
        if self.params[0].is_cuda:
            torch.cuda.synchronize()
        self.times.append(time.perf_counter() - start)


RUNS: dict[str, Run] = {}  # in the process of the other version


def begin(name: str, kind: str, way: str, device: str) -> None:
    """Make a run here, for the process that has started this one."""
    RUNS[way] = Run(name, kind, way, device)


def step(way: str) -> float:
    """Take a step of it, and return the seconds that it took."""
    RUNS[way].step()
    return RUNS[way].times[-1]


class RunBefore:
    """One optimizer in one way of the other version."""

    def __init__(self, other: OtherVersion, name: str, kind: str, way: str, device: str) -> None:
        self.other, self.way = other, way
        self.other.call("recorded", "begin", name=name, kind=kind, way=way, device=device)
        self.times: list[float] = []

    def step(self) -> None:
        """Take one step there, and note how long it took."""
        self.times.append(self.other.call("recorded", "step", way=self.way))


def measured(name: str, kind: str, device: str, steps: int, before: Path | None) -> dict[str, Any]:
    """Return the figures of all ways for one optimizer and set of parameters."""
    torch.compiler.reset()
    runs: dict[str, Run | RunBefore] = {way: Run(name, kind, way, device) for way in WAYS}
    with contextlib.ExitStack() as stack:
        if before is not None:
            other = stack.enter_context(other_version(before, torch.get_num_threads()))
            for way, options in WAYS.items():
                if options is not None:
                    runs[f"before, {way}"] = RunBefore(other, name, kind, way, device)
        for _ in range(4 + steps):
            for run in runs.values():
                run.step()
    plain = statistics.median(runs["plain"].times[4:])
    found: dict[str, Any] = {"plain, ms": round(1e3 * plain, 2)}
    for way, run in runs.items():
        if way != "plain":
            found[way] = figures(run.times, plain)
    return found


def figures(times: list[float], plain: float) -> dict[str, float]:
    """Return what the results say of one way, plain's median being given."""
    late = sorted(times[4:])
    return {
        "median": round(statistics.median(late) / plain, 2),
        "95th": round(late[int(0.95 * (len(late) - 1))] / plain, 2),
        "first, s": round(times[0], 2),
        "first three, s": round(sum(times[:3]), 2),
    }


def main() -> None:
    """Measure all, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--only", nargs="+", choices=list(OPTIMIZERS), default=list(OPTIMIZERS))
    parser.add_argument("--before", type=Path, help="folder with another version's package")
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    out = Path(__file__).parent / f"results/recorded_{given.device}.json"
    rows: dict[str, Any] = {}
    for name in given.only:
        for kind in SETS:
            row = f"{name}, {kind}"
            try:
                rows[row] = measured(name, kind, given.device, given.steps, given.before)
            except ImportError as error:
                rows[row] = {"absent": str(error)}
            print(f"{row}: {rows[row]}", flush=True)
    results = {"conditions": conditions(given.device), "rows": rows}
    out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
