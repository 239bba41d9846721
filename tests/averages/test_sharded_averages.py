"""Averages of sharded weights are those of one process: FSDP2, swapped, saved and resumed.

For averages.averaged and averages.exchange.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from interpreter import without_compiler
from sharded_runs import join_group
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import start_processes
from torch.optim import SGD

import collage_fx
from collage_fx.errors import SubjectError

X = torch.linspace(-1, 1, 32).reshape(4, 8).bfloat16()


def made() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 5), nn.GELU(), nn.Linear(5, 8, bias=False)).bfloat16()


def run(model: nn.Module, average: Any, steps: int = 6) -> list[Tensor]:
    """Train with gradients of our own, evaluate averages; return the evaluations."""
    optimizer = SGD(model.parameters(), lr=1e-3)
    collage_fx.compile_(optimizer)
    found = []
    for k in range(steps):
        model(X).square().mean().backward()
        with torch.no_grad():
            for i, p in enumerate(model.parameters()):
                p.grad.fill_(0.5 ** (k + i))  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
        with torch.no_grad(), average.swap(model):
            found.append(model(X))
        with torch.no_grad():
            found.append(model(X))  # of the weights again, which are gathered anew
    return found


def whole(module: nn.Module) -> list[Tensor]:
    values = (collage_fx.value(p) for p in module.parameters())
    return [v.full_tensor() if isinstance(v, DTensor) else v for v in values]


def work(rank: int, folder: str) -> None:
    join_group(rank, 2, f"{folder}/store")
    mesh = init_device_mesh("cpu", (2,))
    with without_compiler():
        model = made()
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh)
        average = collage_fx.EMA(model, 0.9)
        found = run(model, average)
        with pytest.raises(SubjectError, match="FSDP2 has sharded"):
            average(X)
        dcp.save({"average": average}, checkpoint_id=f"{folder}/saved")
        again = collage_fx.EMA(model, 0.5)
        dcp.load({"average": again}, checkpoint_id=f"{folder}/saved")
        kept = whole(again.module)
        keys = list(average.state_dict(residuals=False))
        torch.save((found, whole(model), whole(average.module), kept, keys), f"{folder}/{rank}")
    dist.destroy_process_group()


def test_two_processes_average_as_one(tmp_path: Path) -> None:
    with without_compiler():
        model = made()
        average = collage_fx.EMA(model, 0.9)
        evaluations = run(model, average)
        weights, averages = whole(model), whole(average.module)
    assert not torch.equal(averages[0], weights[0]), "control"
    start_processes(work, args=(str(tmp_path),), nprocs=2, start_method="forkserver")
    for rank in range(2):
        found, ours, theirs, kept, keys = torch.load(tmp_path / str(rank))
        for a, b in zip([*found, *ours, *theirs], [*evaluations, *weights, *averages], strict=True):
            assert torch.equal(a, b)
        assert all(torch.equal(a, b) for a, b in zip(kept, averages, strict=True))
        assert keys == list(average.state_dict(residuals=False))
