"""States of two steps, in a state dict or in two processes: an error before anything changes.

For optimizer.checkpoints.agreement.
"""

import copy
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoints import Run, compiled, plain, train, words
from interpreter import without_compiler
from sharded_runs import Run as Sharded
from sharded_runs import join_group
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.spawn import start_processes

import collage_fx
from collage_fx.errors import CheckpointError, CollageWarning
from collage_fx.optimizer.checkpoints.agreement import fewest_steps

RANKS = 2
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


@pytest.fixture(autouse=True, scope="module")
def _interpreted() -> Iterator[None]:
    with without_compiler():
        yield


@pytest.fixture(scope="module")
def saves() -> tuple[Run, dict[int, Any]]:
    run, found = compiled(plain(0)), {}
    for step in (1, 2, 3):
        train(run, step - 1, step)
        found[step] = copy.deepcopy(run[1].state_dict())
    return run, found


def test_a_parameter_of_an_earlier_step_is_named(saves: tuple[Run, dict[int, Any]]) -> None:
    run, found = saves
    mixed = copy.deepcopy(found[3])
    mixed["state"][1] = copy.deepcopy(found[2]["state"][1])
    before = words(run)
    with pytest.raises(CheckpointError, match=r"step 3 or later.*parameter 0\.bias.* step 2"):
        run[1].load_state_dict(mixed)
    assert all(map(torch.equal, words(run), before))
    late = plain(1)
    late[1].load_state_dict(mixed)
    with pytest.raises(CheckpointError, match=r"parameter 0\.bias.* step 2"):
        compiled(late)


@pytest.mark.parametrize("lacks", ["states", "groups"])
def test_steps_that_are_not_known_are_not_compared(
    saves: tuple[Run, dict[int, Any]], lacks: str
) -> None:
    """A parameter whose states were taken out, and a checkpoint from before they were noted."""
    found = saves[1]
    other = copy.deepcopy(found[3])
    if lacks == "states":
        del other["state"][1]
    for group in other["param_groups"] if lacks == "groups" else ():
        entry = json.loads(group["collage_fx"])
        del entry["least_step"], entry["taken"]
        group["collage_fx"] = json.dumps(entry)
        other["state"][1]["step"] -= 1
    again = compiled(plain(1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CollageWarning)
        again[1].load_state_dict(other)
    loaded = again[1].state[next(again[0].parameters())]
    assert torch.equal(other["state"][0]["exp_avg"], loaded["exp_avg"])


def test_what_two_processes_have_saved_together_may_be_of_two_counts() -> None:
    """An expert that no token has come to in a step; the entry of the group is the other's."""

    def process(expert: str) -> Run:
        names = ("dense", expert)
        parts = {name: torch.nn.Linear(4, 4, bias=False).bfloat16() for name in names}
        model = torch.nn.ModuleDict(parts)
        return model, collage_fx.compile_(torch.optim.AdamW(model.parameters()))

    def get(run: Run) -> dict[str, Any]:
        return get_optimizer_state_dict(*run, options=FLAT)

    runs = [process("one"), process("two")]
    for step in range(3):
        for k, (model, optimizer) in enumerate(runs):
            for name, p in model.named_parameters():
                p.grad = None if k and step == 1 and "two" in name else torch.ones_like(p)
            optimizer.step()
    saved = {**get(runs[1]), **get(runs[0])}
    again = process("two")
    mine = {key: saved[key] for key in get(again)}
    set_optimizer_state_dict(*again, mine, options=FLAT)
    assert [int(s["step"]) for s in again[1].state.values()] == [3, 2]


@pytest.mark.parametrize("step", [torch.inf, torch.nan])
def test_steps_that_are_no_numbers_are_not_compared(step: float) -> None:
    assert fewest_steps({0: {"step": torch.tensor(step)}, 1: {"step": torch.tensor(4.0)}}) == 4


def test_a_resumed_run_counts_on(saves: tuple[Run, dict[int, Any]]) -> None:
    def taken(states: Any) -> int:
        count = json.loads(states["param_groups"][0]["collage_fx"])["taken"]
        assert isinstance(count, int)
        return count

    run, found = saves
    again = compiled(plain(1))
    again[0].load_state_dict(run[0].state_dict())
    again[1].load_state_dict(found[3])
    train(again, 3, 5)
    assert [taken(s) for s in (*found.values(), again[1].state_dict())] == [1, 2, 3, 5]


def work(rank: int, folder: str, kind: str) -> None:
    join_group(rank, RANKS, f"{folder}/store")
    mesh = init_device_mesh("cpu", (RANKS,))
    with without_compiler(), warnings.catch_warnings():
        warnings.simplefilter("error", CollageWarning)
        run = Sharded(kind, 0, "fsdp 2", mesh)
        for step in range(1, 4):  # each process saves what it has, in a file of its own
            run.steps(step - 1, step)
            parts = run.model.state_dict(), run.optimizer.state_dict()
            torch.save(parts, f"{folder}/{rank}.{step}")
        load(run, rank, folder, 2 if rank else 3)  # one of another step
        before = run.values()
        with pytest.raises(CheckpointError, match=r"those of steps \[3, 2\]"):
            run.steps(3, 4)
        assert all(map(torch.equal, before, run.values()))
        if rank:
            load(run, rank, folder, 1)  # alone, which nobody waits for
        load(run, rank, folder, 3)
        run.steps(3, 5)
        values = run.values()
    if rank == 0:
        torch.save(values, f"{folder}/found")
    dist.destroy_process_group()


def load(run: Sharded, rank: int, folder: str, step: int) -> None:
    """Load a file; then all are done, as they are where gradients have been reduced."""
    model, states = torch.load(f"{folder}/{rank}.{step}", weights_only=False)
    run.model.load_state_dict(model)
    run.optimizer.load_state_dict(states)
    if step > 1:
        dist.barrier()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_one_process_with_a_file_of_another_step(kind: str, tmp_path: Path) -> None:
    start_processes(work, args=(str(tmp_path), kind), nprocs=RANKS, start_method="fork")
    alone = Sharded(kind, 0)
    alone.steps(0, 5)
    assert all(map(torch.equal, torch.load(tmp_path / "found"), alone.values()))
