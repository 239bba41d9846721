"""Sharded states (DTensor, FSDP2): each process compensates its shard, as it would the whole.

For runtime.residuals.dtensor and stand_in.members.
"""

import contextlib
import io
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from interpreter import without_compiler
from saved import drop_saved_residuals
from storage_runs import compiled
from torch import Tensor
from torch.distributed._functional_collectives import all_gather_tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import collage_fx
from collage_fx.errors import CheckpointError, CollageWarning
from collage_fx.passes.rewrite import roundings
from collage_fx.runtime.residuals.dtensor import shard_of
from collage_fx.runtime.torch_versions import installed
from collage_fx.stand_in.members import Member
from collage_fx.stand_in.repeated_step import RepeatedStep

RANKS, RANK = 3, 2
SHAPES = ((7, 5), (2, 5), (4,), (7, 5)) * 2
"""Shapes: of seven rows the last of three processes has one, of two or four none or one."""
LR = 1e-5


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """One process that takes itself for the last of three; a step needs no other."""
    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=RANKS)
    yield init_device_mesh("cpu", (RANKS,))
    dist.destroy_process_group()


def mine(whole: Tensor) -> Tensor:
    """Return the rows that are this process's."""
    rows = whole.chunk(RANKS)
    return (rows[RANK] if len(rows) > RANK else whole[:0]).clone()


def sharded(whole: Tensor, mesh: DeviceMesh) -> DTensor:
    placed = {"shape": whole.shape, "stride": whole.stride()}
    return DTensor.from_local(mine(whole), mesh, [Shard(0)], run_check=False, **placed)


def values(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).bfloat16() for shape in SHAPES]


def run(optimizer: Any, step: Any, mesh: DeviceMesh | None, first: int = 0, last: int = 6) -> None:
    for k in range(first, last):
        for p, g in zip(optimizer.param_groups[0]["params"], values(100 + k), strict=True):
            p.grad = sharded(g, mesh) if mesh else g
        step()


def make(kind: str, params: list[Tensor], way: str, **options: Any) -> tuple[Any, Any]:
    optimizer: Any = (
        torch.optim.AdamW(params, lr=LR, foreach=way == "shared")
        if kind == "AdamW"
        else torch.optim.SGD(params, lr=LR, momentum=0.9)
    )
    return optimizer, compiled(optimizer, way, level="all", **options)


SLOW = pytest.param({"storage": "remainder16"}, marks=pytest.mark.slow)
BY_CHANCE = {"storage": "ulp8", "stochastic_rounding": True}


@pytest.mark.parametrize("options", [{}, SLOW, BY_CHANCE], ids=str)
@pytest.mark.parametrize(("kind", "way"), [("AdamW", "shared"), ("SGD", "eager")])
@pytest.mark.quick("AdamW-shared-*True}", "SGD-eager-{}")
def test_a_shard_takes_the_steps_of_its_rows(
    kind: str, way: str, options: dict[str, Any], mesh: DeviceMesh
) -> None:
    plain = [v.requires_grad_() for v in values(0)]
    shards = [sharded(v, mesh).requires_grad_() for v in values(0)]
    for params, over in ((plain, None), (shards, mesh)):
        run(*make(kind, params, way, **options), over)
    some = 0
    for p, q in zip(shards, plain, strict=True):
        found = collage_fx.value(p)
        assert isinstance(found, DTensor) and found.placements == (Shard(0),)
        assert found.shape == p.shape and found.to_local().shape == p.to_local().shape
        assert torch.equal(found.to_local(), mine(collage_fx.value(q)))
        lows = [r.to_local() for r in collage_fx.residuals(p) if isinstance(r, DTensor)]
        assert [lo.shape for lo in lows] == [p.to_local().shape]
        some += sum(int(lo.count_nonzero()) for lo in lows)
    assert some > 0


