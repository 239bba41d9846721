"""Containers of checkpoints that are converted: the same values in each, whole or not at all.

For convert.files and convert.containers.
"""

import builtins
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoints import compiled, plain, train
from peers import checkpoint, fp32, trained
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)

import collage_fx
from collage_fx.convert import files
from collage_fx.convert.conversion import convert
from collage_fx.errors import CheckpointError

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def bytes_of(place: Path) -> dict[str, bytes]:
    """All files at a path, or below it."""
    inside = [place, *place.rglob("*")]
    return {str(p.relative_to(place)): p.read_bytes() for p in inside if p.is_file()}


def save_to_folder(tree: Any, folder: Path) -> None:
    dcp.save(tree, checkpoint_id=folder, no_dist=True)


def entries(folder: Path) -> dict[str, Tensor]:
    """The tensors of a DCP folder, by name."""
    about = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    found: dict[str, Any] = {
        name: torch.empty(one.size, dtype=one.properties.dtype)
        for name, one in about.items()
        if hasattr(one, "properties")
    }
    dcp.load(found, checkpoint_id=folder, no_dist=True)
    return found


@pytest.mark.parametrize("options", [None, FLAT], ids=["nested", "flattened"])
@pytest.mark.parametrize("mark", ["ours", "remainders"])
def test_a_folder_becomes_a_folder(
    mark: str, options: StateDictOptions | None, tmp_path: Path
) -> None:
    if mark == "ours":
        run = compiled(plain(0))
        train(run, 0, 3)
        model, states = get_state_dict(*run, options=options)
        values = {name: collage_fx.value(p).float() for name, p in run[0].named_parameters()}
        tree: Any = {"model": model, "optimizer": states, "epoch": torch.ones(1)}
    else:
        tree, values = checkpoint(mark)
        tree["epoch"] = torch.ones(1)
        if options is not None:
            states = tree["optimizer"]["state"]
            named = zip(tree["model"], states.values(), strict=True)
            flat = {f"state.{n}.{k}": v for n, s in named for k, v in s.items()}
            flat.update({f"param_groups.{n}.step": 3 for n in tree["model"]})
            tree["optimizer"] = flat
    save_to_folder(tree, tmp_path / "in")
    before = bytes_of(tmp_path / "in")
    convert(tmp_path / "in", tmp_path / "out", "remainder16")
    convert(tmp_path / "out", tmp_path / "fp32", "fp32")
    assert bytes_of(tmp_path / "in") == before
    found = entries(tmp_path / "fp32")
    assert all(torch.equal(found[f"model.{name}"], values[name]) for name in values)
    assert torch.equal(found["epoch"], torch.ones(1))
    assert not any("collage_fx" in name for name in found)


@pytest.mark.parametrize("options", [None, FLAT], ids=["nested", "flattened"])
def test_a_run_loads_the_folder(options: StateDictOptions | None, tmp_path: Path) -> None:
    """From fp32, by PyTorch's own functions."""
    model, optimizer = trained()
    weights, states = get_state_dict(model, optimizer, options=options)
    save_to_folder({"model": weights, "optimizer": states}, tmp_path / "in")
    convert(tmp_path / "in", tmp_path / "out", "remainder16")
    again = trained(torch.bfloat16, 0)
    collage_fx.compile_(again[1], storage="remainder16")
    weights, states = get_state_dict(*again, options=options)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="collage_fx: load_state_dict")
        dcp.load(
            {"model": weights, "optimizer": states}, checkpoint_id=tmp_path / "out", no_dist=True
        )
        set_state_dict(*again, model_state_dict=weights, optim_state_dict=states, options=options)
    for p, whole in zip(again[0].parameters(), model.parameters(), strict=True):
        assert torch.equal(collage_fx.value(p).float(), whole)


def test_a_file_of_safetensors(tmp_path: Path) -> None:
    tree, values = checkpoint("remainders")
    flat = {f"model.{name}": weight for name, weight in tree["model"].items()}
    for name, state in zip(tree["model"], tree["optimizer"]["state"].values(), strict=True):
        flat.update({f"optimizer.state.{name}.{key}": value for key, value in state.items()})
    save_file(flat, tmp_path / "in.safetensors")
    before = bytes_of(tmp_path)
    convert(tmp_path / "in.safetensors", tmp_path / "out.safetensors", "ulp8")
    convert(tmp_path / "in.safetensors", tmp_path / "whole.safetensors", "remainder16")
    convert(tmp_path / "whole.safetensors", tmp_path / "fp32.safetensors", "fp32")
    assert before.items() <= bytes_of(tmp_path).items()
    found = load_file(tmp_path / "fp32.safetensors")
    assert all(torch.equal(found[f"model.{name}"], values[name]) for name in values)
    assert found.keys() == {name for name in flat if not name.endswith("master_param")}
    coarse = load_file(tmp_path / "out.safetensors")
    assert coarse["optimizer.state.0.weight.collage_fx.<param>.ulp8.0"].shape == (9, 6)


def test_two_names_of_one_tensor_stay_one(tmp_path: Path) -> None:
    tree = fp32()
    tree["model"]["tied"] = tree["model"]["0.weight"]
    torch.save(tree, tmp_path / "in.pt")
    convert(tmp_path / "in.pt", tmp_path / "out.pt", "mcf2")
    model = torch.load(tmp_path / "out.pt")["model"]
    assert model["tied"].data_ptr() == model["0.weight"].data_ptr()
    assert model["tied"].dtype == torch.bfloat16


