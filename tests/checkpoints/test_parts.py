"""Parts of a model with an optimizer each, as pipeline stages and torchtitan's container have them.

The container merges the flattened state dicts of all its optimizers, and gives each the whole. A
checkpoint of two parts goes on as one part, and the other way round.

For hooks.distributed_state_dicts.
"""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoints import STORAGES
from interpreter import without_compiler
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

import collage_fx

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
LAYERS = 4

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(autouse=True)
def _interpreted() -> Iterator[None]:
    with without_compiler():
        yield


class Container:
    """The optimizers of some parts, as one Stateful: what torchtitan calls, as it calls it."""

    def __init__(self, parts: list[nn.Module]) -> None:
        self.parts = parts
        self.optimizers = [AdamW(part.parameters(), lr=1e-3) for part in parts]
        for one in self.optimizers:
            collage_fx.compile_(one, storage=STORAGES, level="all")
        self.schedulers = [LambdaLR(one, lambda k: 1 / (k + 1)) for one in self.optimizers]

    def state_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for part, optimizer in zip(self.parts, self.optimizers, strict=True):
            found |= get_optimizer_state_dict(part, optimizer, options=FLAT)
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, optimizer in zip(self.parts, self.optimizers, strict=True):
            set_optimizer_state_dict(part, optimizer, state_dict, options=FLAT)


class Models:
    """The parts, as one Stateful."""

    def __init__(self, seed: int, cuts: list[int]) -> None:
        torch.manual_seed(seed)
        layers = {str(k): nn.Linear(3 + k, 4 + k) for k in range(LAYERS)}
        ends = zip([0, *cuts], [*cuts, LAYERS], strict=True)
        self.parts: list[nn.Module] = [
            nn.ModuleDict({str(k): layers[str(k)] for k in range(a, b)}).bfloat16() for a, b in ends
        ]

    def state_dict(self) -> dict[str, Any]:
        return {k: v for part in self.parts for k, v in get_model_state_dict(part).items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part in self.parts:
            mine = {k: state_dict[k] for k, _ in part.named_parameters()}
            set_model_state_dict(part, mine)


def train(models: Models, container: Container, first: int, last: int) -> None:
    for k in range(first, last):
        generator = torch.Generator().manual_seed(k)
        for part in models.parts:
            for p in part.parameters():
                p.grad = torch.randn(p.shape, generator=generator).bfloat16()
        for optimizer, scheduler in zip(container.optimizers, container.schedulers, strict=True):
            optimizer.step()
            scheduler.step()


def words(models: Models, container: Container) -> dict[str, list[Tensor]]:
    return {
        name: [
            word.detach().clone()
            for t in (p, *optimizer.state[p].values())
            for word in (t, *collage_fx.residuals(t))
        ]
        for part, optimizer in zip(models.parts, container.optimizers, strict=True)
        for name, p in part.named_parameters()
    }


@pytest.mark.slow
@pytest.mark.parametrize(("saved", "loaded"), [([2], []), ([], [1, 3]), ([2], [1])])
def test_parts_go_on_as_other_parts(saved: list[int], loaded: list[int], tmp_path: Path) -> None:
    models = Models(0, saved)
    container = Container(models.parts)
    train(models, container, 0, 3)
    dcp.save({"model": models, "optimizer": container}, checkpoint_id=tmp_path)
    schedule = copy.deepcopy(container.schedulers[0].state_dict())
    train(models, container, 3, 5)

    others = Models(1, loaded)
    again = Container(others.parts)
    dcp.load({"model": others, "optimizer": again}, checkpoint_id=tmp_path)
    for scheduler in again.schedulers:
        scheduler.load_state_dict(schedule)
    train(others, again, 3, 5)
    found, expected = words(others, again), words(models, container)
    assert found.keys() == expected.keys()
    for name, here in expected.items():
        assert all(map(torch.equal, found[name], here)), name
        assert len(here) == len(found[name]) >= 6
