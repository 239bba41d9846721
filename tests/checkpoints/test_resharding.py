"""Checkpoints of torch.distributed.checkpoint that another number of processes goes on from.

Two or four processes with gloo. In each stage some of them lay a model out anew, load what the
stage before has saved, take steps and save. Whole values are those of one process that never stops.

For hooks.distributed_state_dicts and runtime.residuals.dtensor.
"""

import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from interpreter import without_compiler
from sharded_runs import Run, join_group
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.multiprocessing.spawn import start_processes

from collage_fx.errors import CollageWarning

STEPS = 2
"""Number of steps of a stage."""
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
    "two": ["fsdp 2", "one"],
    "quick": ["fsdp 4", "one"],
    "in order": ["one", "fsdp 2", "fsdp 4", "one"],
    "all": ["fsdp 2", "one", "fsdp 2", "fsdp 4", "hsdp", "fsdp of tp", "tp", "fsdp 4", "one"],
}
CASES = [("two", "AdamW"), ("two", "by chance"), ("two", "four bits")]
SLOW = [
    ("quick", "AdamW"),
    ("in order", "AdamW"),
    ("all", "AdamW"),
    ("all", "SGD"),
    ("in order", "by chance"),
    ("all", "by chance"),
    ("in order", "four bits"),
    ("all", "four bits"),
    ("quick", "plain SGD"),
]


def ranks_of(path: str) -> int:
    """Return the number of processes."""
    return 2 if path == "two" else 4


def mesh_of(layout: str) -> DeviceMesh:
    """All processes take part in making it."""
    ranks = torch.tensor(STAGES[layout])
    names = {"fsdp of tp": ("d", "t"), "hsdp": ("r", "s"), "tp": ("t",)}.get(layout)
    return DeviceMesh("cpu", ranks, mesh_dim_names=names)


def work(rank: int, folder: str, kind: str, path: str) -> None:
    join_group(rank, ranks_of(path), f"{folder}/store")
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
    start_processes(
        work, args=(str(tmp_path), kind, path), nprocs=ranks_of(path), start_method="fork"
    )
    found = torch.load(tmp_path / "found")
    with without_compiler():
        alone = Run(kind, 0)
        for n, values in enumerate(found):
            alone.steps(STEPS * n, STEPS * (n + 1))
            pairs = list(zip(alone.values(), values, strict=True))
            assert all(torch.equal(a, b) for a, b in pairs), PATHS[path][n]
        # The control: high words alone are other values, or those by other draws.
        other = [b.bfloat16().double() for _, b in pairs]
        if kind == "by chance":
            again = Run(kind, 0)
            again.steps(1, 1 + STEPS * len(found))
            other = again.values()
        assert not all(torch.equal(a, b) for (a, _), b in zip(pairs, other, strict=True))
