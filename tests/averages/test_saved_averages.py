"""Averages are saved with their residuals, and as AveragedModel loads them.

For averages.saved.
"""

import copy
import io
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import collage_fx
from collage_fx.errors import CheckpointError


def moved(model: nn.Module, average: Any, steps: int) -> list[Tensor]:
    """The whole averages of a model that moves by less than bf16 has room for."""
    for _ in range(steps):
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.0625)
        average.update_parameters(model)
    return values(average)


def values(average: Any) -> list[Tensor]:
    return [collage_fx.value(p) for p in average.module.parameters()]


def made(**options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2)).bfloat16()
    return model, collage_fx.EMA(model, 0.99, **options)


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def through_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)


@pytest.mark.parametrize("storages", [(None, None), ("mcf2", None), ("ulp4", "ulp4"), ("sr", "sr")])
def test_a_resumed_average_is_the_unbroken_one(storages: tuple[Any, Any]) -> None:
    model, average = made(storage=storages[0])
    moved(model, average, 5)
    other, again = made(storage=storages[1])
    assert not same(values(again), values(average)), "control"
    again.load_state_dict(through_file(average.state_dict()))
    other.load_state_dict(model.state_dict())
    assert same(values(again), values(average))
    if storages[0] == storages[1]:
        assert same(moved(other, again, 3), moved(model, average, 3))
    assert int(again.n_averaged) == int(average.n_averaged)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_distributed_checkpoints_have_them() -> None:
    model, average = made()
    moved(model, average, 5)
    with tempfile.TemporaryDirectory() as folder:
        dcp.save({"average": average}, checkpoint_id=folder)
        other, again = made()
        dcp.load({"average": again}, checkpoint_id=folder)
    other.load_state_dict(model.state_dict())
    assert same(values(again), values(average))
    assert same(moved(other, again, 3), moved(model, average, 3))


def test_as_a_part_of_another_module() -> None:
    model, average = made()
    moved(model, average, 5)
    holder, other = nn.Module(), nn.Module()
    holder.average, other.average = average, made()[1]
    state = through_file(holder.state_dict())
    assert any("collage_fx" in key for key in state)
    assert str(other.load_state_dict(state)) == "<All keys matched successfully>"
    assert same(values(other.average), values(average))


def test_without_residuals_it_is_an_averaged_model() -> None:
    model, average = made()
    moved(model, average, 5)
    plain = AveragedModel(model)
    state = average.state_dict(residuals=False)
    assert str(plain.load_state_dict(state)) == "<All keys matched successfully>"
    _, again = made()
    with pytest.warns(collage_fx.CollageWarning, match=r"holds no residuals.*as if 0\.weight"):
        again.load_state_dict(plain.state_dict())
    assert same(values(again), [p.double() for p in plain.module.parameters()])
    assert int(again.n_averaged) == 5


def test_wider_averages_keep_what_residuals_hold() -> None:
    model, average = made()
    wide = AveragedModel(copy.deepcopy(model).float())
    with torch.no_grad():
        for p in wide.module.parameters():
            p.add_(torch.rand_like(p))
    average.load_state_dict(wide.state_dict())
    assert same(values(average), [p.double() for p in wide.module.parameters()])
    rounded = [p.bfloat16().double() for p in wide.module.parameters()]
    assert not same(values(average), rounded), "control"


@pytest.mark.parametrize("what", ["shape", "name", "missing"])
def test_residuals_that_do_not_fit(what: str) -> None:
    model, average = made()
    moved(model, average, 2)
    state = average.state_dict()
    key = "collage_fx.0.weight.remainder16.0"
    if what == "shape":
        state[key] = state[key][:2]
    elif what == "name":
        state["collage_fx.7.weight.remainder16.0"] = state[key]
    else:
        del state[key]
    _, again = made()
    before = values(again)
    with pytest.raises(CheckpointError):
        again.load_state_dict(state)
    assert same(values(again), before)


def test_weights_of_another_save_clear_them() -> None:
    model, average = made()
    moved(model, average, 5)
    state = average.state_dict()
    state["module.0.weight"] = state["module.0.weight"] + 1
    _, again = made()
    again.load_state_dict(state)
    with pytest.warns(collage_fx.CollageWarning, match="not as they were saved together"):
        again.update_parameters(model)
    assert not collage_fx.value(again.module[0].weight).isnan().any()


def test_whole_averages_in_fp32() -> None:
    model, average = made()
    moved(model, average, 5)
    whole = collage_fx.master_state_dict(average)
    assert set(whole) == set(average.state_dict(residuals=False))
    assert torch.equal(whole["module.0.weight"].double(), values(average)[0])
    other = made()[1]
    collage_fx.load_master_weights(other, whole)
    assert same(values(other), values(average))


def test_saving_needs_no_update_before() -> None:
    _, average = made()
    keys = average.state_dict().keys()
    assert {"collage_fx.0.weight.remainder16.0", "n_averaged"} <= keys
    assert not any("collage_fx" in k for k in average.state_dict(residuals=False))
