"""Checkpoints that are converted, and the runs that go on from them.

For convert.conversion and convert.values.
"""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peers import MARKS, Tree, checkpoint, fp32, take_steps, trained
from saved import as_format_1
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

import collage_fx
from collage_fx.convert.conversion import TARGETS, Summary, convert
from collage_fx.errors import CheckpointError, CollageWarning

STORAGES = TARGETS[1:]


def converted(tree: Any, folder: Path, to: str, **options: Any) -> tuple[Any, Summary]:
    source, out = folder / "in.pt", folder / f"{to}.pt"
    torch.save(tree, source)
    before = source.read_bytes()
    summary = convert(source, out, to, **options)
    assert source.read_bytes() == before
    return torch.load(out, weights_only=True), summary


def inner(tree: Tree) -> Any:
    """The state dict of the optimizer itself."""
    return tree["optimizer"].get("optimizer", tree["optimizer"])


def resumed(tree: Tree, **options: Any) -> tuple[nn.Module, Optimizer]:
    model, _ = trained(torch.bfloat16, 0)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    collage_fx.compile_(optimizer, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error", CollageWarning)
        warnings.filterwarnings("ignore", message="collage_fx: load_state_dict.. has cast exp_avg")
        model.load_state_dict(tree["model"])
        optimizer.load_state_dict(inner(tree))
        take_steps(model, optimizer, 3, 4)
    return model, optimizer


def by_master_weights(values: dict[str, Tensor], states: Any, **options: Any) -> Any:
    """The same run by functions that were there before: fp32 weights and states are loaded."""
    model, _ = trained(torch.bfloat16, 0)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    collage_fx.load_master_weights(model, values)
    collage_fx.compile_(optimizer, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CollageWarning)
        optimizer.load_state_dict(states)
        take_steps(model, optimizer, 3, 4)
    return model, optimizer


def words(run: tuple[nn.Module, Optimizer]) -> list[Tensor]:
    model, optimizer = run
    states = (s for p in model.parameters() for s in (p, *optimizer.state[p].values()))
    tensors = [t for t in states if isinstance(t, Tensor)]
    return [word for t in tensors for word in (t, *collage_fx.residuals(t))]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def plain_states(tree: Tree) -> Any:
    """The states of a checkpoint as torch.optim has them, without what is peculiar to a format."""
    keys = ("step", "exp_avg", "exp_avg_sq")
    states = {
        i: {"step": torch.tensor(3.0), **{k: s[k] for k in keys if k in s}}
        for i, s in inner(tree)["state"].items()
    }
    return {"state": states, "param_groups": inner(tree)["param_groups"]}


@pytest.mark.parametrize("mark", ["fp32", *MARKS])
def test_a_run_goes_on_as_with_the_fp32_weights_themselves(mark: str, tmp_path: Path) -> None:
    tree, values = (fp32(), dict(fp32()["model"])) if mark == "fp32" else checkpoint(mark)
    out, summary = converted(tree, tmp_path, "remainder16")
    assert summary.parameters == 4 and summary.left == 0 and not summary.errors
    run = resumed(out)
    values = {name: value.float() for name, value in values.items()}
    assert same(words(run), words(by_master_weights(values, plain_states(tree))))
    wrong = {name: value.bfloat16().float() for name, value in values.items()}
    assert not same(words(run), words(by_master_weights(wrong, plain_states(tree))))


@pytest.mark.parametrize("mark", MARKS)
def test_whole_values_in_fp32(mark: str, tmp_path: Path) -> None:
    tree, values = checkpoint(mark)
    out, summary = converted(tree, tmp_path, "fp32")
    assert list(out["model"]) == list(values)
    assert all(torch.equal(out["model"][name], values[name].float()) for name in values)
    assert not summary.errors and "fp32_from_fp16_params" not in out["optimizer"]
    model, optimizer = trained(steps=0)
    model.load_state_dict(out["model"])
    optimizer.load_state_dict(inner(out))  # plain PyTorch goes on
    take_steps(model, optimizer, 3, 4)


def ours(storage: str, level: str = "all") -> Tree:
    model, optimizer = trained(torch.bfloat16, 0)
    collage_fx.compile_(optimizer, storage=storage, level=level)
    take_steps(model, optimizer, 0, 3)
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def same_trees(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(
            one.view(torch.uint8) if one.dim() else one,
            other.view(torch.uint8) if one.dim() else other,
        )
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same_trees(one[k], other[k]) for k in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same_trees, one, other))
    return bool(one == other)


@pytest.mark.parametrize("storage", STORAGES)
def test_ours_comes_back_from_its_own_storage(storage: str, tmp_path: Path) -> None:
    tree = ours(storage)
    out, summary = converted(tree, tmp_path, storage)
    assert summary.formats == ["collage_fx"] and summary.moments == 8 and not summary.errors
    assert same_trees(out, tree)


def test_ours_comes_back_by_remainder16_bit_for_bit(tmp_path: Path) -> None:
    """All that `ulp8` holds fits: there and back nothing has changed."""
    tree = ours("ulp8")
    there, summary = converted(tree, tmp_path, "remainder16")
    assert not summary.errors
    (tmp_path / "back").mkdir()
    back, _ = converted(there, tmp_path / "back", "ulp8")
    assert same_trees(back, tree)


