"""Plans of two processes with shards of the same parameters are one.

For budget.agreement.
"""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from interpreter import without_compiler
from sharded_runs import join_group
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import start_processes

import collage_fx
from collage_fx.budget import step as budgeted
from collage_fx.budget.agreement import together


def work(rank: int, folder: str) -> None:
    join_group(rank, 2, f"{folder}/store")
    budgeted.PLANNED, budgeted.EVERY = 10, 2
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 9), torch.nn.Linear(9, 7)).bfloat16()
    with torch.no_grad():  # the halves of a parameter have other units, so that plans would differ
        model[0].weight[5:] *= 2.0**-6
        model[1].weight[4:] *= 2.0**-9
    fully_shard(model)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    collage_fx.compile_(optimizer, budget=7.0)
    with without_compiler():
        for k in range(12):
            generator = torch.Generator().manual_seed(2 * k + rank)
            for p in model.parameters():
                p.grad = torch.zeros_like(p)
                local = p.grad.to_local()
                local.copy_(torch.randn(local.shape, generator=generator))
            optimizer.step()
    tensors = [t for p in model.parameters() for t in (p, *optimizer.state[p].values()) if t.dim()]
    residuals = [collage_fx.residuals(t) for t in tensors]
    dtypes = [[str(r.dtype) for r in found] for found in residuals]
    size = sum(t.to_local().nbytes for t in tensors) + sum(r.nbytes for f in residuals for r in f)
    whole, own = {"w": tensors[0]}, {"w": tensors[0].to_local()}
    found = [
        together(own, {"w": [rank]}),
        together(whole, {"w": [rank]}),
        together(whole, {"w": [rank]}, largest=True),
        # One process has another tensor besides.
        together(whole | {"x": tensors[1]}, {"w": [rank]} | {"x": [3.0]} if rank else {"w": [0.0]}),
    ]
    numel = sum(p.to_local().numel() for p in model.parameters())
    torch.save((dtypes, size, numel, found), f"{folder}/{rank}")
    dist.destroy_process_group()


def test_processes_with_shards_choose_alike(tmp_path: Path) -> None:
    start_processes(work, args=(str(tmp_path),), nprocs=2, start_method="fork")
    (one, *first), (other, *second) = (torch.load(tmp_path / str(rank)) for rank in (0, 1))
    assert one == other
    assert len({str(dtypes) for dtypes in one}) > 1
    sizes, numels = zip(first[:2], second[:2], strict=True)
    assert sum(sizes) <= 7 * sum(numels) + len(one)  # each half byte at the end of a shard
    own, mean, largest, united = zip(first[2], second[2], strict=True)
    assert mean == ({"w": [0.5]}, {"w": [0.5]})
    assert largest == ({"w": [1]}, {"w": [1]})
    assert united == ({"w": [0.5], "x": [3]}, {"w": [0.5], "x": [3]})
    assert own == ({"w": [0]}, {"w": [1]}), "the control: each by itself has other numbers"
