"""A run that is killed again and again goes on from its last whole checkpoint.

For optimizer.checkpoints.state_dicts.
"""

import random
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from interpreter import without_compiler
from sharded_runs import Run, join_group
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.spawn import start_processes

from collage_fx.errors import CollageWarning

STEPS = 50
KILLED = 10
"""Number of kills, each some steps after it has begun, in whatever it does then."""


def whole(folder: Path) -> list[int]:
    """The steps of which there is a checkpoint. DCP writes its metadata last."""
    return sorted(int(path.parent.name) for path in folder.glob("*/.metadata"))


def work(rank: int, folder: str, ranks: int, store: str) -> None:
    join_group(rank, ranks, store)
    mesh, path = init_device_mesh("cpu", (ranks,)), Path(folder)
    with without_compiler(), warnings.catch_warnings():
        warnings.simplefilter("error", CollageWarning)
        run = Run("AdamW", rank, f"fsdp {ranks}" if ranks > 1 else "one", mesh)
        done: list[Any] = [(whole(path) or [0])[-1]]
        dist.broadcast_object_list(done, src=0)
        if done[0]:
            run.load(path / str(done[0]), None)
        elif ranks > 1:
            raise AssertionError("the first to begin is one process: all begin with its weights")
        for k in range(done[0], STEPS):
            run.steps(k, k + 1)
            run.save(path / str(k + 1), None)
        values = run.values()
    if rank == 0:
        torch.save(values, path / "end")
    dist.destroy_process_group()


@pytest.mark.slow
def test_it_ends_as_one_that_never_stopped(tmp_path: Path) -> None:
    chance = random.Random(0)
    seen = []
    for attempt in range(KILLED + 1):
        ranks = chance.choice([1, 2, 4]) if whole(tmp_path) else 1
        store = tmp_path / f"store{attempt}"
        arguments = (str(tmp_path), ranks, str(store))
        last = attempt == KILLED
        context = start_processes(
            work, args=arguments, nprocs=ranks, start_method="fork", join=last
        )
        if context is not None:
            goal = (whole(tmp_path) or [0])[-1] + chance.randint(1, 6)
            while (whole(tmp_path) or [0])[-1] < min(goal, STEPS - 2):
                assert all(process.is_alive() for process in context.processes)
                time.sleep(0.01)
            time.sleep(chance.uniform(0, 0.2))
            for process in context.processes:
                process.kill()
            for process in context.processes:
                process.join()
        seen.append((ranks, (whole(tmp_path) or [0])[-1]))
    print(seen)
    assert len({step for _, step in seen}) > 3  # it was killed at several steps
    found = torch.load(tmp_path / "end")
    with without_compiler():
        alone = Run("AdamW", 0)
        alone.steps(0, STEPS)
    assert all(map(torch.equal, found, alone.values()))
