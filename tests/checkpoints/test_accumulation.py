"""A run that is saved in the middle of accumulation, with its gradients, and goes on from there.

For optimizer.checkpoints.state_dicts.
"""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoints import STORAGES, Run, words
from interpreter import without_compiler
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import SGD, Adafactor, AdamW
from torch.optim.lr_scheduler import ConstantLR

import collage_fx

EACH = 3
"""Number of batches of a step."""
HALF = 2
"""Number of batches after which it is saved."""
KINDS: dict[str, Any] = {
    "AdamW": lambda params: (AdamW(params, lr=1e-3), STORAGES),
    "momentum": lambda params: (SGD(params, lr=1e-2, momentum=0.9), "remainder16"),
    "no states": lambda params: (SGD(params, lr=1e-2), "ulp8"),
}

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(autouse=True)
def _interpreted() -> Iterator[None]:
    with without_compiler():
        yield


def made(kind: str, seed: int) -> Run:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 2)).bfloat16()
    optimizer, storage = KINDS[kind](model.named_parameters())
    collage_fx.compile_(optimizer, storage=storage)
    ConstantLR(optimizer, factor=1.0)  # one graph: the rate is an input from the first step on
    return model, optimizer


def batches(run: Run, first: int, last: int) -> None:
    """Take them up into the gradients, and a step after each few."""
    model, optimizer = run
    for k in range(first, last):
        data = torch.randn(4, 6, generator=torch.Generator().manual_seed(k)).bfloat16()
        model(data).square().mean().backward()
        if (k + 1) % EACH == 0:
            optimizer.step()
            optimizer.zero_grad()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def give(model: nn.Module, found: dict[str, Tensor]) -> None:
    for name, grad in found.items():
        model.get_parameter(name).grad = grad


def by_state_dict(run: Run, again: Run, folder: Path) -> None:
    parts = {"weights": run[0].state_dict(), "grads": gradients(run[0])}
    torch.save({**parts, "states": run[1].state_dict()}, folder / "file")
    saved = torch.load(folder / "file", weights_only=True)
    again[0].load_state_dict(saved["weights"])
    again[1].load_state_dict(saved["states"])
    give(again[0], saved["grads"])


def by_dcp(run: Run, again: Run, folder: Path) -> None:
    weights, states = get_state_dict(*run)
    parts = {"model": weights, "optimizer": states, "grads": gradients(run[0])}
    dcp.save(parts, checkpoint_id=folder / "dcp")
    weights, states = get_state_dict(*again)
    grads = {name: torch.zeros_like(p) for name, p in again[0].named_parameters()}
    dcp.load({"model": weights, "optimizer": states, "grads": grads}, checkpoint_id=folder / "dcp")
    set_state_dict(*again, model_state_dict=weights, optim_state_dict=states)
    give(again[0], grads)


CASES = [("AdamW", by_state_dict, 2), ("momentum", by_dcp, 3)]
# Before the first step get_state_dict() has no states, and dcp.load() of PyTorch wants some.
MORE = [
    (kind, way, after)
    for kind in KINDS
    for way in (by_state_dict, by_dcp)
    for after in (0, 2, 3)
    if (after or way is by_state_dict) and (kind, way, after) not in CASES
]


@pytest.mark.parametrize(
    ("kind", "way", "after"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)],
)
@pytest.mark.quick("momentum-*")
def test_it_goes_on_as_the_unbroken_one(kind: str, way: Any, after: int, tmp_path: Path) -> None:
    middle, end = after * EACH + HALF, (after + 3) * EACH
    run, again = made(kind, 0), made(kind, 1)
    batches(run, 0, middle)
    unsaved = copy.deepcopy(gradients(run[0]))
    way(run, again, tmp_path)
    assert len(unsaved) == 4 and all(map(torch.equal, unsaved.values(), gradients(run[0]).values()))
    batches(again, middle, end)
    batches(run, middle, end)
    assert all(map(torch.equal, words(again), words(run)))


@pytest.mark.slow
def test_without_its_gradients_it_is_another(tmp_path: Path) -> None:
    """The control."""
    run, again = made("AdamW", 0), made("AdamW", 1)
    batches(run, 0, EACH + HALF)
    by_state_dict(run, again, tmp_path)
    again[1].zero_grad()
    batches(again, EACH + HALF, 3 * EACH)
    batches(run, EACH + HALF, 3 * EACH)
    assert not all(map(torch.equal, words(again), words(run)))


@pytest.mark.parametrize(
    ("make", "after"), [(KINDS["momentum"], 1), (lambda p: (Adafactor(p, lr=1e-2), "mcf2"), 2)]
)
@pytest.mark.quick("<lambda>-1")
def test_get_state_dict_takes_no_step_of_a_run(make: Any, after: int) -> None:
    """In a run that has not begun it takes one: averages would decay, and gradients be lost."""
    model = nn.Linear(6, 2).bfloat16()
    optimizer, storage = make(model.named_parameters())
    collage_fx.compile_(optimizer, storage=storage)
    batches((model, optimizer), 0, after * EACH + HALF)
    before, grads = words((model, optimizer)), copy.deepcopy(gradients(model))
    get_state_dict(model, optimizer)
    assert all(map(torch.equal, words((model, optimizer)), before))
    assert len(grads) == 2 and all(map(torch.equal, grads.values(), gradients(model).values()))