@pytest.mark.skipif(installed() < (2, 13), reason="Dynamo fails itself: see docs/limits.md")
def test_shards_of_many_parameters_share_a_kernel(mesh: DeviceMesh, traced: list[int]) -> None:
    # As FSDP2 hands them in: all gradients of a module are views of one buffer.
    plain = [v.requires_grad_() for v in values(0)]
    shards = [sharded(v, mesh).requires_grad_() for v in values(0)]
    few, step = make("AdamW", shards, "shared")
    buffer = torch.zeros(sum(mine(v).numel() for v in values(0)), dtype=torch.bfloat16)
    pieces = buffer.split([mine(v).numel() for v in values(0)])
    views = [b.view_as(mine(v)) for b, v in zip(pieces, values(0), strict=True)]
    for p, view, v in zip(shards, views, values(0), strict=True):
        placed = {"shape": v.shape, "stride": v.stride()}
        p.grad = DTensor.from_local(view, mesh, [Shard(0)], run_check=False, **placed)
    versions = [p._version for p in shards]
    for k in range(6):
        for view, g in zip(views, values(100 + k), strict=True):
            view.copy_(mine(g))
        step()
    run(*make("AdamW", plain, "shared"), None)
    for p, q in zip(shards, plain, strict=True):
        assert torch.equal(collage_fx.value(p).to_local(), mine(collage_fx.value(q)))
        assert isinstance(few.state[p]["exp_avg"], DTensor) and shard_of(p).grad is None
    assert all(p._version > v for p, v in zip(shards, versions, strict=True))
    # One parameter of each layout, with its gradient and two states, stands for all, those of which
    # this process has no row among them.
    assert traced == [4, 2 * 4]


@pytest.mark.kernels
def test_steps_of_shards_are_repeated_until_something_changes(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[bool] = []

    def spy(self: RepeatedStep, of: Any) -> bool:
        taken.append(original(self, of))
        return taken[-1]

    original = RepeatedStep.run
    monkeypatch.setattr(RepeatedStep, "run", spy)
    whole = [torch.randn(6, 2).bfloat16() for _ in range(9)]
    plain = [v.clone().requires_grad_() for v in whole]
    shards = [sharded(v, mesh).requires_grad_() for v in whole]
    runs = [make("SGD", params, "shared") for params in (plain, shards)]

    def steps(count: int) -> None:
        for _ in range(count):
            grads = [torch.randn(6, 2).bfloat16() for _ in whole]
            for p, q, g in zip(plain, shards, grads, strict=True):
                p.grad, q.grad = g, sharded(g, mesh)
            for _, step in runs:
                step()
        for p, q in zip(plain, shards, strict=True):
            assert torch.equal(collage_fx.value(q).to_local(), mine(collage_fx.value(p)))

    steps(6)
    assert taken and all(taken[-4:])
    version = shards[0]._version
    steps(1)
    assert shards[0]._version > version
    # The shard of a parameter is another one, with other values.
    other = mine(whole[0]).neg()
    shards[0]._local_tensor = other
    with torch.no_grad():
        plain[0].copy_(whole[0].neg())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CollageWarning)
        steps(1)
    assert taken[-2:] == [True, False] or taken[-2:] == [False, False]


def test_shards_that_a_step_reduces_first_do_not_stand_for_the_whole(mesh: DeviceMesh) -> None:
    whole = DTensor.from_local(torch.ones(4), mesh, [Replicate()]).requires_grad_()
    one = Member(whole, torch.optim.SGD([whole]))
    for placement, alike in ((Replicate(), True), (Partial(), False)):
        whole.grad = DTensor.from_local(torch.ones(4), mesh, [placement], run_check=False)
        assert one.is_sharded_alike() == alike


