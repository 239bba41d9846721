"""Study of the warning about lost updates: the parameters it names in small runs, and their losses.

A small byte-level transformer (examples/byte_model.py, width 64) is trained on the standard
library's source, or trained so in fp32 first and then fine-tuned on the prose of `pydoc`'s topics,
by several optimizers, rates and storages. Of each run:

    lost      share of the gain in held-out loss that the same run in `remainder16`, whose weights
              are exactly fp32, has, and this one has not
    seen      parameter -> share of its way over the last hundred steps that were judged
    measured  parameter -> the same by a copy of the optimizer in float64 that takes those steps on
              the same gradients: 1 - <x - x0, x64 - x0> / |x64 - x0|^2

Written to benchmarks/results/small_updates.json, a run at a time; with --only the runs whose name
contains that take the place of those that are there.
"""

import argparse
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from pydoc_data import topics
from typing import Any

import torch
from steps import conditions
from torch import Tensor, nn
from torch.optim import Optimizer

import collage_fx
from collage_fx.step import small_updates
from collage_fx.step.first_steps import in_float64
from collage_fx.step.optimizer_clone import clone_of

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples"))
import byte_model  # noqa: E402
import train_bytes  # noqa: E402

SIZE = byte_model.Size(width=64)
STEPS, PRETRAINING, HELD_OUT = 600, 1500, 40


class Lion(Optimizer):
    """Chen et al. 2023, arXiv 2302.06675, written out."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Take a step."""
        for group in self.param_groups:
            for p in group["params"]:
                average = self.state[p].setdefault("average", torch.zeros_like(p))
                p.sub_(group["lr"] * torch.sign(0.9 * average + 0.1 * p.grad))
                average.lerp_(p.grad, 0.01)


MAKERS: dict[str, Callable[[list[nn.Parameter], float], Optimizer]] = {
    "AdamW": lambda params, lr: torch.optim.AdamW(params, lr=lr),
    "SGD": lambda params, lr: torch.optim.SGD(params, lr=lr, momentum=0.9),
    # By itself its first eps is that of the dtype, so that a float64 copy would be another one.
    "Adafactor": lambda params, lr: torch.optim.Adafactor(params, lr=lr, eps=(1e-7, 1e-3)),
    "Lion": Lion,
}


@dataclass(frozen=True)
class Run:
    """Task, optimizer, storage and rate of a run."""

    task: str
    """`code`, from random weights, or `prose`, from weights that were trained on code."""
    optimizer: str
    storage: str
    lr: float
    seed: int = 0
    decays: bool = False
    """True if the rate warms up, and falls by a cosine, as in the demo; it is constant else."""

    @property
    def name(self) -> str:
        """All of it in one line."""
        return " ".join(str(value) for value in asdict(self).values())


def runs() -> Iterator[Run]:
    """Yield the runs of the study: fine-tunes, those of other optimizers, and pre-training."""
    for seed in range(2):
        for lr in (1e-6, 3e-6, 1e-5, 3e-5, 1e-4, 3e-4):
            yield Run("prose", "AdamW", "mcf2", lr, seed)
        for lr in (1e-6, 1e-5, 1e-4):
            yield Run("prose", "AdamW", "ulp8", lr, seed)
        for lr in (1e-4, 1e-3):
            yield Run("prose", "AdamW", "mcf2", lr, seed, decays=True)
        for lr, decays in ((1e-3, False), (1e-3, True), (3e-3, True)):
            yield Run("code", "AdamW", "mcf2", lr, seed, decays)
        yield Run("code", "AdamW", "ulp8", 1e-3, seed, decays=True)
    for lr in (1e-6, 1e-5):
        yield Run("prose", "AdamW", "remainder16", lr)
        yield Run("prose", "Lion", "mcf2", lr)
    for task, kind, lr, decays in (
        *(("prose", kind, lr, False) for kind, lr in (("SGD", 1e-3), ("SGD", 1e-2))),
        *(("prose", "Adafactor", lr, False) for lr in (1e-5, 1e-4)),
        *(("code", kind, lr, True) for kind, lr in (("SGD", 0.1), ("Lion", 1e-4))),
        ("code", "Adafactor", 1e-2, True),
    ):
        yield Run(task, kind, "mcf2", lr, decays=decays)


