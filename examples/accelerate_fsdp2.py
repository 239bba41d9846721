"""Accelerate with FSDP2: `torchrun --nproc-per-node 2 examples/accelerate_fsdp2.py`.

A second run goes on from what `accelerator.save_state` has written in the middle: the same bits.
"""

import tempfile

import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin, PartialState
from torch import nn

import collage_fx

STEPS, CPU = 6, not torch.cuda.is_available()


class Run:
    """A sharded model and its optimizer, as Accelerate prepares them."""

    def __init__(self, seed: int) -> None:
        plugin = FullyShardedDataParallelPlugin(2, auto_wrap_policy="no_wrap")
        self.accelerator = Accelerator(fsdp_plugin=plugin, cpu=CPU)
        if CPU:  # where Accelerate does not shard unless it is told to
            PartialState().distributed_type = DistributedType.FSDP
            self.accelerator.state.__dict__.update(vars(PartialState()), fsdp_plugin=plugin)
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)).bfloat16()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        collage_fx.compile_(self.optimizer)

    def train(self, first: int, last: int) -> None:
        """Take some steps, each process on all of the batch."""
        for step in range(first, last):
            data = torch.randn(8, 16, generator=torch.Generator().manual_seed(step)).bfloat16()
            self.optimizer.zero_grad()
            self.accelerator.backward((self.model(data) - data).square().mean())
            self.optimizer.step()


def main() -> None:
    """Train, resume in the middle, and compare."""
    run, resumed = Run(0), Run(1)
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    run.train(0, STEPS // 2)
    run.accelerator.save_state(folder[0])
    run.train(STEPS // 2, STEPS)
    resumed.accelerator.load_state(folder[0])
    resumed.train(STEPS // 2, STEPS)
    pairs = zip(run.model.parameters(), resumed.model.parameters(), strict=True)
    values = ([collage_fx.value(p).full_tensor() for p in pair] for pair in pairs)
    assert all(torch.equal(ours, theirs) for ours, theirs in values)
    run.accelerator.print(f"{dist.get_world_size()} processes: the resumed run has the same bits")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
