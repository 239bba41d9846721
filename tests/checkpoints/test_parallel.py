"""Checkpoints that go on over replicas of DDP and over stages of a pipeline, an optimizer each.

Four processes with gloo train by real backward passes, of two microbatches a step: replicas have
equal batches, so that the mean of their gradients is each of them, and PyTorch's own schedule moves
activations between stages. Whole values are those of one process that never stops.

For optimizer.checkpoints.state_dicts and hooks.distributed_state_dicts.
"""

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from interpreter import without_compiler
from sharded_runs import join_group, load, save
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.multiprocessing.spawn import start_processes
from torch.nn.parallel import DistributedDataParallel

import collage_fx
from collage_fx.errors import CollageWarning

RANKS = 4
STEPS = 2
"""Number of steps that are taken in a layout."""
MICRO = 2
LAYERS = 4
PATHS = {
    "replicas": ["one", "ddp 2", "ddp 4", "one"],
    "stages": ["one", "stages 2", "stages 4", "one"],
    "all": ["stages 4", "ddp 2", "stages 2", "ddp 4", "stages 4"],
}
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
"""Options without which the groups of all stages are one entry, and DCP saves that of one."""


class Layers(nn.Module):
    """Some layers of a model that is made whole, so that its weights are those of the seed."""

    def __init__(self, seed: int, first: int = 0, last: int = LAYERS) -> None:
        super().__init__()
        torch.manual_seed(seed)
        layers = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(LAYERS)]
        self.layers = nn.ModuleDict({str(k): layers[k] for k in range(first, last)})
        self.bfloat16()

    def forward(self, data: Tensor) -> Tensor:
        for layer in self.layers.values():
            data = layer(data)
        return data


def loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


class Run:
    """The part of a model that a process has, and its optimizer."""

    def __init__(self, seed: int, layout: str = "one", rank: int = 0, group: Any = None) -> None:
        kind, _, count = layout.partition(" ")
        each = LAYERS // int(count) if kind == "stages" else LAYERS
        first = rank * each if kind == "stages" else 0
        self.module: nn.Module = Layers(seed, first, first + each)
        self.backward: Callable[[Tensor, Tensor], None] = self.alone
        if kind == "ddp":
            self.module = DistributedDataParallel(self.module, process_group=group)
        if kind == "stages":
            stage = PipelineStage(self.module, rank, int(count), torch.device("cpu"), group=group)
            self.schedule = ScheduleGPipe(stage, MICRO, loss_fn=loss, scale_grads=False)
            self.ends = rank == 0, rank == int(count) - 1
            self.backward = self.staged
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-3)
        collage_fx.compile_(self.optimizer, level="plus")
        torch.optim.lr_scheduler.ConstantLR(self.optimizer, factor=1.0)  # one graph

    def alone(self, data: Tensor, target: Tensor) -> None:
        for some, aim in zip(data.chunk(MICRO), target.chunk(MICRO), strict=True):
            loss(self.module(some), aim).backward()

    def staged(self, data: Tensor, target: Tensor) -> None:
        begins, ends = self.ends
        self.schedule.step(*([data] if begins else []), **({"target": target} if ends else {}))

    def steps(self, first: int, last: int) -> None:
        for k in range(first, last):
            generator = torch.Generator().manual_seed(k)
            data, target = torch.randn(2, 4, 6, generator=generator).bfloat16()
            self.optimizer.zero_grad()
            self.backward(data, target)
            self.optimizer.step()

    def save(self, path: Path, group: Any) -> None:
        save(self.module, self.optimizer, path, group, FLAT)

    def load(self, path: Path, group: Any) -> None:
        load(self.module, self.optimizer, path, group, FLAT)

    def values(self) -> dict[str, list[Tensor]]:
        """The whole values of parameters and states, by the parameter's name in the model."""
        return {name.removeprefix("module."): list(self._values(p)) for name, p in self._params()}

    def _params(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self.module.named_parameters()

    def _values(self, p: nn.Parameter) -> Iterator[Tensor]:
        for t in (p, *self.optimizer.state[p].values()):
            yield collage_fx.value(t).detach().clone()


def work(rank: int, folder: str, path: str) -> None:
    join_group(rank, RANKS, f"{folder}/store")
    with without_compiler(), warnings.catch_warnings():
        warnings.simplefilter("error", CollageWarning)
        for n, layout in enumerate(PATHS[path]):
            ranks = range(int(layout.partition(" ")[2] or 1))
            group = dist.new_group(list(ranks))
            if rank in ranks:
                run = Run(n, layout, rank, group)
                if n:
                    run.load(Path(folder, str(n - 1)), group)
                run.steps(STEPS * n, STEPS * (n + 1))
                run.save(Path(folder, str(n)), group)
                torch.save(run.values(), f"{folder}/{n}.{rank}")
            dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
def test_replicas_and_stages_go_on_from_each_other(path: str, tmp_path: Path) -> None:
    start_processes(work, args=(str(tmp_path), path), nprocs=RANKS, start_method="fork")
    with without_compiler():
        alone = Run(0)
        for n, layout in enumerate(PATHS[path]):
            alone.steps(STEPS * n, STEPS * (n + 1))
            files = list(tmp_path.glob(f"{n}.*"))
            assert len(files) == int(layout.partition(" ")[2] or 1)
            expected, names = alone.values(), set()
            for values in map(torch.load, files):
                names |= values.keys()
                for name, found in values.items():
                    assert all(map(torch.equal, expected[name], found)), (layout, name)
            assert names == expected.keys()
    # The control: high words alone are other values.
    assert not all(torch.equal(a, a.bfloat16().double()) for a in found)