def texts() -> dict[str, tuple[Tensor, Tensor]]:
    """Return task -> bytes to train on, and others to validate on."""
    prose = "".join(text for _, text in sorted(topics.topics.items())).encode()
    cut = len(prose) * 9 // 10
    parts = (torch.frombuffer(bytearray(x), dtype=torch.uint8) for x in (prose[:cut], prose[cut:]))
    return {"code": byte_model.read_text(), "prose": (next(parts), next(parts))}


class Study:
    """The texts, the weights that fine-tunes begin with, and the runs that others are beside."""

    def __init__(self) -> None:
        self.texts = texts()
        self.held_out = {task: self._batches(task, 1, 7, HELD_OUT) for task in self.texts}
        self.finest: dict[Run, float] = {}
        torch.manual_seed(0)
        model = byte_model.ByteModel(SIZE)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for step, batch in enumerate(self._batches("code", 0, 1, PRETRAINING)):
            optimizer.param_groups[0]["lr"] = train_bytes.learning_rate(step, PRETRAINING, 3e-3)
            _backward(model, optimizer, batch)
            optimizer.step()
        self.pretrained = model.state_dict()

    def _batches(self, task: str, part: int, seed: int, count: int) -> list[byte_model.Batch]:
        data = byte_model.batches(self.texts[task][part], seed, "cpu", SIZE)
        return [next(data) for _ in range(count)]

    def row(self, run: Run) -> dict[str, Any]:
        """Return what a run lost, and what was said of it."""
        found = self.train(run, watched=True)
        beside = replace(run, storage="remainder16")
        if beside not in self.finest:
            self.finest[beside] = self.train(beside)["after"]
        gain = found["before"] - self.finest[beside]
        lost = (found["after"] - self.finest[beside]) / gain
        return asdict(run) | found | {"finest": self.finest[beside], "lost": lost}

    def train(self, run: Run, *, watched: bool = False) -> dict[str, Any]:
        """Train a model, and return its losses before and after, and what was said and measured."""
        torch.manual_seed(run.seed)
        model = byte_model.ByteModel(SIZE)
        if run.task == "prose":
            model.load_state_dict(self.pretrained)
        model = model.bfloat16()
        optimizer = MAKERS[run.optimizer](list(model.parameters()), run.lr)
        collage_fx.compile_(optimizer, storage=run.storage)
        before = train_bytes.validate(model, self.held_out[run.task])
        shadows = Shadows(model, optimizer, watched=watched)
        with shadows, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step, batch in enumerate(self._batches(run.task, 0, 100 + run.seed, STEPS)):
                if run.decays:
                    rate = train_bytes.learning_rate(step, STEPS, run.lr)
                    optimizer.param_groups[0]["lr"] = rate
                _backward(model, optimizer, batch)
                shadows.step()
                optimizer.step()
        said = [str(w.message) for w in caught if "of the way of" in str(w.message)]
        after = train_bytes.validate(model, self.held_out[run.task])
        return {"before": before, "after": after, "said": said, **shadows.found()}


