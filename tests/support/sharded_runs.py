"""A model that is laid out over processes, its optimizer, and their checkpoints."""

import datetime
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.optim import Optimizer

import collage_fx

TENSOR_PARALLEL = {"0": ColwiseParallel(), "1": RowwiseParallel()}
KINDS: dict[str, Any] = {
    "AdamW": (torch.optim.AdamW, {"lr": 1e-3}, {"level": "plus"}),
    "SGD": (torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9}, {"storage": "remainder16"}),
    "by chance": (torch.optim.AdamW, {"lr": 1e-3}, {"storage": "sr", "level": "all"}),
    "four bits": (torch.optim.AdamW, {"lr": 1e-3}, {"storage": "ulp4", "level": "all"}),
    "plain SGD": (torch.optim.SGD, {"lr": 1e-3}, {"storage": "ulp8"}),
}


PARTS = ("model", "optimizer")
"""Parts of a checkpoint, as get_state_dict returns them."""


def save(
    model: nn.Module, optimizer: Optimizer, path: Path, group: Any, options: StateDictOptions
) -> None:
    """Write a checkpoint by torch.distributed.checkpoint, all processes of a group together."""
    parts = dict(zip(PARTS, get_state_dict(model, optimizer, options=options), strict=True))
    dcp.save(parts, checkpoint_id=path, process_group=group)


def load(
    model: nn.Module, optimizer: Optimizer, path: Path, group: Any, options: StateDictOptions
) -> None:
    """Load one, into a state dict of what is there."""
    parts = dict(zip(PARTS, get_state_dict(model, optimizer, options=options), strict=True))
    dcp.load(parts, checkpoint_id=path, process_group=group)
    weights, states = (parts[name] for name in PARTS)
    set_state_dict(
        model, optimizer, model_state_dict=weights, optim_state_dict=states, options=options
    )


def join_group(rank: int, ranks: int, store: str) -> None:
    """Be one of some processes, of one thread, that meet by a file."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(seconds=100),
    )


class Run:
    """A model, laid out over processes, and its optimizer."""

    def __init__(self, kind: str, seed: int, layout: str = "one", mesh: Any = None) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 2)).bfloat16()
        if layout in ("tp", "fsdp of tp"):
            parallelize_module(self.model, mesh["t"], TENSOR_PARALLEL)
        if layout.startswith(("fsdp", "hsdp")):
            for layer in (*self.model, self.model):
                fully_shard(layer, mesh=mesh["d"] if layout == "fsdp of tp" else mesh)
        make, rates, options = KINDS[kind]
        self.optimizer = make(self.model.parameters(), **rates)
        self.optimizer.step = collage_fx.compile(self.optimizer, **options)
        # Its rate is an input from the first step on, so that one graph is made and not two.
        torch.optim.lr_scheduler.ConstantLR(self.optimizer, factor=1.0)

    def steps(self, first: int, last: int) -> None:
        for k in range(first, last):
            generator = torch.Generator().manual_seed(k)
            for p in self.model.parameters():
                g: Tensor = torch.randn(p.shape, generator=generator).bfloat16()
                if isinstance(p, DTensor):
                    g = distribute_tensor(g, p.device_mesh, p.placements, src_data_rank=None)
                p.grad = g
            self.optimizer.step()

    def save(self, path: Path, group: Any, **options: Any) -> None:
        save(self.model, self.optimizer, path, group, StateDictOptions(**options))

    def load(self, path: Path, group: Any, **options: Any) -> None:
        load(self.model, self.optimizer, path, group, StateDictOptions(**options))

    def values(self) -> list[Tensor]:
        """The whole values of parameters and states."""
        return list(self._values())

    def _values(self) -> Iterator[Tensor]:
        for p in self.model.parameters():
            states = self.optimizer.state[p].values()
            for t in (p, *(s for s in states if isinstance(s, Tensor))):
                value = collage_fx.value(t).detach()
                yield value.full_tensor() if isinstance(value, DTensor) else value
