"""Checkpoints of torch.distributed.checkpoint that another number of processes goes on from.

Four processes with gloo. In each stage some of them lay a model out anew, load what the stage
before has saved, take steps and save. Whole values are those of one process that never stops.
"""

import datetime
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from interpreter import without_compiler
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.multiprocessing.spawn import start_processes

import collage_fx
from collage_fx.errors import CollageWarning

RANKS = 4
STEPS = 2
"""How many a stage takes."""
TENSOR_PARALLEL = {"0": ColwiseParallel(), "1": RowwiseParallel()}
STAGES = {
    "one": [0],
    "fsdp 2": [0, 1],
    "fsdp 4": [0, 1, 2, 3],
    "hsdp": [[0, 1], [2, 3]],
    "tp": [0, 1],
    "fsdp of tp": [[0, 1], [2, 3]],
}
"""Layout -> the mesh of processes. Of seven and of two rows four processes have uneven and empty
shards."""
PATHS = {
    "quick": ["one", "fsdp 4", "tp", "one"],
    "all": ["fsdp 2", "one", "fsdp 2", "fsdp 4", "hsdp", "fsdp of tp", "tp", "fsdp 4", "one"],
}
KINDS: dict[str, Any] = {
    "AdamW": (torch.optim.AdamW, {"lr": 1e-3}, {"level": "plus"}),
    "SGD": (torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9}, {"storage": "remainder16"}),
    "plain SGD": (torch.optim.SGD, {"lr": 1e-3}, {"storage": "ulp8"}),
}
CASES = [("quick", "AdamW")]
SLOW = [("all", "AdamW"), ("all", "SGD"), ("quick", "plain SGD")]


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
        model, states = get_state_dict(
            self.model, self.optimizer, options=StateDictOptions(**options)
        )
        dcp.save({"model": model, "optimizer": states}, checkpoint_id=path, process_group=group)

    def load(self, path: Path, group: Any, **options: Any) -> None:
        wanted = StateDictOptions(**options)
        model, states = get_state_dict(self.model, self.optimizer, options=wanted)
        into = {"model": model, "optimizer": states}
        dcp.load(into, checkpoint_id=path, process_group=group)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=model,
            optim_state_dict=states,
            options=wanted,
        )

    def values(self) -> list[Tensor]:
        """The whole values of parameters and states."""
        return list(self._values())

    def _values(self) -> Iterator[Tensor]:
        for p in self.model.parameters():
            states = self.optimizer.state[p].values()
            for t in (p, *(s for s in states if isinstance(s, Tensor))):
                value = collage_fx.value(t).detach()
                yield value.full_tensor() if isinstance(value, DTensor) else value


def mesh_of(layout: str) -> DeviceMesh:
    """All processes take part in making it."""
    ranks = torch.tensor(STAGES[layout])
    names = {"fsdp of tp": ("d", "t"), "hsdp": ("r", "s"), "tp": ("t",)}.get(layout)
    return DeviceMesh("cpu", ranks, mesh_dim_names=names)


def work(rank: int, folder: str, kind: str, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=RANKS,
        timeout=datetime.timedelta(seconds=100),
    )
    found: list[list[Tensor]] = []
    with without_compiler(), warnings.catch_warnings():
        warnings.simplefilter("error", CollageWarning)
        for n, layout in enumerate(PATHS[path]):
            mesh, ranks = mesh_of(layout), torch.tensor(STAGES[layout]).flatten().tolist()
            group = dist.new_group(ranks)
            if rank in ranks:
                run = Run(kind, n, layout, mesh)
                # Between two stages the state dicts are flattened, and not between the next.
                if n:
                    flat = bool((n - 1) % 2)
                    run.load(Path(folder, str(n - 1)), group, flatten_optimizer_state_dict=flat)
                run.steps(STEPS * n, STEPS * (n + 1))
                run.save(Path(folder, str(n)), group, flatten_optimizer_state_dict=bool(n % 2))
                found.append(run.values())
            dist.barrier()
    if rank == 0:
        torch.save(found, f"{folder}/found")
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("path", "kind"), [*CASES, *(pytest.param(*c, marks=pytest.mark.slow) for c in SLOW)]
)
def test_each_number_of_processes_goes_on_from_the_last(
    path: str, kind: str, tmp_path: Path
) -> None:
    start_processes(work, args=(str(tmp_path), kind, path), nprocs=RANKS, start_method="fork")
    found = torch.load(tmp_path / "found")
    with without_compiler():
        alone = Run(kind, 0)
        for n, values in enumerate(found):
            alone.steps(STEPS * n, STEPS * (n + 1))
            pairs = list(zip(alone.values(), values, strict=True))
            assert all(torch.equal(a, b) for a, b in pairs), PATHS[path][n]
        # The control: high words alone are other values.
        assert not all(torch.equal(a, b.bfloat16().double()) for a, b in pairs)
