"""DCP checkpoints whose residuals are not those that the run which loads them has.

For hooks.distributed_state_dicts and optimizer.checkpoints.giving.
"""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoints import Run, compiled, plain, train
from interpreter import without_compiler
from torch import Tensor
from torch.distributed.checkpoint import default_planner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import collage_fx
from collage_fx.errors import CollageWarning
from collage_fx.hooks import distributed_state_dicts
from collage_fx.runtime.storage.registry import STORAGES

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(autouse=True, scope="module")
def _interpreted() -> Iterator[None]:
    with without_compiler():
        yield


def saved(folder: Path, options: StateDictOptions | None, **how: Any) -> Run:
    run = compiled(plain(0), **how)
    train(run, 0, 3)
    model, states = get_state_dict(*run, options=options)
    dcp.save({"model": model, "optimizer": states, "epoch": torch.ones(1)}, checkpoint_id=folder)
    return run


def loaded(run: Run, folder: Path, options: StateDictOptions | None) -> Run:
    model, states = get_state_dict(*run, options=options)
    parts = {"model": model, "optimizer": states, "epoch": torch.zeros(1)}
    dcp.load(parts, checkpoint_id=folder)
    assert parts.keys() == {"model", "optimizer", "epoch"}
    set_state_dict(*run, model_state_dict=model, optim_state_dict=states, options=options)
    return run


def values(run: Run) -> list[Tensor]:
    return [
        collage_fx.value(t)
        for p in run[0].parameters()
        for t in (p, *run[1].state[p].values())
        if t.dim()
    ]


@pytest.mark.parametrize(
    ("there", "here", "options"),
    [("mcf2", "remainder16", None), ("remainder16", "mcf3", FLAT), ("mcf3", "mcf2", None)],
)
@pytest.mark.quick("mcf2-*")
def test_a_checkpoint_in_one_storage_goes_on_in_another(
    there: str, here: str, options: StateDictOptions | None, tmp_path: Path
) -> None:
    old = saved(tmp_path, options, storage=there, level="all")
    with warnings.catch_warnings():
        warnings.simplefilter("error", CollageWarning)
        run = loaded(compiled(plain(1), storage=here, level="all"), tmp_path, options)
    assert all(map(torch.equal, values(run), values(old)))
    high = [p.detach().double() for p in run[0].parameters()]
    assert not any(map(torch.equal, high, values(run)[::3])), "the control"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CollageWarning)  # of a coarser storage, once
        train(run, 3, 4)
        train(old, 3, 4)
    for found, want, p in zip(values(run)[::3], values(old)[::3], run[0].parameters(), strict=True):
        assert (found - want).abs().max() < 2e-5, "of updates of 1e-3, rounded to bf16"
        residual = collage_fx.residuals(p)
        assert [c.dtype for c in residual] == [*STORAGES[here].residuals[torch.bfloat16]]


@pytest.mark.slow
@pytest.mark.parametrize("options", [None, FLAT])
def test_more_or_fewer_states_may_have_residuals(
    options: StateDictOptions | None, tmp_path: Path
) -> None:
    many = saved(tmp_path / "all", options, level="all")
    run = loaded(compiled(plain(1), level="light"), tmp_path / "all", options)
    assert all(map(torch.equal, values(run), values(many)))
    few = saved(tmp_path / "light", options, level="light")
    other = compiled(plain(1), level="all")
    loaded(other, tmp_path / "light", options)
    assert all(map(torch.equal, values(other), values(few)))


def test_it_is_refused_without_our_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: DCP wants to find all keys that it is given."""
    saved(tmp_path, None, storage="mcf2")
    monkeypatch.setattr(distributed_state_dicts, "_ask_for_saved", lambda *_: None)
    with pytest.raises(CheckpointException, match="Missing key"):
        loaded(compiled(plain(1), storage="remainder16"), tmp_path, None)
    assert hasattr(default_planner.DefaultLoadPlanner.create_local_plan, "_collage")


@pytest.mark.slow
def test_sharded_residuals_come_in_another_storage(tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))

        def made(seed: int, storage: str) -> Run:
            model, _ = plain(seed)
            fully_shard(model, mesh=mesh)
            optimizer = torch.optim.AdamW(model.named_parameters(), lr=1e-3)
            run = compiled((model, optimizer), storage=storage)
            for k in range(2):
                x = torch.linspace(-1, 1, 12).reshape(2, 6).bfloat16() * (k + 1)
                model(x).square().sum().backward()
                optimizer.step()
            return run

        run = made(0, "mcf2")
        model, states = get_state_dict(*run)
        dcp.save({"model": model, "optimizer": states}, checkpoint_id=tmp_path)
        again = made(1, "remainder16")
        model, states = get_state_dict(*again)
        dcp.load({"model": model, "optimizer": states}, checkpoint_id=tmp_path)
        set_state_dict(*again, model_state_dict=model, optim_state_dict=states)
        for p, q in zip(run[0].parameters(), again[0].parameters(), strict=True):
            assert type(q.data) is type(p.data) and "DTensor" in str(type(p.data))
            found = collage_fx.value(q).full_tensor()
            assert torch.equal(found, collage_fx.value(p).full_tensor())
            assert not torch.equal(found, q.detach().full_tensor().double()), "the control"
    finally:
        dist.destroy_process_group()
