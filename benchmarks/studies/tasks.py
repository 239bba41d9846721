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
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "examples"), str(Path(__file__).parent)]
import byte_model  # noqa: E402
import data  # noqa: E402
import digits  # noqa: E402
import loss_curves  # noqa: E402
import train_bytes  # noqa: E402
import words  # noqa: E402
from models import Batch, Model, Named, adapted, adapters, loss_of_bytes  # noqa: E402

OTHERS: dict[str, Any] = {"digits": digits, "words": words}
"""Data of a task, where they are no text -> module with its model, weights and batches."""
SMALL = byte_model.Size(width=64, context=32, batch=8)
MIDDLE = replace(SMALL, width=128)
LARGE = replace(SMALL, width=352)
FOR_GPU = byte_model.Size(layers=8, width=512, heads=8, context=64, batch=32)
HELD_OUT, HELD_OUT_ROWS = 4, 64
"""Batches that are held out, and windows in each; the same for all seeds and cells."""
PRETRAINED = ROOT / "build/studies"


@dataclass(frozen=True)
class Task:
    """Text, model and number of steps."""

    text: str
    """`code`, the standard library's source; `prose`, the topics of Python's `help()`; `jargon`,
    the Jargon File; or a name in OTHERS."""
    size: byte_model.Size
    steps: int
    seeds: int
    first_seed: int = 0
    pretraining: int = 0
    """Steps on code, in fp32, before a fine-tune; 0 begins with random weights."""
    decays: bool = True
    """True if the rate warms up and falls by a cosine to a tenth; it is constant else."""
    rank: int = 0
    """Rank of the adapters that alone are trained; 0 trains all weights."""

    def rate(self, step: int, peak: float) -> float:
        """Return the learning rate of a step, counted from 0."""
        return train_bytes.learning_rate(step, self.steps, peak) if self.decays else peak


TASKS = {
    "train": Task("code", SMALL, 600, 8),
    "train 468k": Task("code", MIDDLE, 600, 5),
    "train 3M": Task("code", LARGE, 600, 3),
    "tune": Task("prose", SMALL, 300, 8, pretraining=1500, decays=False),
    "tune 468k": Task("prose", MIDDLE, 300, 5, pretraining=1500, decays=False),
    "gpu": Task("code", FOR_GPU, 600, 5),
    "long": Task("code", SMALL, 5000, 2),
    "muon": Task("code", SMALL, 600, 5),
    "lora": Task("prose", SMALL, 300, 5, pretraining=1500, decays=False, rank=8),
    "digits": Task("digits", SMALL, 600, 5),
    "words": Task("words", SMALL, 200, 5, decays=False),
    "jargon": Task("jargon", SMALL, 300, 5, pretraining=1500, decays=False),
    "try": Task("code", SMALL, 600, 4, first_seed=90),
}
"""Tasks whose name begins with `try` have seeds of their own, by which sizes and rates were chosen
before the protocol. Those of OTHERS have no use for a size."""
TASKS |= {
    f"try {name}": replace(TASKS[name], seeds=2, first_seed=90)
    for name in ("muon", "lora", "digits", "words", "jargon", "tune", "tune 468k", "train 468k")
}


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
    if name != "jargon":
        return byte_model.read_text() if name == "code" else loss_curves.prose()
    whole = torch.frombuffer(bytearray(data.unpacked(name)), dtype=torch.uint8)
    cut = len(whole) * 9 // 10
    return whole[:cut], whole[cut:]


def batches(task: Task, device: str = "cpu") -> Iterator[Batch]:
    """Yield the tensors of batches (seeds, ...), of each seed in an order of its own."""
    each = [_of_seed(task, 100 + task.first_seed + s) for s in range(task.seeds)]
    for rows in itertools.islice(zip(*each, strict=True), task.steps):
        yield tuple(torch.stack(ts).to(device) for ts in zip(*rows, strict=True))


def _of_seed(task: Task, seed: int) -> Iterator[Batch]:
    if task.text in OTHERS:
        found: Iterator[Batch] = OTHERS[task.text].batches(seed)
        return found
    return byte_model.batches(texts(task.text)[0], seed, "cpu", task.size)


def held_out(task: Task, device: str = "cpu") -> list[Batch]:
    """Return the batches for validation, which all seeds share."""
    if task.text in OTHERS:
        return [tuple(t.to(device) for t in batch) for batch in OTHERS[task.text].held_out()]
    size = replace(task.size, batch=HELD_OUT_ROWS)
    return list(
        itertools.islice(byte_model.batches(texts(task.text)[1], 7, device, size), HELD_OUT)
    )


def random_weights(task: Task) -> Named:
    """Return the weights that PyTorch draws for each seed, in fp32; the same if pretrained."""
    models = []
    for seed in range(task.first_seed, task.first_seed + task.seeds):
        torch.manual_seed(seed)
        if task.text in OTHERS:
            models.append(OTHERS[task.text].weights())
        elif task.rank:
            models.append(adapters(adapted(task.size, task.rank)))
        else:
            models.append(dict(byte_model.ByteModel(task.size).named_parameters()))
    return {name: torch.stack([m[name].detach() for m in models]) for name in models[0]}


def model(task: Task, device: str = "cpu", *, compiled: bool = False) -> Model:
    """Return the model of a task."""
    if task.text in OTHERS:
        return Model(OTHERS[task.text].loss, compiled=compiled)
    if not task.rank:
        return Model(loss_of_bytes(byte_model.ByteModel(task.size)), compiled=compiled)
    full = replace(task, rank=0)
    # What is frozen is in bf16, as the adapters are; `validate` takes it as it is.
    frozen = {name: w.bfloat16().to(device) for name, w in start(full, model(full)).items()}
    net = adapted(task.size, task.rank)
    return Model(loss_of_bytes(net), frozen=frozen, compiled=compiled)


def shared(task: Task) -> Hashable:
    """Return what is the same of tasks that have one model."""
    return task if task.rank else OTHERS.get(task.text, task.size)


def start(task: Task, model: Model) -> Named:
    """Return the weights in fp32 that a task begins with; of a fine-tune kept on disk."""
    if not task.pretraining or task.rank:
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
