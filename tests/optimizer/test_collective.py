"""Steps that communicate, in two processes: what each sends and receives, and what it keeps.

For step.distributed_wrappers.
"""

import contextlib
import copy
import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from interpreter import without_compiler
from saved import drop_saved_residuals, saved_residuals
from tensors import with_grads
from torch import Tensor
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.multiprocessing.spawn import start_processes

import collage_fx
from collage_fx.errors import CollageWarning

RANKS, STEPS, LR = 2, 10, 1e-2


def params() -> list[Tensor]:
    return [(torch.arange(1, 5 + k) / 4).bfloat16().requires_grad_() for k in range(4)]


def train(step: Any, given: list[Tensor], steps: int = STEPS) -> list[str]:
    """Take steps; return the warnings of collage_fx."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for k in range(steps):
            torch.manual_seed(k)
            with_grads(given)
            step()
    return [str(w.message) for w in caught if issubclass(w.category, CollageWarning)]


class Shared(torch.optim.Optimizer):
    """Each process updates every other parameter, and sends it to the other process."""

    def __init__(self, params: list[Tensor], late: bool = True) -> None:
        super().__init__(params, {"lr": LR})
        self.late = late

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        pending = []
        for group in self.param_groups:
            for k, p in enumerate(group["params"]):
                if k % RANKS == dist.get_rank():
                    p.sub_(p.grad, alpha=group["lr"])
                if self.late:
                    pending.append(dist.broadcast(p.data, src=k % RANKS, async_op=True))
                else:
                    dist.broadcast(p, src=k % RANKS)
        for one in pending:
            one.wait()


class Alike(torch.optim.SGD):
    """Both processes update all, and take the mean of what they got."""

    def step(self) -> None:  # type: ignore[override]
        super().step()
        for p in self.param_groups[0]["params"]:
            dist.all_reduce(p.data, op=dist.ReduceOp.SUM)
            p.data.div_(RANKS)


def options(kind: str) -> dict[str, Any]:
    """In `wide` a step that is recorded is bit-equal to one that Dynamo traces."""
    return {"arithmetic": "wide"} if kind in ("shared", "in turn") else {}


def run(kind: str) -> dict[str, Any]:
    torch.compiler.reset()
    own = params()
    if kind in ("zero", "assigned"):
        optimizer: Any = ZeroRedundancyOptimizer(own, torch.optim.AdamW, lr=LR)
    else:
        optimizer = Alike(own, lr=LR) if kind == "alike" else Shared(own)
        optimizer.late = kind == "shared"
    step: Any = collage_fx.compile(optimizer, level="plus", **options(kind))
    if kind == "assigned":
        optimizer.step = step
        scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
        step = lambda: (optimizer.step(), scheduler.step())  # noqa: E731
    found: dict[str, Any] = {
        "warnings": train(step, own),
        "high": [p.detach().clone() for p in own],
    }
    found["values"] = [collage_fx.value(p) for p in own]
    found["residuals"] = [len(collage_fx.residuals(p)) for p in own]
    if kind == "assigned":
        found["report"] = str(collage_fx.report(optimizer))
        found["explained"] = str(collage_fx.explain(optimizer))
        found["saved"] = len(saved_residuals(optimizer.optim.state_dict()))
        found["resumed"] = resumed(optimizer, own)
    return found


def resumed(optimizer: Any, own: list[Tensor]) -> tuple[Any, ...]:
    """The values of a run that goes on, of two that go on from its gathered states, the second
    without residuals, and how many of these there were."""
    optimizer.consolidate_state_dict(to=0)
    saved = [copy.deepcopy(optimizer.state_dict()) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(saved, src=0)
    weights = [p.detach().clone() for p in own]
    train(optimizer.step, own)
    states: dict[str, Any] = saved[0]  # type: ignore[assignment]
    results = []
    for forget in (False, True):
        copies = [w.clone().requires_grad_() for w in weights]
        other: Any = ZeroRedundancyOptimizer(copies, optimizer_class=torch.optim.AdamW, lr=LR)
        other.step = collage_fx.compile(other, level="plus", **options("assigned"))
        torch.optim.lr_scheduler.ConstantLR(other, 1.0)
        given = copy.deepcopy(states)
        if forget:
            drop_saved_residuals(given)
        said = pytest.warns(CollageWarning, match="holds no residuals")
        with said if forget else contextlib.nullcontext():
            other.load_state_dict(given)
        train(other.step, copies)
        results.append(whole(copies, other))
    residuals = sum(len(one) for one in saved_residuals(states).values())
    return whole(own, optimizer), *results, residuals


def whole(own: list[Tensor], optimizer: Any) -> list[Tensor]:
    """The whole values of the parameters that this process updates."""
    mine = {id(p) for group in optimizer.optim.param_groups for p in group["params"]}
    return [collage_fx.value(p).detach() for p in own if id(p) in mine]


def work(rank: int, folder: str, kind: str) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    with without_compiler():
        torch.save(run(kind), f"{folder}/{rank}")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[dict[str, Any]]]:
    """Return what each process has found of a kind."""

    @functools.cache
    def of(kind: str) -> list[dict[str, Any]]:
        folder = tmp_path_factory.mktemp("processes")
        # Forked, since each would import and warm up all that this process has.
        start_processes(work, args=(str(folder), kind), nprocs=RANKS, start_method="fork")
        return [torch.load(Path(folder) / str(rank)) for rank in range(RANKS)]

    return of


def alone(kind: str) -> list[Tensor]:
    """The parameters of one process that does all by itself."""
    own = params()
    optimizer: Any = torch.optim.AdamW(own, lr=LR)
    if kind in ("shared", "in turn"):
        optimizer = torch.optim.SGD(own, lr=LR)
    step = collage_fx.compile(optimizer, level="plus", **options(kind))
    if kind == "assigned":  # with a scheduler, by which a rate is an input of the graph
        optimizer.step = step
        torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
        step = optimizer.step
    assert not train(step, own)
    return own


@pytest.mark.parametrize("kind", ["zero", "assigned", "shared", "in turn"])
@pytest.mark.quick("shared")
def test_each_process_has_all_updates_and_the_residuals_of_its_own(
    found: Callable[[str], list[dict[str, Any]]], kind: str
) -> None:
    expected, processes = alone(kind), found(kind)
    moved = [not torch.equal(e, p) for e, p in zip(expected, params(), strict=True)]
    assert all(moved)
    for one in processes:
        assert not one["warnings"]
        assert all(torch.equal(h, e) for h, e in zip(one["high"], expected, strict=True))
        kept = [k for k, n in enumerate(one["residuals"]) if n]
        assert len(kept) == len(expected) // RANKS
        for k in kept:
            assert torch.equal(one["values"][k], collage_fx.value(expected[k]))
    both = [one["residuals"] for one in processes]
    assert [a + b for a, b in zip(*both, strict=True)] == [1] * len(expected)


@pytest.mark.slow
def test_the_optimizer_within_is_the_one_that_is_reported_and_saved(
    found: Callable[[str], list[dict[str, Any]]],
) -> None:
    first, _ = found("assigned")
    assert "AdamW in ZeroRedundancyOptimizer" in first["report"]
    assert "exp_avg_sq" in first["report"]
    assert "collage_fx: AdamW, level=plus" in first["explained"] and first["saved"] == 2


def test_the_gathered_states_have_all_residuals(
    found: Callable[[str], list[dict[str, Any]]],
) -> None:
    """A run that goes on from them has the whole values of the one that did not stop."""
    for one in found("assigned"):
        went_on, again, forgot, residuals = one["resumed"]
        assert residuals == 2 * len(params())  # of each parameter and its second moment
        assert all(map(torch.equal, went_on, again))
        assert not all(map(torch.equal, went_on, forgot))


@pytest.mark.slow
def test_states_that_come_from_elsewhere_lose_their_residuals_not_in_silence(
    found: Callable[[str], list[dict[str, Any]]],
) -> None:
    plain = params()
    train(torch.optim.SGD(plain, lr=LR).step, plain)
    for one in found("alike"):
        assert any("its residual begins anew" in message for message in one["warnings"])
        assert all(torch.equal(a, b) for a, b in zip(one["high"], plain, strict=True))


class Averager:
    """Averages over no processes."""

    step = 0

    def average_parameters(self, params: Any) -> None:
        pass


def test_what_only_wraps_an_optimizer_takes_steps_and_is_resumed() -> None:
    """PostLocalSGDOptimizer is made without Optimizer.__init__, and has none of its hooks."""

    def trained(resumed: bool) -> list[Tensor]:
        given = params()

        def wrapped() -> Any:
            optimizer = PostLocalSGDOptimizer(torch.optim.SGD(given, lr=1e-4), Averager())
            collage_fx.compile_(optimizer)
            return optimizer

        with without_compiler():
            optimizer = wrapped()
            train(optimizer.step, given)
            if resumed:
                saved = copy.deepcopy(optimizer.state_dict())
                optimizer = wrapped()
                optimizer.load_state_dict(saved)
            train(optimizer.step, given)
        return [collage_fx.value(p).detach() for p in given]

    unbroken = trained(resumed=False)
    assert all(map(torch.equal, trained(resumed=True), unbroken))
    assert all(bool((x != x.bfloat16()).any()) for x in unbroken)
