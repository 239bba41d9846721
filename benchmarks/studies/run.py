"""Run the cells of the studies that docs/evidence.md reports, and write a JSON file for each.

    python benchmarks/studies/run.py                      all, or what is left of them
    python benchmarks/studies/run.py --only parity        a study; or cells whose name contains it
    python benchmarks/studies/run.py --quick              shorter, of fewer seeds, to another folder
    python benchmarks/studies/run.py --device cuda        `gpu`, of a larger model, or the study of
                                                          --only, to another folder

A file is written whole or not at all, and a cell whose file is there and whole is not run again:
an interrupted run goes on where it stopped. Each cell runs in a process of its own, with the model
that was compiled once. A file has what a cell is, the settings as they were resolved, the commit,
and of each seed: held-out losses before, on the way and after (`whole`: of all that is stored, in
an fp32 model; `high`: of the bf16 weights that the model computes with; `cast`: of the whole
values, rounded to bf16 by chance), and the distances of shadow.py.
"""

import argparse
import json
import logging
import multiprocessing
import multiprocessing.connection
import os
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._dynamo import config as dynamo_config
from torch._inductor import config as inductor_config

sys.path.insert(0, str(Path(__file__).parent))
import tasks
from cells import BY_NAME, CORE, QUICK, STUDIES, Cell
from data import missing
from models import Model, Named
from shadow import Shadow, rows
from strategies import APART, absent, begin, maker
from tasks import ROOT, Task

import collage_fx

sys.path.insert(0, str(ROOT / "benchmarks"))
from steps import conditions

RESULTS = ROOT / "benchmarks/results/studies"
LIMIT = 3600
"""Seconds after which a cell is ended; it counts as failed, and the next run tries it again."""
MARKS = 3
"""Times on the way at which losses are measured, the last step among them."""


class Stack:
    """The weights of all seeds as an optimizer sees them, and as the model does."""

    def __init__(self, start: Named, task: Task, *, apart: bool) -> None:
        self.names, self.seeds, self.apart = list(start), task.seeds, apart
        self.each = [n for n in start for _ in range(task.seeds if apart else 1)]
        split = (w.unbind() if apart else (w,) for w in start.values())
        self.start = [w.clone() for ws in split for w in ws]

    def named(self, tensors: list[Tensor]) -> Named:
        """Return the tensors, one for each weight (and seed), as the model takes them."""
        if self.apart:
            each = [tensors[i : i + self.seeds] for i in range(0, len(tensors), self.seeds)]
            tensors = [torch.stack(ws) for ws in each]
        return dict(zip(self.names, tensors, strict=True))

    def rows(self, tensors: list[Tensor]) -> Tensor:
        """Return the values of each seed as a row, float64."""
        return rows([t.detach() for t in tensors], self.seeds, apart=self.apart)


def train(cell: Cell, task: Task, model: Model, start: Named, device: str) -> dict[str, Any]:
    """Train all seeds of a cell; return its losses and distances."""
    stack = Stack(start, task, apart=cell.optimizer in APART)
    training = begin(cell.strategy, cell.optimizer, cell.beta2, stack.start, stack.each)
    make = maker(cell.optimizer.partition(",")[0], cell.beta2, stack.each)
    shadow = Shadow([v.detach() for v in training.values()], make, task.seeds, apart=stack.apart)
    held_out, marks = tasks.held_out(task, device), []
    at = {round((i + 1) * task.steps / MARKS) for i in range(MARKS)}
    before = model.validate(stack.named(training.values()), held_out)
    for step, batch in enumerate(tasks.batches(task, device), 1):
        rate = task.rate(step - 1, cell.lr)
        model.losses(stack.named(training.weights), *batch).sum().backward()
        gradients = [w.grad for w in training.weights if w.grad is not None]
        measured = shadow.measures
        old = stack.rows(training.values()) if measured else None
        shadow.step(gradients, rate)
        training.step(rate)
        if old is not None:
            shadow.compare(stack.rows(training.values()) - old)
        for w in training.weights:
            w.grad = None
        if step in at:
            loss = model.validate(stack.named(training.values()), held_out)
            apart = shadow.found(stack.rows(training.values()))["error"]
            marks.append({"step": step, "whole": loss.tolist(), "error": apart})
    found = {"before": before.tolist(), "marks": marks, "whole": marks[-1]["whole"]}
    return found | {
        "high": model.validate(stack.named(training.weights), held_out).tolist(),
        "cast": model.validate(stack.named(cast(training.values())), held_out).tolist(),
        "shadow": shadow.found(stack.rows(training.values())),
        "settings": training.settings(),
    }


