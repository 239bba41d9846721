"""Tasks of the studies: texts, models of several seeds in one, and the batches that each sees.

The seeds of a cell are trained together. Every parameter has a leading dimension of seeds, the
loss of each seed is that of its own weights on its own batches, and the gradient of their sum is
for each seed its own. An optimizer that treats each element by itself takes for each seed the step
that it would take alone; others get a tensor for each seed (`apart`).
"""

import itertools
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.func import functional_call, vmap

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "examples")]
import byte_model  # noqa: E402
import loss_curves  # noqa: E402
import train_bytes  # noqa: E402

Named = dict[str, Tensor]
"""Name of a parameter of the model -> its values of all seeds, (seeds, ...)."""
SMALL = byte_model.Size(width=64, context=32, batch=8)
MIDDLE = replace(SMALL, width=128)
HELD_OUT, HELD_OUT_ROWS = 4, 64
"""Batches that are held out, and windows in each; the same for all seeds and cells."""
PRETRAINED = ROOT / "build/studies"


@dataclass(frozen=True)
class Task:
    """Text, model and number of steps."""

    text: str
    """`code`, the standard library's source, or `prose`, the topics of Python's `help()`."""
    size: byte_model.Size
    steps: int
    seeds: int
    first_seed: int = 0
    pretraining: int = 0
    """Steps on code, in fp32, before a fine-tune; 0 begins with random weights."""
    decays: bool = True
    """True if the rate warms up and falls by a cosine to a tenth; it is constant else."""

    def rate(self, step: int, peak: float) -> float:
        """Return the learning rate of a step, counted from 0."""
        return train_bytes.learning_rate(step, self.steps, peak) if self.decays else peak


TASKS = {
    "train": Task("code", SMALL, 600, 8),
    "train 468k": Task("code", MIDDLE, 600, 5),
    "tune": Task("prose", SMALL, 300, 8, pretraining=1500, decays=False),
    "long": Task("code", SMALL, 5000, 2),
    "try": Task("code", SMALL, 600, 4, first_seed=90),
}
"""`try` has seeds of its own, by which sizes and rates were chosen before the protocol."""


def quick(task: Task) -> Task:
    """Return a task with a third of the steps and half of the seeds: directions, no intervals."""
    return replace(
        task,
        steps=task.steps // 3,
        seeds=max(2, task.seeds // 2),
        pretraining=task.pretraining // 3,
    )


@cache
def texts(name: str) -> tuple[Tensor, Tensor]:
    """Return the bytes of a text to train on, and others to validate on (uint8, 1-d)."""
    return byte_model.read_text() if name == "code" else loss_curves.prose()


def batches(task: Task, device: str = "cpu") -> Iterator[byte_model.Batch]:
    """Yield inputs and targets (seeds, batch, context), of each seed in an order of its own."""
    seeds = range(task.first_seed, task.first_seed + task.seeds)
    each = [byte_model.batches(texts(task.text)[0], 100 + s, "cpu", task.size) for s in seeds]
    for rows in itertools.islice(zip(*each, strict=True), task.steps):
        inputs, targets = zip(*rows, strict=True)
        yield torch.stack(inputs).to(device), torch.stack(targets).to(device)


def held_out(task: Task, device: str = "cpu") -> list[byte_model.Batch]:
    """Return the batches for validation (windows, context), which all seeds share."""
    size = replace(task.size, batch=HELD_OUT_ROWS)
    return list(
        itertools.islice(byte_model.batches(texts(task.text)[1], 7, device, size), HELD_OUT)
    )


def random_weights(task: Task) -> Named:
    """Return the weights that PyTorch draws for each seed, in fp32."""
    models = []
    for seed in range(task.first_seed, task.first_seed + task.seeds):
        torch.manual_seed(seed)
        models.append(dict(byte_model.ByteModel(task.size).named_parameters()))
    return {name: torch.stack([m[name].detach() for m in models]) for name in models[0]}


class Model:
    """A model of several seeds: the loss of each, as a function of the weights of all."""

    def __init__(self, size: byte_model.Size, *, compiled: bool = False) -> None:
        model = byte_model.ByteModel(size)

        def loss(weights: Named, inputs: Tensor, targets: Tensor) -> Tensor:
            def forward(tokens: Tensor) -> Tensor:
                logits: Tensor = functional_call(model, weights, (tokens,))
                return logits

            return byte_model.loss_of(forward, inputs, targets)  # type: ignore[arg-type]

        each: Callable[..., Tensor] = vmap(loss)
        shared: Callable[..., Tensor] = vmap(loss, in_dims=(0, None, None))
        self.losses = torch.compile(each) if compiled else each
        """Function of weights, inputs and targets (seeds, batch, context); returns (seeds,)."""
        self._shared = torch.compile(shared) if compiled else shared

    @torch.no_grad()
    def validate(self, weights: Named, batches: list[byte_model.Batch]) -> Tensor:
        """Return the mean loss of each seed (nats a byte) on batches (windows, context)."""
        values = {name: w.detach().float() for name, w in weights.items()}
        return torch.stack([self._shared(values, x, y) for x, y in batches]).double().mean(0)


def start(task: Task, model: Model) -> Named:
    """Return the weights in fp32 that a task begins with; of a fine-tune kept on disk."""
    if not task.pretraining:
        return random_weights(task)
    size = task.size
    numbers = (size.width, size.context, size.batch, task.pretraining, task.first_seed, task.seeds)
    path = PRETRAINED / f"pretrained_{'_'.join(map(str, numbers))}.pt"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            torch.save(_pretrain(task, model), file)
        os.replace(file.name, path)
    found: Named = torch.load(path)
    return found


def _pretrain(task: Task, model: Model) -> Named:
    before = replace(task, text="code", steps=task.pretraining, pretraining=0, decays=True)
    weights = {name: w.requires_grad_() for name, w in random_weights(before).items()}
    optimizer = torch.optim.AdamW(list(weights.values()), lr=3e-3)
    for step, batch in enumerate(batches(before)):
        optimizer.param_groups[0]["lr"] = before.rate(step, 3e-3)
        optimizer.zero_grad()
        model.losses(weights, *batch).sum().backward()
        optimizer.step()
    return {name: w.detach() for name, w in weights.items()}
