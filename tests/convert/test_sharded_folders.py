"""Folders that two processes have saved together: converted in one, loaded by two again.

For convert.containers and convert.conversion.
"""

import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from interpreter import without_compiler
from sharded_runs import Run, join_group
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.spawn import start_processes

from collage_fx.convert.conversion import convert
from collage_fx.errors import CollageWarning

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def work(rank: int, folder: str, flat: bool, then: str) -> None:
    """Train and save, or go on from a folder, with FSDP2."""
    join_group(rank, 2, f"{folder}/store {then}")
    with without_compiler(), warnings.catch_warnings():
        warnings.simplefilter("error", CollageWarning)
        run = Run("AdamW", 0 if not then else 1, "fsdp", init_device_mesh("cpu", (2,)))
        if then:
            run.load(Path(folder, then), None, flatten_optimizer_state_dict=flat)
            run.steps(2, 4)
        else:
            run.steps(0, 2)
            run.save(Path(folder, "in"), None, flatten_optimizer_state_dict=flat)
            values = run.values()
            if rank == 0:
                torch.save(values, f"{folder}/before")
            run.steps(2, 4)
        values = run.values()
    if rank == 0:
        torch.save(values, f"{folder}/end {then}")
    dist.destroy_process_group()


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flattened"])
def test_two_processes_go_on_from_what_one_has_converted(flat: bool, tmp_path: Path) -> None:
    start_processes(work, args=(str(tmp_path), flat, ""), nprocs=2, start_method="fork")
    convert(tmp_path / "in", tmp_path / "fp32", "fp32")
    summary = convert(tmp_path / "in", tmp_path / "out", "remainder16")
    assert summary.parameters == 4 and summary.moments == 4 and not summary.errors
    weights = {
        f"model.{name}": torch.empty(p.shape)
        for name, p in Run("AdamW", 0).model.named_parameters()
    }
    dcp.load(weights, checkpoint_id=tmp_path / "fp32", no_dist=True)
    values = torch.load(tmp_path / "before")
    for name, value in zip(weights, values[::4], strict=True):
        assert torch.equal(weights[name], value.float())
    start_processes(work, args=(str(tmp_path), flat, "out"), nprocs=2, start_method="fork")
    end, unbroken = torch.load(tmp_path / "end out"), torch.load(tmp_path / "end ")
    assert all(map(torch.equal, end, unbroken))
