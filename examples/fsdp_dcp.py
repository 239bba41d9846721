"""FSDP2 and torch.distributed.checkpoint: `torchrun --nproc-per-node 2 examples/fsdp_dcp.py`.

Trains a bf16 model with compensated AdamW, saves with DCP after each few steps, and goes on from
the last checkpoint in the folder on however many processes it is started with.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import collage_fx

STEPS, EACH = 12, 4


def main(folder: Path) -> None:
    """Train to the end, from wherever the last run has come to."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)).bfloat16()
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    collage_fx.compile_(optimizer)

    begin = max((int(p.parent.name) for p in folder.glob("*/.metadata")), default=0)
    if begin:
        weights, states = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": states}, checkpoint_id=folder / str(begin))
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
    for step in range(begin, STEPS):
        data = torch.randn(8, 16, generator=torch.Generator().manual_seed(step)).bfloat16()
        loss = (model(data) - data).square().mean()  # each process has all of the batch
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % EACH == 0:
            weights, states = get_state_dict(model, optimizer)
            dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder / str(step + 1))
    if dist.get_rank() == 0:
        served = collage_fx.report(optimizer).states
        print(f"from step {begin} to {STEPS}, loss {loss.item():.4f}, {len(served)} states")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else os.environ.get("CHECKPOINTS", "checkpoints")))
