"""Muon over DTensors of two processes: its iterations take whole matrices, gathered in the step.

For runtime.residuals.dtensor.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from interpreter import without_compiler
from sharded_runs import join_group
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.multiprocessing.spawn import start_processes

import collage_fx

WAYS: list[dict[str, Any]] = [
    {},
    {"record": True},
    {"storage": "remainder16", "arithmetic": "wide"},
]
SHAPES = [(8, 6), (4, 10), (6, 6)]
STEPS = 12


def _whole(x: Tensor) -> Tensor:
    whole = collage_fx.value(x) if x.dtype is torch.bfloat16 else x.detach()
    assert isinstance(whole, DTensor)
    return whole.full_tensor().double().flatten()


def _trained(dtype: torch.dtype, dim: int, options: dict[str, Any] | None = None) -> Tensor:
    """Return the parameters after steps; plain PyTorch's without options."""
    mesh = init_device_mesh("cpu", (2,))
    generator = torch.Generator().manual_seed(0)

    def laid_out(x: Tensor) -> Tensor:
        placed: Tensor = distribute_tensor(
            x.bfloat16().to(dtype), mesh, [Shard(dim)], src_data_rank=None
        )
        return placed

    begin = [laid_out(1 + 0.1 * torch.randn(s, generator=generator)) for s in SHAPES]
    params: list[Tensor] = [nn.Parameter(t) for t in begin]
    optimizer = torch.optim.Muon(params, lr=1e-3, weight_decay=0.0)
    step: Any = optimizer.step
    if options is not None:
        torch.compiler.reset()
        step = collage_fx.compile(optimizer, **options)
    for _ in range(STEPS):
        for p in params:
            p.grad = laid_out(torch.randn(p.shape, generator=generator))
        step()
    return torch.cat([_whole(p) for p in params])


def _be_one(rank: int, store: str, out: str) -> None:
    """Train as one process of two; save how far each way is from plain fp32, plain bf16 last."""
    join_group(rank, 2, store)
    found = {}
    for dim in (0, 1):
        exact = _trained(torch.float32, dim)
        with without_compiler():
            ours = [_trained(torch.bfloat16, dim, way) for way in WAYS]
        all_ways = [*ours, _trained(torch.bfloat16, dim)]
        found[dim] = [(x - exact).abs().max().item() for x in all_ways]
    if rank == 0:
        torch.save(found, out)


@pytest.mark.slow
def test_rows_and_columns_are_trained_as_in_fp32(tmp_path: Path) -> None:
    out = str(tmp_path / "found.pt")
    start_processes(_be_one, (str(tmp_path / "store"), out), 2, start_method="forkserver")
    for *ours, plain in torch.load(out).values():
        assert plain > 5e-3  # of about 1e-2 that each moves
        assert max(ours) < plain / 30
