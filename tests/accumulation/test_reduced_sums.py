"""DDP reduces sums of gradients with their residuals: all processes have the same words.

For accumulation.reduction.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from interpreter import without_compiler
from sharded_runs import join_group
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import collage_fx
from collage_fx.errors import UnsupportedError

KINDS: dict[str, dict[str, Any]] = {
    "copies": {},
    "views": {"gradient_as_bucket_view": True},
    "small buckets": {"bucket_cap_mb": 1e-4},
}
BATCHES = 12


def made() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(8, 5), nn.GELU(), nn.Linear(5, 8, bias=False)]
    return nn.Sequential(*layers).bfloat16()


def batch(step: int, rank: int, k: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 100 * rank + k)
    return torch.randn(4, 8, generator=generator).bfloat16()


def train(rank: int, kind: str, *, sums: bool) -> list[Tensor]:
    """Train three steps; return gradients as reduced, their exact means, and parameters."""
    inner = made()
    model = DistributedDataParallel(inner, **KINDS[kind])
    optimizer = SGD(inner.parameters(), lr=1e-2)
    collage_fx.compile_(optimizer)
    if sums:
        collage_fx.accumulate(model)
    found = []
    params = list(inner.parameters())
    for step in range(3):
        exact = [torch.zeros_like(p, dtype=torch.float64) for p in params]
        for other in range(2):
            for k in range(BATCHES):
                loss = inner(batch(step, other, k)).square().sum()
                for e, g in zip(exact, torch.autograd.grad(loss, params), strict=True):
                    e += g.double() / 2
        with model.no_sync():
            for k in range(BATCHES - 1):
                model(batch(step, rank, k)).square().sum().backward()
        model(batch(step, rank, BATCHES - 1)).square().sum().backward()
        whole = [collage_fx.value(p.grad) for p in params]  # type: ignore[arg-type]
        found += [(w - e).norm() / e.norm() for w, e in zip(whole, exact, strict=True)]
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *map(collage_fx.value, params)]


class Turns(nn.Module):
    """Two weights, of which a pass may use the first alone."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
        self.v = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))

    def forward(self, x: float, *, both: bool) -> Tensor:
        return (self.w * x + (self.v * x if both else 0)).sum()


def used_by_turns(rank: int) -> Tensor:
    """The gradient of a weight that one process uses, after a window in which both did."""
    inner = Turns()
    model = DistributedDataParallel(inner, find_unused_parameters=True)
    collage_fx.accumulate(model)
    collage_fx.accumulate(model)  # takes the place of the first
    for x in (256.0, 1.0):
        model(x, both=True).backward()
    whole = collage_fx.value(inner.v.grad)  # type: ignore[arg-type]
    model.zero_grad()
    model(8.0, both=rank == 1).backward()
    return torch.cat([whole, collage_fx.value(inner.v.grad)])  # type: ignore[arg-type]


def work(rank: int, folder: str) -> None:
    join_group(rank, 2, f"{folder}/store")
    with without_compiler():
        for kind in KINDS:
            torch.save(train(rank, kind, sums=True), f"{folder}/{kind} {rank}")
        torch.save(train(rank, "copies", sums=False), f"{folder}/plain {rank}")
    torch.save(used_by_turns(rank), f"{folder}/turns {rank}")
    with pytest.raises(UnsupportedError, match="several processes"):
        collage_fx.accumulate(made())
    model = DistributedDataParallel(made())
    model.register_comm_hook(None, lambda state, bucket: None)
    with pytest.raises(UnsupportedError, match="communication hook"):
        collage_fx.accumulate(model)
    sharded = made()
    fully_shard(sharded)
    with pytest.raises(UnsupportedError, match="FSDP2"):
        collage_fx.accumulate(sharded)
    with pytest.raises(UnsupportedError, match="DTensors"):
        collage_fx.accumulate(SGD(sharded.parameters(), lr=1.0))
    dist.destroy_process_group()


def test_two_processes(tmp_path: Path) -> None:
    from torch.multiprocessing.spawn import start_processes

    start_processes(work, (str(tmp_path),), nprocs=2, start_method="fork")
    for rank in range(2):
        assert torch.load(tmp_path / f"turns {rank}").tolist() == [257, 4]
    for kind in (*KINDS, "plain"):
        one, other = (torch.load(tmp_path / f"{kind} {rank}") for rank in range(2))
        assert all(map(torch.equal, one[9:], other[9:])), kind
        off = max(map(float, one[:9]))
        assert off < 2**-14 if kind != "plain" else off > 2**-10, kind