class Interrupted(BaseException):
    pass


@pytest.mark.parametrize("kind", ["in.pt", "in.safetensors", "in"])
@pytest.mark.parametrize("error", [Interrupted, OSError, KeyboardInterrupt])
def test_an_interrupt_leaves_nothing(
    kind: str, error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: dict[str, Callable[[], Any]] = {
        "in.pt": lambda: torch.save(fp32(), tmp_path / kind),
        "in": lambda: save_to_folder(fp32(), tmp_path / kind),
        "in.safetensors": lambda: save_file(_flat(), tmp_path / kind),
    }
    saved[kind]()
    before = bytes_of(tmp_path)

    def stop(place: Path) -> None:
        assert place.exists(), "the writer has written"
        raise error("no more")

    monkeypatch.setattr(files, "_sync", stop)
    with pytest.raises(CheckpointError if error is OSError else error):
        convert(tmp_path / kind, tmp_path / kind.replace("in", "out"), "remainder16")
    assert bytes_of(tmp_path) == before and {p.name for p in tmp_path.iterdir()} == {kind}


def _flat() -> dict[str, Tensor]:
    tree = fp32()
    named = zip(tree["model"], tree["optimizer"]["state"].values(), strict=True)
    return {**tree["model"], **{f"state.{n}.{k}": v for n, s in named for k, v in s.items()}}


KILLED = """
import signal, sys, time, torch
from pathlib import Path
from collage_fx.convert import files
from collage_fx.convert.conversion import convert
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background jobs ignore
def wait(place):
    print("written", flush=True)
    time.sleep(60)
files._sync = wait
convert(Path(sys.argv[1]), Path(sys.argv[2]), "remainder16")
"""


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_process_leaves_no_checkpoint(by: signal.Signals, tmp_path: Path) -> None:
    torch.save(fp32(), tmp_path / "in.pt")
    before = bytes_of(tmp_path)["in.pt"]
    command = [sys.executable, "-c", KILLED, str(tmp_path / "in.pt"), str(tmp_path / "out.pt")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None and process.stdout.readline() == b"written\n"
        time.sleep(0.1)
        process.send_signal(by)
        assert process.wait(60)
    left = {p.name for p in tmp_path.iterdir()}
    assert "out.pt" not in left and bytes_of(tmp_path)["in.pt"] == before
    assert len(left) == (1 if by is signal.SIGINT else 2)  # a `.partial` file nobody could remove


def test_what_is_not_there_or_damaged(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole.pt", tmp_path / "cut.pt"
    torch.save(fp32(), whole)
    cut.write_bytes(whole.read_bytes()[:-400])
    (tmp_path / "text.pt").write_text("no checkpoint")
    (tmp_path / "empty.pt").touch()
    (tmp_path / "cut.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{}")
    (tmp_path / "folder").mkdir()
    save_to_folder(fp32(), tmp_path / "half")
    (part,) = (tmp_path / "half").glob("*.distcp")
    part.write_bytes(part.read_bytes()[:-3000])
    names = ["missing.pt", "cut.pt", "text.pt", "empty.pt", "cut.safetensors", "folder", "half"]
    for name in names:
        with pytest.raises(CheckpointError, match=name):
            convert(tmp_path / name, tmp_path / "out", "fp32")
    assert not (tmp_path / "out").exists()


class Own:
    """Not unpickled: it could run any code."""


def test_other_objects_are_not_unpickled(tmp_path: Path) -> None:
    torch.save({**fp32(), "config": Own()}, tmp_path / "in.pt")
    with pytest.raises(CheckpointError, match="nothing else is unpickled"):
        convert(tmp_path / "in.pt", tmp_path / "out.pt", "fp32")
    save_to_folder({**fp32(), "config": Own()}, tmp_path / "in")
    with pytest.raises(CheckpointError, match="Own"):
        convert(tmp_path / "in", tmp_path / "out", "fp32")


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    torch.save(fp32(), tmp_path / "in.pt")
    save_to_folder(fp32(), tmp_path / "folder")
    before = bytes_of(tmp_path)
    places = {
        "in.pt": "exists",
        "none/out.pt": "no folder",
        "folder": "exists",
        "out.safetensors": "of the kind of .*, torch.save",
    }
    for place, words in places.items():
        with pytest.raises(CheckpointError, match=words):
            convert(tmp_path / "in.pt", tmp_path / place, "fp32")
    with pytest.raises(CheckpointError, match="a part of"):
        convert(tmp_path / "folder", tmp_path / "folder" / "out", "fp32")
    assert bytes_of(tmp_path) == before


def test_a_folder_that_may_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save(fp32(), tmp_path / "in.pt")
    # The user of tests may be one who may write anywhere.
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(CheckpointError, match="no permission"):
        convert(tmp_path / "in.pt", tmp_path / "out.pt", "fp32")


def test_without_safetensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file(_flat(), tmp_path / "in.safetensors")
    found = builtins.__import__

    def without(name: str, *arguments: Any, **more: Any) -> Any:
        if name.startswith("safetensors"):
            raise ImportError(name)
        return found(name, *arguments, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(CheckpointError, match="pip install safetensors"):
        convert(tmp_path / "in.safetensors", tmp_path / "out.safetensors", "fp32")