class Shadows:
    """A copy of an optimizer in float64 beside the steps that the warning judges."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, *, watched: bool) -> None:
        self.optimizer, self.watched = optimizer, watched
        self.params = {n: p for n, p in model.named_parameters()}
        self.shares: dict[str, float] = {}
        self.measured: dict[str, float] = {}
        self.copy: Optimizer | None = None
        self.first: dict[str, Tensor] = {}

    def __enter__(self) -> None:
        self.judge, self.see = small_updates.SmallUpdates._judge, small_updates.SmallUpdates.step
        shadows = self

        def step(self: Any, *args: Any) -> Any:
            if shadows.watched and self.looks == 0:
                shadows.begin()
            return shadows.see(self, *args)

        def judge(self: Any, optimizer: Optimizer) -> None:
            if shadows.watched:
                shadows.end(self.seen.values())
            shadows.judge(self, optimizer)

        small_updates.SmallUpdates.step = step  # type: ignore[method-assign]
        small_updates.SmallUpdates._judge = judge  # type: ignore[method-assign]

    def __exit__(self, *error: object) -> None:
        small_updates.SmallUpdates.step = self.see  # type: ignore[method-assign]
        small_updates.SmallUpdates._judge = self.judge  # type: ignore[method-assign]

    def begin(self) -> None:
        """Copy the optimizer as it is."""
        self.copy = clone_of(self.optimizer, in_float64, residuals=False)
        self.first = {name: collage_fx.value(p).clone() for name, p in self.params.items()}
        self._take()

    def step(self) -> None:
        """Have the copy take the step that the optimizer is going to take, if there is one."""
        if self.copy is not None:
            self._take()

    def _take(self) -> None:
        assert self.copy is not None
        groups = zip(self.optimizer.param_groups, self.copy.param_groups, strict=True)
        for group, copied in groups:
            copied["lr"] = group["lr"]
            for p, twin in zip(group["params"], copied["params"], strict=True):
                twin.grad = p.grad.double()
        type(self.copy).step(self.copy)

    def end(self, seen: Any) -> None:
        """Compare where the parameters are with where those of the copy are."""
        assert self.copy is not None
        twins = [p for group in self.copy.param_groups for p in group["params"]]
        names = {id(p): name for name, p in self.params.items()}
        shares = [share for _, share in small_updates._judged(seen)]
        tensors = (one.owned.tensor for one in seen)
        self.shares = {names[id(p)]: share for p, share in zip(tensors, shares, strict=True)}
        self.measured = {}
        for (name, p), twin in zip(self.params.items(), twins, strict=True):
            moved, meant = collage_fx.value(p) - self.first[name], twin.detach() - self.first[name]
            self.measured[name] = 1 - float((moved * meant).sum() / (meant * meant).sum())
        self.copy = None

    def found(self) -> dict[str, Any]:
        """Return what was seen in the last steps that were judged."""
        return {"seen": self.shares, "measured": self.measured}


def _backward(model: nn.Module, optimizer: Optimizer, batch: byte_model.Batch) -> None:
    optimizer.zero_grad()
    byte_model.loss_of(model, *batch).backward()


def run_of(row: dict[str, Any]) -> Run:
    """Return what a row is of."""
    return Run(**{key: row[key] for key in asdict(Run("", "", "", 0.0))})


def line(row: dict[str, Any]) -> str:
    """Return a row in words."""
    run = run_of(row)
    worst = max(row["measured"].values(), default=0.0)
    told = "warned" if row["said"] else "-"
    return f"{run.name:45} lost {row['lost']:7.2%}  most of a parameter {worst:7.2%}  {told}"


def main() -> None:
    """Run the study."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="do runs whose name contains this")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/small_updates.json")
    args = parser.parse_args()
    wanted = [run for run in runs() if args.only in run.name]
    others = [run for run in runs() if args.only not in run.name]
    known = json.loads(args.out.read_text())["runs"] if others and args.out.exists() else []
    rows = [row for row in known if run_of(row) in others]
    study, begin = Study(), time.perf_counter()
    for number, run in enumerate(wanted, 1):
        rows.append(study.row(run))
        spent = time.perf_counter() - begin
        left = spent / number * (len(wanted) - number)
        print(f"{number}/{len(wanted)} {line(rows[-1])}  ({left / 60:.0f} min left)", flush=True)
        text = json.dumps(conditions() | {"steps": STEPS, "runs": rows}, indent=1)
        args.out.write_text(text + "\n")
    for said in (True, False):
        lost = [row["lost"] for row in rows if bool(row["said"]) is said]
        if lost:
            spread = f"{min(lost):.2%} to {max(lost):.2%}, median {statistics.median(lost):.2%}"
            print(f"{'warned' if said else 'not warned'}: {len(lost)} runs, lost {spread}")


if __name__ == "__main__":
    main()
