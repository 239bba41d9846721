"""Changes of shards, and writes to DTensors, which count no version of their shards.

For changes.sharded.
"""

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from interpreter import without_compiler
from replicas import Lion, Replica, model, sizes
from sharded_runs import join_group
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import distribute_tensor
from torch.multiprocessing.spawn import start_processes
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR

import collage_fx
from collage_fx.changes.sharded import ShardedWrites

STEPS = 12


def give(module: nn.Module, k: int) -> None:
    """Give the parameters, sharded or not, gradients of which a part is zero."""
    torch.manual_seed(k)
    for p in module.parameters():
        g = (torch.randn(p.shape) * (torch.rand(p.shape) < 0.3)).bfloat16()
        sharded: Any = p
        p.grad = (
            distribute_tensor(g, sharded.device_mesh, sharded.placements)
            if hasattr(p, "placements")
            else g
        )


def followed(module: nn.Module, optimizer: Any) -> list[bool]:
    """Return for each step whether a replica of the shards had their bits, and no more came."""
    replica, found = Replica(module), []
    scheduler = CosineAnnealingLR(optimizer, STEPS)
    for k in range(STEPS):
        give(module, k)
        optimizer.step()
        scheduler.step()
        changed = replica.changed()
        whole = {}
        if k == 6 and ShardedWrites.of(optimizer):
            module.load_state_dict({n: p * 1.25 for n, p in module.state_dict().items()})
            whole = sizes(module)
        if k != 9:
            sent = replica.sync()
            exact = k == 10 or sent == changed | whole
            found.append(replica.is_equal and exact)
    return found


def work(rank: int, folder: str) -> None:
    join_group(rank, 2, f"{folder}/store")
    found: list[list[bool]] = []
    with without_compiler(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*(was cleared|makes a new graph)")
        for kind in (AdamW, SGD, Lion):
            module = model()
            for layer in module:
                fully_shard(layer)
            optimizer: Any = kind(module.parameters(), lr=1e-3)
            found.append(followed(module, collage_fx.compile_(optimizer, changed=True)))
        divided: Any = ZeroRedundancyOptimizer(
            (module := model()).parameters(), optimizer_class=AdamW, lr=1e-3
        )
        divided.step = collage_fx.compile(divided, changed=True)
        found.append(followed(module, divided))
        both = nn.ModuleList([(plain := model()), (added := model())])
        fully_shard(added)
        optimizer = collage_fx.compile_(SGD(plain.parameters(), lr=1e-3), changed=True)
        optimizer.add_param_group({"params": list(added.parameters())})
        replica = Replica(both)
        for k in range(4):
            give(both, k)
            optimizer.step()
        replica.sync()
        with torch.no_grad():
            added[0].weight.mul_(2)
        whole = {"1.0.weight": sizes(both)["1.0.weight"]}
        found.append([replica.sync() == whole and replica.is_equal] * (STEPS - 1))
    torch.save(found, f"{folder}/{rank}")
    dist.destroy_process_group()


def test_two_processes_send_the_changes_of_their_shards(tmp_path: Path) -> None:
    start_processes(work, args=(str(tmp_path),), nprocs=2, start_method="fork")
    for rank in (0, 1):
        assert torch.load(tmp_path / str(rank)) == [[True] * (STEPS - 1)] * 5


def loaded(rank: int, folder: str) -> None:
    """Load the weights of a model between steps, with writes to DTensors being counted or not."""
    join_group(rank, 1, f"{folder}/store")
    found, count = [], ShardedWrites.count
    with without_compiler(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*was cleared")
        for counts in (True, False):
            ShardedWrites.count = count if counts else lambda *_: None  # type: ignore[method-assign]
            module = model()
            fully_shard(module)
            optimizer = collage_fx.compile_(SGD(module.parameters(), lr=1e-3))
            for k in range(4):
                give(module, k)
                optimizer.step()
            weight: Any = module[0].weight
            before = weight._local_tensor._version
            module.load_state_dict({n: p * 1.5 for n, p in module.state_dict().items()})
            assert weight._local_tensor._version == before
            for p in module.parameters():
                p.grad.zero_()
            optimizer.step()
            found.append(bool(collage_fx.residuals(weight)[0].to_local().any()))
    torch.save(found, f"{folder}/{rank}")
    dist.destroy_process_group()


def test_residuals_do_not_outlive_the_weights_of_a_sharded_model(tmp_path: Path) -> None:
    start_processes(loaded, args=(str(tmp_path),), nprocs=1, start_method="fork")
    assert torch.load(tmp_path / "0") == [False, True], "the second is the control"