@pytest.mark.slow
def test_every_state_of_the_step_is_in_the_report(mesh: DeviceMesh) -> None:
    shards = [sharded(v, mesh).requires_grad_() for v in values(0)]
    optimizer, step = make("AdamW", shards, "each")
    run(optimizer, step, mesh, 0, 2)
    served = collage_fx.report(step).states
    assert len(served) == 3 * len(SHAPES) and all(s.compensated for s in served)
    assert all(s.graph == 2 and s.joined == 0 for s in served)


@pytest.mark.parametrize(("kind", "way"), [("SGD", "eager"), ("AdamW", "shared")])
@pytest.mark.quick("SGD-eager")
def test_a_resumed_run_is_the_same_and_another_shard_is_refused(
    kind: str, way: str, mesh: DeviceMesh
) -> None:
    shards = [sharded(v, mesh).requires_grad_() for v in values(0)]
    optimizer, step = make(kind, shards, way)
    run(optimizer, step, mesh, 0, 3)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    halfway = [p.detach().clone().requires_grad_() for p in shards]
    run(optimizer, step, mesh, 3, 6)
    for forget in (False, True):
        file.seek(0)
        state = torch.load(file, weights_only=False)
        if forget:
            drop_saved_residuals(state)
        params = [p.detach().clone().requires_grad_() for p in halfway]
        resumed, again = make(kind, params, way)
        said = pytest.warns(CollageWarning, match="holds no residuals")
        with said if forget else contextlib.nullcontext():
            resumed.load_state_dict(state)
        run(resumed, again, mesh, 3, 6)
        pairs = [
            (collage_fx.value(p), collage_fx.value(q)) for p, q in zip(params, shards, strict=True)
        ]
        assert forget != all(torch.equal(a.to_local(), b.to_local()) for a, b in pairs)
    file.seek(0)
    whole, _ = make(kind, [v.requires_grad_() for v in values(0)], "each")
    with pytest.raises(CheckpointError, match="shape"):
        collage_fx.compile(whole)
        whole.load_state_dict(torch.load(file, weights_only=False))


def test_master_weights_go_in_and_out_by_shards(mesh: DeviceMesh) -> None:
    model = torch.nn.Linear(5, 7).bfloat16()
    for name, p in list(model.named_parameters()):
        setattr(model, name, torch.nn.Parameter(sharded(p.detach(), mesh)))
    weights = {n: torch.randn(p.shape) for n, p in model.named_parameters()}
    collage_fx.load_master_weights(model, {n: sharded(w, mesh) for n, w in weights.items()})
    for name, found in collage_fx.master_state_dict(model).items():
        assert isinstance(found, DTensor)
        assert torch.equal(found.to_local(), mine(weights[name]))
        assert not torch.equal(found.to_local(), mine(weights[name]).bfloat16().float())
    with pytest.raises(CheckpointError, match=r"sharded by .* given not sharded"):
        collage_fx.load_master_weights(model, weights)
    copies = {n: DTensor.from_local(w, mesh, [Replicate()]) for n, w in weights.items()}
    with pytest.raises(CheckpointError, match="sharded by"):
        collage_fx.load_master_weights(model, copies)


@pytest.mark.parametrize("known", [True, False])
def test_nothing_reads_what_is_gathered_before_it_has_been_waited_for(
    known: bool, mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step(p: Tensor, g: Tensor) -> None:
        rows = all_gather_tensor(g.bfloat16() * 0.3, 0, mesh)
        p.sub_(rows[: len(p)] * 0.7)

    if not known:
        monkeypatch.setattr(roundings, "_communicates", lambda node: False)
    torch.compiler.reset()
    with without_compiler() as graphs, warnings.catch_warnings():
        warnings.simplefilter("ignore", CollageWarning)
        collage_fx.compile(step)(torch.ones(4), torch.ones(4))
    nodes = [node for graph in graphs for node in graph.graph.nodes]
    (waited,) = (n for n in nodes if "wait_tensor" in str(n.target))
    assert ("all_gather" in str(waited.args[0].target)) == known
    assert any("collage.round" in str(n.target) for n in nodes)
