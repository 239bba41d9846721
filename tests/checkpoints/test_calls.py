"""Ways to save and load an optimizer, and what comes back: the table in docs/checkpoints.md.

Each way gets a run after some steps, and gives a run that goes on. The parameters, the states and
the residuals of three storages, all words, are compared after more steps with the unbroken run's.

For optimizer.checkpoints.state_dicts and docs/checkpoints.md.
"""

import copy
import io
import pickle
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoints import Run, compiled, train, words
from interpreter import without_compiler
from saved import as_format_1
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.optim.lr_scheduler import ConstantLR

from collage_fx.errors import CollageWarning

PAGE = Path(__file__).parents[2] / "docs" / "checkpoints.md"
Way = Callable[[Run, Path], Run]


def plain(seed: int) -> Run:
    run = checkpoints.plain(seed)
    ConstantLR(run[1], factor=1.0)  # one graph: the rate is an input from the first step on
    return run


def by_state_dict(run: Run, _: Path) -> Run:
    again = compiled(plain(1))
    for there, here in zip(again, copy.deepcopy([one.state_dict() for one in run]), strict=True):
        there.load_state_dict(here)
    return again


def by_torch_save(run: Run, folder: Path, change: Callable[[Any], Any] = lambda x: x) -> Run:
    file = folder / "file"
    torch.save([one.state_dict() for one in run], file)
    weights, states = torch.load(file, weights_only=True)
    again = plain(1)
    again[0].load_state_dict(weights)
    again[1].load_state_dict(change(states))  # before collage_fx has seen the optimizer
    return compiled(again)


def by_safetensors(run: Run, folder: Path) -> Run:
    safetensors = pytest.importorskip("safetensors.torch")
    states = run[1].state_dict()
    flat = {f"{i}/{key}": t for i, one in states["state"].items() for key, t in one.items()}
    safetensors.save_file(flat, folder / "states")
    found: dict[int, Any] = {}
    for name, t in safetensors.load_file(folder / "states").items():
        found.setdefault(int(name.partition("/")[0]), {})[name.partition("/")[2]] = t
    again = compiled(plain(1))
    again[0].load_state_dict(run[0].state_dict())
    again[1].load_state_dict({"state": found, "param_groups": states["param_groups"]})
    return again


def by_options(**options: Any) -> Way:
    def way(run: Run, _: Path) -> Run:
        wanted = StateDictOptions(**options)
        weights, states = copy.deepcopy(get_state_dict(*run, options=wanted))
        again = compiled(plain(1))
        set_state_dict(*again, model_state_dict=weights, optim_state_dict=states, options=wanted)
        return again

    return way


def by_dcp(*, asynchronous: bool = False, **options: Any) -> Way:
    def way(run: Run, folder: Path) -> Run:
        wanted = StateDictOptions(**options)
        parts = dict(zip(("model", "optimizer"), get_state_dict(*run, options=wanted), strict=True))
        if asynchronous:
            dcp.async_save(parts, checkpoint_id=folder / "dcp").result()
        else:
            dcp.save(parts, checkpoint_id=folder / "dcp")
        again = compiled(plain(1))
        weights, states = get_state_dict(*again, options=wanted)
        dcp.load({"model": weights, "optimizer": states}, checkpoint_id=folder / "dcp")
        set_state_dict(*again, model_state_dict=weights, optim_state_dict=states, options=wanted)
        return again

    return way


def by_stateful(run: Run, folder: Path) -> Run:
    """The optimizer itself is handed to DCP, which asks it for its state dict."""
    dcp.save({"model": run[0], "optimizer": run[1]}, checkpoint_id=folder / "dcp")
    again = compiled(plain(1))
    get_state_dict(*again)  # makes the states
    dcp.load({"model": again[0], "optimizer": again[1]}, checkpoint_id=folder / "dcp")
    return again


def by_pickle(run: Run, _: Path) -> Run:
    file = io.BytesIO()
    model, optimizer = run
    pickle.dump((model, optimizer), file)
    file.seek(0)
    return compiled(pickle.load(file))


def from_plain(run: Run, folder: Path) -> Run:
    other = plain(0)
    other[0].load_state_dict(run[0].state_dict())
    train(other, 0, 1)
    return by_state_dict(other, folder)


def from_plain_dcp(**options: Any) -> Way:
    def way(run: Run, folder: Path) -> Run:
        other = plain(0)
        other[0].load_state_dict(run[0].state_dict())
        train(other, 0, 1)
        return by_dcp(**options)(other, folder)

    return way