def cast(values: list[Tensor]) -> list[Tensor]:
    """Return values rounded to bf16 by chance: up or down, right on average."""
    generator, found = torch.Generator().manual_seed(1), []
    for value in values:
        bits = value.detach().float().contiguous().view(torch.int32)
        noise = torch.randint(1 << 16, bits.shape, generator=generator, dtype=torch.int32)
        found.append(((bits + noise.to(bits.device)) & -(1 << 16)).view(torch.float32))
    return found


def commit() -> str:
    """Return the commit of the sources, with `-dirty` if files differ from it."""
    command = ["git", "describe", "--always", "--abbrev=12", "--dirty", "--exclude=*"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def whole(path: Path) -> dict[str, Any] | None:
    """Return the results in a file; None if it is not there, or not whole."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and "seconds" in found else None


def write(path: Path, found: dict[str, Any]) -> None:
    """Write a file whole or not at all, whatever ends the process."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".part", delete=False) as file:
        file.write(json.dumps(_rounded(found), indent=1) + "\n")
    os.replace(file.name, path)


def _rounded(value: Any) -> Any:
    """Return numbers with seven digits: a float of JSON has ten that say nothing."""
    if isinstance(value, float):
        return float(f"{value:.7g}")
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    return [_rounded(one) for one in value] if isinstance(value, list) else value


def run_cell(cell: Cell, task: Task, model: Model, start: Named, path: Path, device: str) -> None:
    """Train a cell and write its file."""
    begun = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", collage_fx.CollageWarning)
        found = train(cell, task, model, start, device)
    said = [w for w in caught if issubclass(w.category, collage_fx.CollageWarning)]
    head = {"cell": asdict(cell), "task": asdict(task), "commit": commit()}
    about = {"warnings": [" ".join(str(w.message).split()) for w in said]}
    spent = {"seconds": round(time.perf_counter() - begun, 1)}
    write(path, head | {"conditions": conditions(device)} | found | about | spent)


class Runner:
    """Models, compiled once, and first weights, which cells share."""

    def __init__(self, out: Path, *, quick: bool, device: str, jobs: int = 1) -> None:
        self.out, self.quick, self.device, self.jobs = out, quick, device, jobs
        self._models: dict[Any, Model] = {}
        self._starts: dict[Task, Named] = {}

    def task(self, cell: Cell) -> Task:
        """Return the task of a cell, at its size."""
        task = tasks.TASKS[cell.task]
        return tasks.quick(task) if self.quick else task

    def prepare(self, task: Task) -> tuple[Model, Named]:
        """Return the model of a task, compiled, and its first weights."""
        key = tasks.shared(task)
        if key not in self._models:
            self._models[key] = tasks.model(task, self.device, compiled=True)
        model = self._models[key]
        if task not in self._starts:
            start = {n: w.to(self.device) for n, w in tasks.start(task, model).items()}
            self._starts[task] = start
            # Compiled here, once, for the processes of all cells.
            for dtype in (torch.bfloat16, torch.float32):
                weights = {n: w.to(dtype, copy=True).requires_grad_() for n, w in start.items()}
                batch = next(tasks.batches(task, self.device))
                model.losses(weights, *batch).sum().backward()
                model.validate(weights, tasks.held_out(task, self.device)[:1])
        return model, self._starts[task]

    def run(self, cells: Iterable[Cell]) -> Iterator[tuple[Cell, bool]]:
        """Run cells, `jobs` at a time, each in a process of its own; on a GPU in this one.

        Yields each as it ends, and True if it is done.
        """
        running: Running = {}
        try:
            for cell in cells:
                task = self.task(cell)
                model, start = self.prepare(task)
                work = (cell, task, model, start, self.out / cell.file, self.device)
                if self.device != "cpu":
                    yield cell, _done(work)
                    continue
                process = multiprocessing.get_context("fork").Process(target=run_cell, args=work)
                process.start()
                running[process.sentinel] = (cell, process, time.monotonic() + LIMIT)
                while len(running) == self.jobs:
                    yield from _ended(running)
            while running:
                yield from _ended(running)
        finally:
            for _, process, _ in running.values():
                process.kill()


Running = dict[int, tuple[Cell, Any, float]]
"""Sentinel of a process -> its cell, the process, and the time at which it is given up."""


def _ended(running: Running) -> Iterator[tuple[Cell, bool]]:
    """Wait until a process ends or has had its time; yield and take out the cells of all such."""
    first = min(limit for _, _, limit in running.values())
    ready = multiprocessing.connection.wait([*running], max(0.0, first - time.monotonic()))
    for sentinel, (cell, process, limit) in list(running.items()):
        if sentinel in ready or limit <= time.monotonic():
            process.kill()
            process.join()
            del running[sentinel]
            yield cell, process.exitcode == 0


def _done(work: tuple[Any, ...]) -> bool:
    """Run a cell in this process; return False, as of a process that ends, if it raises."""
    try:
        run_cell(*work)
    except Exception:
        traceback.print_exc()
        return False
    return True


def chosen(only: str, *, quick: bool) -> list[Cell]:
    """Return the cells of a study, or those whose names contain a text; of all studies without."""
    if only in STUDIES:
        return list(dict.fromkeys(STUDIES[only].cells))
    names = [n for n in STUDIES if n not in BY_NAME and (n in QUICK or not quick)]
    every = dict.fromkeys(cell for name in names for cell in STUDIES[name].cells)
    return [c for c in every if only in c.name and (c.strategy in CORE or not quick)]


def there(cells: list[Cell]) -> list[Cell]:
    """Return the cells whose strategy and text are installed; say what is skipped."""
    skipped = {name: why for name in {c.strategy for c in cells} if (why := absent(name))}
    lacking = {t: why for t in {c.task for c in cells} if (why := missing(tasks.TASKS[t].text))}
    for name, why in sorted({**skipped, **lacking}.items()):
        print(f"skipped: {name}, {why}")
    return [c for c in cells if c.strategy not in skipped and c.task not in lacking]


def main() -> None:
    """Run what is not there yet."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="a study, or a part of the names of cells")
    parser.add_argument("--quick", action="store_true", help="a third of the steps, half the seeds")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=1, help="cells at a time, each on a core")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--list", action="store_true", help="say what is left, and end")
    args = parser.parse_args()
    on_gpu = args.device != "cpu"
    usual = ROOT / "build/studies/quick" if args.quick else RESULTS
    # Losses of a GPU and of a CPU are no pairs.
    out = args.out or (usual / "gpu" if on_gpu else usual)
    logging.disable(logging.WARNING)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    dynamo_config.recompile_limit = 64
    # Cells are forks of this process: a lock that another thread holds would never be free there.
    inductor_config.compile_threads = 1
    cells = there(chosen(args.only or ("gpu" if on_gpu else ""), quick=args.quick))
    left = [c for c in cells if whole(out / c.file) is None]
    print(
        f"{len(cells) - len(left)} of {len(cells)} cells are there, {len(left)} to run", flush=True
    )
    if args.list:
        print("\n".join(c.name for c in left))
        return
    runner = Runner(out, quick=args.quick, device=args.device, jobs=args.jobs)
    begun, failed = time.time(), []
    for number, (cell, done) in enumerate(runner.run(left), 1):
        if not done:
            failed.append(cell.name)
        spent = time.time() - begun
        rest = spent / number * (len(left) - number) / 60
        found = whole(out / cell.file) or {}
        loss = sum(found.get("whole", [float("nan")])) / len(found.get("whole", [0]))
        print(
            f"{number}/{len(left)} {cell.name}: {loss:.5f} in {found.get('seconds', 0):.0f} s, "
            f"{rest:.0f} min left",
            flush=True,
        )
    if failed:
        sys.exit("failed: " + "; ".join(failed))


if __name__ == "__main__":
    main()
