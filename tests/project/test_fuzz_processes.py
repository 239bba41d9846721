"""Random optimizer programs over two processes: parameters, states and gradients are DTensors.

For tests/support/fuzz.py.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import fuzz
import generated
import oracle
import pytest
import runs
import torch
from oracle import judge
from program_helpers import HELPERS
from programs import Line, Program
from sharded_runs import join_group
from torch.multiprocessing.spawn import start_processes

RANKS = 2
SHARDED = '''\
def laid_out(x, how):
    """Return a tensor of which each process has some rows."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    place = Shard(0) if x.dim() else Replicate()
    return distribute_tensor(x, init_device_mesh("cpu", (2,)), [place], src_data_rank=None)
'''
"""Code that lays parameters and gradients out in each process."""
APART = ("Named", "Boxed", "numpy", "shared(", "buffer(", "torch.tensor(", "tolist", "rand", "view")
"""Words of what plain PyTorch does not do with DTensors, or draws otherwise in each process."""


def drawn(seed: int, count: int) -> list[Program]:
    """Return some random programs that plain PyTorch takes DTensors in."""
    found = [
        replace(program, layout="sharded", gradients="sharded")
        for program in generated.drawn(seed, 20 * count, ("compile", "record"))
        if not (program.events or program.dtypes or program.draws)
        and not any(word in program.statements for word in APART)
    ]
    return found[:count]


def _be_one(rank: int, store: str, given: list[Program], out: str) -> None:
    """Run the programs as one process of two; save what became of them."""
    join_group(rank, RANKS, store)
    done: list[Any] = []
    with mock.patch.dict(HELPERS, {"laid_out": SHARDED}), fuzz.few_objects():
        for program in given:
            try:
                runs.eager(program, getattr(torch, program.dtype))
            except (NotImplementedError, RuntimeError) as error:
                done.append(f"plain: {error}")
                continue
            done.append(runs.compensated(program))
    if rank == 0:
        torch.save(done, out)


def run(given: list[Program], folder: Path) -> list[Any]:
    """Return the run of each program, or why plain PyTorch has none."""
    out = str(folder / "runs.pt")
    start_processes(_be_one, (str(folder / "store"), given, out), RANKS, start_method="forkserver")
    found: list[Any] = torch.load(out, weights_only=False)
    return found


@pytest.mark.slow
def test_random_programs_over_two_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = Program(
        lines=(
            Line('st["m"].mul_(0.999).add_(g, alpha=0.001)'),
            Line('u = g / (g.norm() + 1) + st["m"]\np.sub_(u, alpha=lr)'),
        ),
        states=(("m", "torch.zeros_like(p)"),),
        layout="sharded",
        gradients="sharded",
    )
    given = [known, *drawn(1, 4)]
    found = run(given, tmp_path)
    judged = 0
    for program, result in zip(given, found, strict=True):
        if isinstance(result, str):
            continue
        monkeypatch.setattr(oracle, "compensated", lambda p, interpreted, result=result: result)
        verdict = judge(program)
        assert verdict.failures == [], program.script()
        judged += not verdict.excuse
        if program is known:
            assert verdict.worst < 1 < verdict.lost
            # The control: of another rate.
            assert judge(replace(program, rates=((2e-3, 0.0),))).failures
    assert judged > 2, found