def into_plain(run: Run, _: Path) -> Run:
    again = plain(1)
    for there, here in zip(again, copy.deepcopy([one.state_dict() for one in run]), strict=True):
        there.load_state_dict(here)
    return again


def back_from_plain(run: Run, folder: Path) -> Run:
    """Steps of plain PyTorch in between, which know nothing of the residuals that they carry."""
    between = into_plain(run, folder)
    train(between, 3, 4)
    return by_torch_save(between, folder)


EQUAL = "equal bit for bit"
ANEW = "high words; residuals begin at zero, with a warning"
WAYS: dict[str, tuple[Way, str]] = {
    "`state_dict()`, `load_state_dict()`": (by_state_dict, EQUAL),
    "`torch.save`, `torch.load(weights_only=True)`, loaded before `compile`": (
        by_torch_save,
        EQUAL,
    ),
    "`safetensors`, the states of each parameter": (by_safetensors, EQUAL),
    "`get_state_dict`, `set_state_dict`": (by_options(), EQUAL),
    "... `flatten_optimizer_state_dict=True`": (
        by_options(flatten_optimizer_state_dict=True),
        EQUAL,
    ),
    "... `full_state_dict=True`": (by_options(full_state_dict=True), EQUAL),
    "... and `cpu_offload=True`": (by_options(full_state_dict=True, cpu_offload=True), EQUAL),
    "... and `broadcast_from_rank0=True`": (
        by_options(full_state_dict=True, broadcast_from_rank0=True),
        EQUAL,
    ),
    "`dcp.save`, `dcp.load`": (by_dcp(), EQUAL),
    "... of flattened states": (by_dcp(flatten_optimizer_state_dict=True), EQUAL),
    "... of the optimizer itself": (by_stateful, EQUAL),
    "`dcp.async_save`": (by_dcp(asynchronous=True), EQUAL),
    "`copy.deepcopy`": (lambda run, _: compiled(copy.deepcopy(run)), EQUAL),
    "`pickle`": (by_pickle, EQUAL),
    "a checkpoint of format 1": (lambda run, f: by_torch_save(run, f, as_format_1), EQUAL),
    "a checkpoint of plain PyTorch, here": (from_plain, ANEW),
    "... by `dcp.load`, after `compile`": (from_plain_dcp(), ANEW),
    "... and its states flattened": (from_plain_dcp(flatten_optimizer_state_dict=True), ANEW),
    "our checkpoint, in plain PyTorch": (into_plain, "high words"),
    "... and back again": (back_from_plain, ANEW),
}


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    """A process group of one process, which some of the calls ask for."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def unbroken(group: None) -> Iterator[tuple[Run, list[Tensor], list[Tensor]]]:
    """A run after three steps, its words then, and those after six."""
    with without_compiler():
        run = compiled(plain(0))
        train(run, 0, 3)
        halfway = copy.deepcopy(run)
        at = words(run)
        train(run, 3, 6)
        yield compiled(halfway), at, words(run)


MORE = (
    "... and `cpu_offload=True`",
    "... of flattened states",
    "... and its states flattened",
    "`pickle`",
    "`dcp.async_save`",
)
"""Ways for `make test-all`, each much like another."""


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n in MORE else []) for n in WAYS]
)
@pytest.mark.quick("`get_state_dict`*", "a checkpoint*")
def test_what_comes_back(
    name: str, unbroken: tuple[Run, list[Tensor], list[Tensor]], tmp_path: Path
) -> None:
    way, outcome = WAYS[name]
    run, before, after = unbroken
    with without_compiler(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        again = way(run, tmp_path)
        if outcome == EQUAL:
            assert all(map(torch.equal, words(again), before))
        train(again, 3, 6)
    said = [str(w.message) for w in caught if w.category is CollageWarning]
    found = words(again)
    if outcome == EQUAL:
        assert not said and len(found) == len(after)
        assert all(map(torch.equal, found, after))
    else:
        assert len(said) == (outcome == ANEW)
        assert len(found) != len(after) or not all(map(torch.equal, found, after))
    assert all(map(torch.equal, words(run), before))


def test_the_table_is_in_the_docs() -> None:
    rows = [f"| {name} | {outcome} |" for name, (_, outcome) in WAYS.items()]
    assert "\n".join(["| saved and loaded by | what comes back |", "|---|---|", *rows]) in (
        PAGE.read_text()
    )