@pytest.mark.parametrize("storage", [*STORAGES, "mcf3", "ulp4", "sr"])
def test_ours_becomes_the_whole_values(storage: str, tmp_path: Path) -> None:
    model, optimizer = trained(torch.bfloat16, 0)
    collage_fx.compile_(optimizer, storage=storage, level="all")
    take_steps(model, optimizer, 0, 3)
    tree = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    out, _ = converted(tree, tmp_path, "fp32")
    for index, (name, p) in enumerate(model.named_parameters()):
        assert torch.equal(out["model"][name], collage_fx.value(p).float())
        state = out["optimizer"]["state"][index]
        assert state.keys() == {"step", "exp_avg", "exp_avg_sq"}
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(state[key], collage_fx.value(optimizer.state[p][key]).float())
    assert "collage_fx" not in out["optimizer"]["param_groups"][0]


@pytest.mark.parametrize("storage", ["mcf3", "ulp4", "sr"])
def test_ours_goes_on_in_another_storage(storage: str, tmp_path: Path) -> None:
    tree = ours(storage)
    out, summary = converted(tree, tmp_path, "remainder16")
    assert summary.moments == 8 and max(summary.errors.values(), default=0) <= 2.0**-24
    model, _ = resumed(out, storage="remainder16", level="all")
    assert [r.dtype for r in collage_fx.residuals(model[0].weight)] == [torch.int16]  # type: ignore[index]


def test_fp32_with_residuals_becomes_bf16_with_residuals(tmp_path: Path) -> None:
    model, optimizer = trained(steps=0)
    collage_fx.compile_(optimizer, storage="double_single", level="all")
    take_steps(model, optimizer, 0, 3)
    tree = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    out, summary = converted(tree, tmp_path, "remainder16")
    assert 0 < max(summary.errors.values()) <= 2.0**-24
    again, _ = trained(torch.bfloat16, 0)
    restored = AdamW(again.parameters(), lr=1e-3)
    collage_fx.compile_(restored)
    again.load_state_dict(out["model"])
    restored.load_state_dict(out["optimizer"])
    for p, whole in zip(again.parameters(), model.parameters(), strict=True):
        assert torch.equal(collage_fx.value(p).float(), collage_fx.value(whole).float())


def test_checkpoints_of_format_1(tmp_path: Path) -> None:
    tree = ours("remainder16")
    expected, _ = converted(tree, tmp_path, "fp32")
    (tmp_path / "old").mkdir()
    old = {**tree, "optimizer": as_format_1(tree["optimizer"])}
    out, summary = converted(old, tmp_path / "old", "fp32")
    assert summary.formats == ["collage_fx"] and same_trees(out, expected)


@pytest.mark.parametrize(("to", "most"), [("mcf2", 2.0**-17), ("ulp8", 2.0**-16)])
def test_what_a_storage_rounds_off_is_said(to: str, most: float, tmp_path: Path) -> None:
    tree = fp32()
    out, summary = converted(tree, tmp_path, to)
    assert set(summary.errors) == set(tree["model"]) and 0 < max(summary.errors.values()) <= most
    model, _ = resumed(out, storage=to)
    assert {r.dtype for r in collage_fx.residuals(model[0].weight)}  # type: ignore[index]


def test_weights_of_another_step_than_their_residuals_are_refused(tmp_path: Path) -> None:
    tree = ours("remainder16")
    tree["model"]["0.weight"] = tree["model"]["0.weight"] * 2
    with pytest.raises(CheckpointError, match=r"residual of 0.weight .* different steps"):
        converted(tree, tmp_path, "fp32")
    tree = ours("remainder16")
    for state in tree["optimizer"]["state"].values():
        for key in [k for k in state if k.startswith("collage_fx.")]:
            del state[key]
    with pytest.raises(CheckpointError, match="there were residuals"):
        converted(tree, tmp_path, "fp32")


def test_fp32_parameters_beside_16_bits_stay(tmp_path: Path) -> None:
    tree, _ = checkpoint("master_param")
    for index, name in ((2, "1.weight"), (3, "1.bias")):
        tree["model"][name] = tree["optimizer"]["state"][index].pop("master_param")
    out, summary = converted(tree, tmp_path, "remainder16")
    assert (summary.parameters, summary.left) == (2, 2)
    assert torch.equal(out["model"]["1.weight"], tree["model"]["1.weight"])
    assert same_trees(
        out["optimizer"]["state"][2]["exp_avg"], tree["optimizer"]["state"][2]["exp_avg"]
    )


def test_optimi_keeps_its_key(tmp_path: Path) -> None:
    """Without it the class would make all states of the parameter anew."""
    tree, _ = checkpoint("kahan_comp")
    out, summary = converted(tree, tmp_path, "remainder16")
    assert all(state["kahan_comp"] is None for state in out["optimizer"]["state"].values())
    assert out["optimizer"]["param_groups"][0]["kahan_sum"] is False
    assert any("its classes, not those of torch.optim" in note for note in summary.notes)
    tree, _ = checkpoint("compensation")
    out, _ = converted(tree, tmp_path, "fp32")
    assert out["optimizer"]["param_groups"][0]["use_kahan_summation"] is False
    assert not any("compensation" in state for state in out["optimizer"]["state"].values())


def test_moments_in_eight_bits_become_fp32(tmp_path: Path) -> None:
    tree, _ = checkpoint("error_bits")
    for state in tree["optimizer"]["state"].values():
        moment = state.pop("exp_avg_sq")
        state["exp_avg_sq::quantized"] = torch.full(moment.shape, 255, dtype=torch.uint8)
        groups = -(-moment.numel() // 32)
        state["exp_avg_sq::scales"] = torch.full((groups,), 0.5).half().view(torch.bfloat16)
    out, _ = converted(tree, tmp_path, "remainder16")
    for state in out["optimizer"]["state"].values():
        assert not any("::" in key for key in state)
        assert state["exp_avg_sq"].dtype == torch.float32 and bool(
            (state["exp_avg_sq"] == 0.25).all()
        )
