"""Checkpoints that do not fit or are damaged: an error by name before anything has changed.

For optimizer.checkpoints.reading and optimizer.checkpoints.giving.
"""

import copy
import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoints import Run, compiled, plain, train, words
from interpreter import without_compiler
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from collage_fx.errors import CheckpointError, CollageWarning

States = dict[str, Any]
WORDS = "collage_fx.<param>.remainder16.0"


@pytest.fixture(autouse=True, scope="module")
def _interpreted() -> Iterator[None]:
    with without_compiler():
        yield


@pytest.fixture(scope="module")
def run() -> Run:
    found = compiled(plain(0))
    train(found, 0, 3)
    return found


def replace(key: str, change: Callable[[Tensor], Any]) -> Callable[[States], None]:
    def damage(states: States) -> None:
        states["state"][0][key] = change(states["state"][0][key])

    return damage


def rename(key: str, other: str) -> Callable[[States], None]:
    def damage(states: States) -> None:
        states["state"][0][other] = states["state"][0].pop(key)

    return damage


def of_no_state(states: States) -> None:
    for part in ("0", "rows"):
        rename(f"collage_fx.exp_avg.mcf2.{part}", f"collage_fx.exp_max.mcf2.{part}")(states)


def newer(states: States) -> None:
    for group in states["param_groups"]:
        group["collage_fx"] = json.dumps({"format": 3, "needs": "0.7"})


def garbled(states: States) -> None:
    states["param_groups"][0]["collage_fx"] = '{"format": 2, "nee'


DAMAGES: dict[str, tuple[Callable[[States], None], str]] = {
    "shape": (
        replace(WORDS, lambda t: t[:3]),
        r"parameter 0\.weight is .*\(9, 6\); its residual is .*\(3, 6\)",
    ),
    "dtype": (
        replace("collage_fx.exp_avg.mcf2.0", lambda t: t.float() / 3),
        r"exp_avg of parameter 0\.weight is torch\.bfloat16.*its residual is torch\.float32",
    ),
    "storage": (
        rename(WORDS, "collage_fx.<param>.remainder24.0"),
        r"remainder24",
    ),
    "count": (rename(WORDS, "collage_fx.<param>.remainder16.rows"), r"given 0 residual"),
    "state": (of_no_state, r"exp_max of parameter 0\.weight, which does not exist"),
    "no tensor": (replace(WORDS, lambda t: 5), r"cannot be read: 5"),
    "no number": (rename(WORDS, "collage_fx.<param>.remainder16.x"), r"cannot be read"),
    "newer": (newer, r"format 3; .*formats 1 and 2\. collage_fx 0\.7 reads it: update"),
    "garbled": (garbled, r"cannot be read: '{\"format\": 2"),
}


def damaged(name: str, run: Run) -> tuple[States, str]:
    damage, message = DAMAGES[name]
    states = copy.deepcopy(run[1].state_dict())
    damage(states)
    return states, message


def test_it_is_refused_by_name(run: Run) -> None:
    """All of them by one run, which goes on after each: it is compiled once."""
    other = compiled(plain(1))
    train(other, 0, 2)
    for name in DAMAGES:
        states, message = damaged(name, run)
        before = words(other)
        with pytest.raises(CheckpointError, match=message):
            other[1].load_state_dict(states)
        assert all(map(torch.equal, words(other), before)), name
        with warnings.catch_warnings():
            warnings.simplefilter("error", CollageWarning)
            train(other, 2, 3)


# PyTorch casts a dtype back: the checksums find it then, see test_storage_limits.
@pytest.mark.parametrize("name", [name for name in DAMAGES if name != "dtype"])
@pytest.mark.quick("shape", "storage", "count", "no number", "newer")
def test_it_is_refused_when_the_optimizer_is_compiled_after_it(name: str, run: Run) -> None:
    states, message = damaged(name, run)
    late = plain(1)
    late[1].load_state_dict(states)
    with pytest.raises(CheckpointError, match=message):
        compiled(late)


def test_edited_words_are_found_by_the_next_step(run: Run) -> None:
    """One bit of one word; the rest comes back."""
    states = copy.deepcopy(run[1].state_dict())
    states["state"][0][WORDS].view(torch.int16)[2, 3] ^= 1
    other = compiled(plain(1))
    other[0].load_state_dict(run[0].state_dict())
    other[1].load_state_dict(states)
    with pytest.warns(CollageWarning, match=r"0\.weight was cleared.*not as they were saved"):
        train(other, 3, 4)


def test_states_of_another_step_than_the_weights_are_found(run: Run) -> None:
    later = copy.deepcopy(run)
    train(compiled(later), 3, 4)
    other = compiled(plain(1))
    other[0].load_state_dict(later[0].state_dict())
    other[1].load_state_dict(copy.deepcopy(run[1].state_dict()))
    with pytest.warns(CollageWarning, match="not as they were saved"):
        train(other, 4, 5)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_load_that_breaks_off_leaves_no_words_of_another_value(run: Run, tmp_path: Path) -> None:
    """DCP writes into the tensors of a state dict: the residual of one that it has not reached."""
    dcp.save({"o": get_state_dict(*run)[1]}, checkpoint_id=tmp_path)
    other = compiled(copy.deepcopy(run))
    train(other, 3, 4)
    states = get_state_dict(*other)[1]["state"]
    only = {"o": {"state": {"0.weight": {WORDS: states["0.weight"][WORDS]}}}}
    dcp.load(only, checkpoint_id=tmp_path)
    with pytest.warns(CollageWarning, match="not loaded to its end") as caught:
        train(other, 4, 5)
    assert len(caught) == 1 and "0.weight was cleared" in str(caught[0].message)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_residual_of_which_dcp_finds_a_part_is_refused(run: Run, tmp_path: Path) -> None:
    """The part is loaded, and does not fit; where there is none the residual begins at zero."""
    states = get_state_dict(*run)[1]
    del states["state"]["0.weight"][WORDS]
    dcp.save({"o": states}, checkpoint_id=tmp_path)
    other = compiled(copy.deepcopy(run))
    train(other, 3, 4)
    model, states = get_state_dict(*other)
    dcp.load({"o": states}, checkpoint_id=tmp_path)
    with pytest.raises(CheckpointError, match=r"parameter 0\.weight was given 0 residual"):
        set_state_dict(*other, model_state_dict=model, optim_state_dict=states)


def test_a_truncated_file_changes_nothing(run: Run, tmp_path: Path) -> None:
    torch.save(run[1].state_dict(), tmp_path / "file")
    content = (tmp_path / "file").read_bytes()
    (tmp_path / "file").write_bytes(content[: len(content) // 2])
    before = words(run)
    with pytest.raises((RuntimeError, OSError)):
        run[1].load_state_dict(torch.load(tmp_path / "file", weights_only=True))
    assert all(map(torch.equal, words(run), before))
