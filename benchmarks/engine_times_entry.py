"""The times of one class of the coverage table, for engine_times.py: plain bf16 and compiled.

Both take steps in turns in this process; torch.compile does nothing in the plain ones.
"""

import gc
import math
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from coverage_classes import Model, Recipe, load, recipes
from recorded import SETS
from torch import Tensor, nn

import collage_fx
from collage_fx.step.compiled_step import session_of

WARM = 4
"""The steps before those that are timed: in the first three at most, most is compiled."""
SOME, FEW = 8, 3
"""Numbers of timed steps that do after a minute of the CPU, and where the time is over."""
STREAMS = 3
"""Number of sets of gradients, which come in turns."""

Row = dict[str, Any]


class Many(Model):
    """Parameters that are all of one shape."""

    def __init__(self, kind: str) -> None:
        nn.Module.__init__(self)
        shape, count = SETS[kind]
        generator = torch.Generator().manual_seed(1)
        for i in range(count):
            start = 1 + 0.25 * torch.randn(shape, generator=generator)
            self.register_parameter(f"p{i}", nn.Parameter(start.bfloat16()))

    def gradients(self) -> list[dict[str, Tensor]]:
        """Return sets of gradients, each a drift of its own plus noise."""
        generator = torch.Generator().manual_seed(2)

        def like(p: Tensor) -> Tensor:
            return torch.randn(p.shape, generator=generator)

        drift = {name: like(p) for name, p in self.named_parameters()}
        return [
            {
                name: (0.05 * (drift[name] + like(p))).bfloat16()
                for name, p in self.named_parameters()
            }
            for _ in range(STREAMS)
        ]


class Run:
    """One optimizer in one way."""

    def __init__(self, recipe: Recipe, kind: str, *, plain: bool) -> None:
        torch.manual_seed(0)
        self.recipe, self.model, self.plain = recipe, Many(kind), plain
        self.optimizer = recipe.make(self.model)
        self.compiled: Callable[..., Any] = (
            self.optimizer.step
            if plain
            else collage_fx.compile(self.optimizer, storage="mcf2", arithmetic="wide")
        )
        self.times: list[float] = []
        self.cpu: list[float] = []

    def step(self, gradients: dict[str, Tensor]) -> None:
        """Take one step, and note how long it took."""
        with torch.compiler.set_stance("force_eager" if self.plain else "default"):
            self.recipe.step(self._timed, self.model, gradients)

    def _timed(self, *args: Any) -> None:
        start, cpu = time.perf_counter(), cpu_time()
        self.compiled(*args)
        self.times.append(time.perf_counter() - start)
        self.cpu.append(cpu_time() - cpu)


def cpu_time() -> float:
    """Return the seconds of the CPU that this process has taken, and compilers that it called."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


class Served:
    """Counts what serves the steps of a run."""

    def __init__(self, run: Run) -> None:
        session = session_of(run.compiled)
        assert session is not None
        self.session, self.run, self.begin = session, run, len(run.times)
        self.before = self._counts()

    def _counts(self) -> dict[str, int]:
        steps: Any = self.session.steps()
        runs = steps.executors.runs
        return {
            "graphs": self.session.calls - runs["rewritten"],
            **{way: runs[way] for way in ("rewritten", "joined", "interpreted")},
            "compiled": steps.executors.count,
        }

    def each_step(self) -> dict[str, float]:
        """Return how often each way served a step since, and segments compiled in all."""
        steps: Any = self.session.steps()
        count, after = len(self.run.times) - self.begin, self._counts()
        found = {k: round((n - self.before[k]) / count, 1) for k, n in after.items()}
        found["repeated"] = round(min(steps.service.repeats, count) / count, 1)
        return {k: n for k, n in found.items() if n} | {"compiled in all": after["compiled"]}


def chosen(module: str, name: str, kind: str, drive: str) -> tuple[Recipe | None, str]:
    """Return the first recipe of this drive that takes a plain step, or why none does."""
    problem = "no recipe"
    for recipe in recipes(getattr(load(module), name)):
        if recipe.drive == drive and len(recipe.names) == 1:  # of which it uses no shape here
            try:
                run = Run(recipe, kind, plain=True)
                run.step(run.model.gradients()[0])
            except Exception as error:
                problem = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            else:
                return recipe, ""
    return None, problem


def measure(module: str, name: str, kind: str, drive: str, steps: int, seconds: float) -> Row:
    """Return the figures of a class over a set of parameters, after so many seconds of fewer steps.

    Args:
        module: where the class is.
        name: its name.
        kind: one of SETS.
        drive: how its step is driven.
        steps: how many are timed.
        seconds: after which no more are begun, if a `FEW` were timed.
    """
    until = time.perf_counter() + seconds
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(dir=os.environ["ENGINE_TIMES_CACHES"])
    torch.set_num_threads(1)
    recipe, problem = chosen(module, name, kind, drive)
    if recipe is None:
        return {"problem": f"plain: {problem}"}
    runs = [Run(recipe, kind, plain=plain) for plain in (True, False)]
    stream = runs[0].model.gradients()
    served, since = None, 0.0
    for i in range(WARM + steps):
        if i == WARM:
            gc.collect()  # what compiling has left
            served, since = Served(runs[1]), cpu_time()
        if is_enough(i - WARM, since, until):
            break
        for run in runs:
            try:
                run.step(stream[i % STREAMS])
            except Exception as error:
                return {"problem": f"step {i + 1}: {type(error).__name__}: {str(error)[-300:]}"}
    assert served is not None
    return {**figures(*runs), "served": served.each_step()}


def is_enough(timed: int, since: float, until: float) -> bool:
    """Return True if so many steps will do, timed since then, with all to be over by then."""
    some = timed >= SOME and cpu_time() > since + 60
    return some or (timed >= FEW and time.perf_counter() > until)


def figures(plain: Run, collage: Run) -> Row:
    """Return what the times of two runs say."""
    base, late = statistics.median(plain.cpu[WARM:]), collage.cpu[WARM:]
    waited = [statistics.median(run.times[WARM:]) for run in (plain, collage)]
    return {
        "plain, ms": round(1e3 * base, 2),
        "collage, ms": round(1e3 * statistics.median(late), 2),
        "median": round(statistics.median(late) / base, 2),
        "95th": round(percentile(late, 0.95) / base, 2),
        "median of elapsed": round(waited[1] / waited[0], 2),
        "first, s": round(collage.times[0], 2),
        "first three, s": round(sum(collage.times[:3]), 2),
        "first, CPU s": round(collage.cpu[0], 2),
        "first three, CPU s": round(sum(collage.cpu[:3]), 2),
        "timed steps": len(late),
    }


def percentile(values: list[float], share: float) -> float:
    """Return the least value that this share of the values does not exceed."""
    return sorted(values)[math.ceil(share * len(values)) - 1]
