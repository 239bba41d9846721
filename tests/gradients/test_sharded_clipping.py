"""Clipping by the norm over all shards: two processes do what one does.

For gradients.norm.
"""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from clipped_runs import LR, NORM, SHAPES, Descent, error, exactly, gradients, norm_of, params
from interpreter import without_compiler
from sharded_runs import join_group
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.multiprocessing.spawn import start_processes
from torch.optim import SGD, Optimizer

import collage_fx

PLACEMENTS = (Shard(0), Replicate(), Shard(0), Replicate(), Shard(0))


def trained(optimizer: Any, mesh: DeviceMesh | None) -> tuple[float, float]:
    """Return the error after eight steps, and the largest error of their norms."""
    off = 0.0
    given = optimizer.param_groups[0]["params"]
    for k in range(8):
        for p, g, place in zip(given, gradients(k), PLACEMENTS, strict=True):
            p.grad = distribute_tensor(g, mesh, [place]) if mesh else g
        optimizer.step()
        found = float(optimizer.step.grad_norm)
        off = max(off, abs(found / float(norm_of(gradients(k))) - 1))
    if mesh is None:
        return error(optimizer, exactly(lr=LR)), off
    whole = Optimizer([collage_fx.value(p).full_tensor() for p in given], {})
    return error(whole, exactly(lr=LR)), off


def work(rank: int, folder: str) -> None:
    join_group(rank, 2, f"{folder}/store")
    mesh = init_device_mesh("cpu", (2,))
    found = []
    with without_compiler():
        for kind, options in ((SGD, {}), (SGD, {"record": True}), (Descent, {})):
            pairs = zip(params(), PLACEMENTS, strict=True)
            sharded = [distribute_tensor(p, mesh, [place]).detach() for p, place in pairs]
            optimizer = kind([p.requires_grad_() for p in sharded], lr=LR)
            collage_fx.compile_(optimizer, clip_grad_norm=NORM, **options)
            found.append(trained(optimizer, mesh))
        divided: Any = ZeroRedundancyOptimizer(params(), optimizer_class=SGD, lr=LR)
        divided.step = collage_fx.compile(divided, clip_grad_norm=NORM)
        found.append(trained(divided, None))
        held = len(divided.optim.param_groups[0]["params"])
    torch.save((found, held), f"{folder}/{rank}")
    dist.destroy_process_group()


def test_two_processes_clip_by_one_norm(tmp_path: Path) -> None:
    start_processes(work, args=(str(tmp_path),), nprocs=2, start_method="fork")
    held = 0
    for rank in (0, 1):
        found, count = torch.load(tmp_path / str(rank))
        held += count
        assert all(wrong < 1e-6 for _, wrong in found)
        *sharded, divided = [lost for lost, _ in found]
        assert all(lost < 2.0**-19 for lost in sharded)
        assert divided < 0.1, "its parameters are handed over without residuals"
    assert held == len(SHAPES), "each holds a part of the parameters"
